"""Sampling: requests become sequences, decoded together over a cache of keys and values."""
