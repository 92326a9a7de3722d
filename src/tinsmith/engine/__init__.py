"""Engines: what does the mathematics of the service.

`base` is the interface and the only module a caller needs to know; `fake` serves tests and
demonstrations without torch; `local` trains and samples with PyTorch in a process of its own.
"""
