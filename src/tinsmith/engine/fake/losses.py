"""The losses of the fake engine: the public formulas, each with its slope by the log-probability.

The real engine leaves slopes to autograd; here they are written out, which is why each function
returns the loss and the slopes together. What a loss reads is in `loss_table`; inputs have been
checked.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinsmith.engine.fake.model import Array

LARGEST_LOSS = float(np.finfo(np.float32).max)
"""As in the real engine, so that both refuse the same data."""


def cross_entropy(policy: Array, *, weights: Array | None = None) -> tuple[float, Array]:
    slopes = -np.ones_like(policy) if weights is None else -weights.astype(np.float64)
    return float((policy * slopes).sum()), slopes


def importance_sampling(
    policy: Array, *, logprobs: Array, advantages: Array
) -> tuple[float, Array]:
    slopes = -_ratio(policy - logprobs, advantages) * advantages
    return float(slopes.sum()), slopes


def _clipped(
    ratio: Array, advantages: Array, low: Array | float, high: Array | float
) -> tuple[float, Array]:
    whole, bounded = ratio * advantages, np.clip(ratio, low, high) * advantages
    return float(-np.minimum(whole, bounded).sum()), np.where(whole <= bounded, -whole, 0.0)


def ppo(
    policy: Array,
    *,
    logprobs: Array,
    advantages: Array,
    clip_low_threshold: Array | float,
    clip_high_threshold: Array | float,
) -> tuple[float, Array]:
    ratio = _ratio(policy - logprobs, advantages)
    return _clipped(ratio, advantages, clip_low_threshold, clip_high_threshold)


def cispo(
    policy: Array,
    *,
    logprobs: Array,
    advantages: Array,
    clip_low_threshold: Array | float,
    clip_high_threshold: Array | float,
) -> tuple[float, Array]:
    ratio = np.clip(_ratio(policy - logprobs, advantages), clip_low_threshold, clip_high_threshold)
    return float(-(ratio * (policy * advantages)).sum()), -ratio * advantages


def dro(policy: Array, *, logprobs: Array, advantages: Array, beta: float) -> tuple[float, Array]:
    distance = policy - logprobs
    loss = -(policy * advantages - 0.5 * beta * distance**2).sum()
    return float(loss), -(advantages - beta * distance)


def gspo(
    policy: Array,
    *,
    logprobs: Array,
    advantages: Array,
    sequence_ratio_mask: Array,
    clip_low_threshold: Array | float,
    clip_high_threshold: Array | float,
) -> tuple[float, Array]:
    masked = sequence_ratio_mask != 0
    mean = (policy - logprobs)[masked].mean()
    ratio = _ratio(np.full_like(policy, mean), advantages)
    return _clipped(ratio, advantages, clip_low_threshold, clip_high_threshold)


def _ratio(log_ratio: Array, advantages: Array) -> Array:
    """exp(log_ratio), and 1 for tokens without advantage, whose ratio may be beyond all bounds."""
    ratio: Array = np.exp(np.where(advantages != 0, log_ratio, 0.0))
    return ratio


LOSSES: dict[str, Callable[..., tuple[float, Array]]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
