"""Layers with a state of fixed size in place of attention: delta rule and Mamba-2."""
