"""Attention of kinds that one call of torch does not have."""
