"""Engines: what does the mathematics of the service.

`base` is the interface and the only module a caller needs to know; `fake` serves tests and
demonstrations without torch; `local` trains and samples with PyTorch in a process of its own.
`remote` has local engines on other machines, which connect to the server, and `ray` brings them
there. What fake and local have in common is here; what has one role in both has one name: `config`,
`engine`, `model`, `losses`, `sample`, `adapter_files`.
"""
