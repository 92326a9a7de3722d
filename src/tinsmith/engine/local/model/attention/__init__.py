"""Attention that is computed here."""
