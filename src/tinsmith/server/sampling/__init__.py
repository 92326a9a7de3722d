"""Sampling requests, and the samplers whose weights they use."""
