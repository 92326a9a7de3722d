"""The learning rate over a run."""

from __future__ import annotations


def learning_rate(peak: float, step: int, num_steps: int, warm_up_steps: int) -> float:
    """Rises to `peak` over the first steps, then falls in a line to nearly nothing at the last."""
    if step < warm_up_steps:
        return peak * (step + 1) / warm_up_steps
    return peak * (1 - (step - warm_up_steps) / max(num_steps - warm_up_steps, 1))
