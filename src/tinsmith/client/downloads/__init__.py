"""Checkpoints as files on this machine."""
