"""Waiting for what was promised: polls, retries, streams."""
