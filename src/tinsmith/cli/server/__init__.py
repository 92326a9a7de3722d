"""A server on this machine: its process, its keys, its metrics."""
