"""Numbers inside the service that no user sets: how often it looks, how long it waits, how much it
keeps of what the store has as well. Tests give others; users' settings are in `config`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    housekeeping_seconds: float = 5.0
    """How often expiry, sweeping and counting have their turn."""

    health_seconds: float = 1.0
    """How often an engine that nobody talks to is asked whether it lives."""

    models_seconds: float = 1.0
    """How often a scheduler looks at all models: time alone ends gaps and makes snapshots due."""

    short_batch_seconds: float = 0.05
    """A batch that is expected to take less, and has not taken more, is waited for: those who come
    meanwhile gather, and the next batch is the more efficient."""

    batch_bytes: int = 64 * 1024 * 1024
    """Of the requests in one batch, which are all in memory while it runs. A few tokens may come
    with very many bytes; a larger request runs alone."""

    history_bytes: int = 64 * 1024 * 1024
    """Of all histories that were read with their models; and as much of requests that were read
    with them and wait."""

    many_cells: int = 2**16
    """An answer with so many likeliest tokens and alternatives is written in a thread."""

    count_pause: float = 20.0
    """Between two countings of the metadata of an owner who has no room left pass so many times
    what one takes: it looks at all that he has, and he may ask as often as he likes."""

    repeated_steps: int = 2000
    """Most steps that a reader of the console's events who was away is told; who missed more begins
    again."""

    pending_bytes: int = 2**20
    """Events that wait for a reader; who has more does not read, and is let go."""


TUNING = Tuning()
