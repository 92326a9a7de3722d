"""Bytes to the server and back: HTTP, retry, rate limits, connection classes.

    retry.Retrying ( tokens.Authenticating ( http.Http ) )

Each is a `Transport`: a request goes in, a response comes out or an error of `tinsmith.errors` is
raised. What the bytes mean is for the client; the HTTP library is named in `http` alone.
"""
