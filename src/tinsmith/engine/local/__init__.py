"""The PyTorch engine: base models, adapters that train on them, and sampling, in its own process.

Importing this package imports no torch; `engine` is the caller's half, `core` the process's.
"""
