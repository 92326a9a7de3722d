"""Latent attention: one small vector of a token, from which every head has its key and value."""
