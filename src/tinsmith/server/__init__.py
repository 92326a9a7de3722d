"""The service: an ASGI application that records, orders and carries out what clients ask.

It knows engines by `tinsmith.engine.base` alone; which engine it gets is decided in
`tinsmith.assembly`.
"""
