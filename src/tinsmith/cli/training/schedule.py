"""The learning rate over a run."""

from __future__ import annotations

import math

SCHEDULES = ("linear", "cosine", "constant")


def learning_rate(
    peak: float, step: int, num_steps: int, warm_up_steps: int, schedule: str = "linear"
) -> float:
    """Rises to `peak` over the first steps; then it stays there, or falls to nearly nothing.

    >>> [round(learning_rate(1.0, step, 4, 1, "cosine"), 2) for step in range(4)]
    [1.0, 1.0, 0.75, 0.25]
    """
    if step < warm_up_steps:
        return peak * (step + 1) / warm_up_steps
    share = (step - warm_up_steps) / max(num_steps - warm_up_steps, 1)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * share)) / 2
    return peak * (1.0 if schedule == "constant" else 1 - share)
