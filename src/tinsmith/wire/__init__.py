"""Messages as bytes: `json` for control messages, `proto` for tensors, `dialects` for old clients.

`zstd` undoes and applies the compression of request bodies, `schema` describes every message.
"""
