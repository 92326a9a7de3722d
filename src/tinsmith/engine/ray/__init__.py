"""Engines on a Ray cluster: Ray decides where they run, and nothing else."""
