"""Engines on a Ray cluster: where they run is for Ray to say, and nothing else is."""
