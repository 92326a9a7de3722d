"""Joining the outputs of a call's chunks as if it had been one request.

A metric's name says how its values combine: `loss:sum`, `entropy:mean`, … Means are weighted by
how many examples each chunk had. Metrics that a chunk lacks, or whose rule is not known, are left
out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from tinsmith.types import ForwardBackwardOutput

logger = logging.getLogger(__name__)

_64_BITS = (1 << 64) - 1

Reduce = Callable[[Sequence[float], Sequence[int]], float]


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    if not outputs:
        return ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[], metrics={})
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[each for output in outputs for each in output.loss_fn_outputs],
        metrics=combine_metrics(
            [output.metrics for output in outputs],
            [len(output.loss_fn_outputs) for output in outputs],
        ),
    )


def combine_metrics(metrics: Sequence[dict[str, float]], counts: Sequence[int]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for key in metrics[0]:
        name, _, rule = key.partition(":")
        if not rule or ":" in rule:
            raise ValueError(f"metric {key!r} must be named <name>:<rule>, as in 'loss:sum'")
        values = [each[key] for each in metrics if key in each]
        if len(values) < len(metrics):
            continue
        if rule == "unique":
            combined[key] = values[0]
            combined |= {f"{key}_{i}": value for i, value in enumerate(values[1:], start=1)}
        elif rule in _RULES:
            combined[key] = _RULES[rule](values, counts)
        else:
            logger.debug("metric %r is left out: no rule called %r", name, rule)
    return combined


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    return float(np.average(values, weights=counts))


_RULES: dict[str, Reduce] = {
    "mean": _mean,
    "sum": lambda values, counts: float(np.sum(values)),
    "min": lambda values, counts: float(np.min(values)),
    "max": lambda values, counts: float(np.max(values)),
    "slack": lambda values, counts: float(np.max(values)) - _mean(values, counts),
    # A checksum of integers: the sum of their low 64 bits.
    "hash2": lambda values, counts: sum(int(v) & _64_BITS for v in values) & _64_BITS,
}
