"""Which slot: pure choices, made from a few numbers about each.

A model trains in one slot; which one is chosen when it has something to do and is in none. A
sample may run in any slot that samples; those with one prompt's beginning run in one place, so
that its keys and values are found there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

SAMPLING_SLACK = 8
"""How many more jobs than the least busy slot one may have and still be preferred for what it
holds: a batch that size decodes in nearly the time of a single job."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class TrainingPlace(Generic[S]):
    slot: S
    number: int
    is_up: bool
    """Whether it has an engine or is about to have its first: models that come while a server
    starts must not all go to the slot that is up first."""
    num_active: int
    """Models that have had something to do lately."""
    num_models: int
    has_base: bool
    """Whether the base model is in use there."""


@dataclass(frozen=True, slots=True)
class SamplingPlace(Generic[S]):
    slot: S
    number: int
    is_up: bool
    num_jobs: int
    has_weights: bool
    """Whether the weights that the job needs are there."""


def training_slot(places: Sequence[TrainingPlace[S]]) -> S:
    """The slot that works for the fewest models; among equals, where the base model is in use."""
    best = min(
        places,
        key=lambda p: (not p.is_up, p.num_active, not p.has_base, p.num_models, p.number),
    )
    return best.slot


def sampling_slot(places: Sequence[SamplingPlace[S]], prefix: bytes) -> S:
    """A slot that has the weights, unless another has much less to do; for jobs with the same
    `prefix` the same one. Slots that come or go move the prefixes of no others."""
    up = [place for place in places if place.is_up] or places
    fewest = min(place.num_jobs for place in up)
    near = [place for place in up if place.num_jobs <= fewest + SAMPLING_SLACK]
    preferred = [place for place in near if place.has_weights] or near
    return max(preferred, key=lambda p: (zlib.crc32(b"%d " % p.number + prefix), p.number)).slot
