"""What an optimizer step must be, and what it reports, in every engine.

The arithmetic of a step is the engine's; the limits and the names of the metrics are here, so that
a step that one engine refuses is refused by all of them, in the same words.
"""

from __future__ import annotations

import math
import sys

from tinsmith.errors import ValidationError
from tinsmith.types import AdamParams

SMALLEST_EPS = 1e-30
"""Below, float32 would round the denominator of an untouched weight to zero: 0 / 0."""

LARGEST_RATE = 1e4
"""Of `learning_rate` and `weight_decay`. A step moves every weight by about the learning rate: no
model survives even a far smaller one."""

LARGEST_NORM = 1e15
"""Of the update. Weights of that size are not far from overflow in the next forward pass."""

LARGEST_GRADIENT_NORM = 1.8e19
"""Beyond, the squares that Adam keeps overflow in float32."""


def check_adam_params(params: AdamParams) -> None:
    """Refuse numbers with which a step would be meaningless, naming the field."""
    below_one = math.nextafter(1.0, 0.0)
    largest = sys.float_info.max
    for name, low, high, limit in (
        ("learning_rate", 0.0, LARGEST_RATE, f"at most {LARGEST_RATE:g}"),
        ("beta1", 0.0, below_one, "below 1"),
        ("beta2", 0.0, below_one, "below 1"),
        ("eps", SMALLEST_EPS, largest, "finite"),
        ("weight_decay", 0.0, LARGEST_RATE, f"at most {LARGEST_RATE:g}"),
        ("grad_clip_norm", 0.0, largest, "finite"),
    ):
        value = getattr(params, name)
        if not low <= value <= high:
            raise ValidationError(f"must be at least {low:g} and {limit}, got {value}", name)


def check_gradient_norm(grad_norm: float, step: int) -> None:
    """Refuse a gradient that Adam cannot square; the caller drops it, since no step could use it.

    `step` is the number of steps taken so far.
    """
    if not grad_norm <= LARGEST_GRADIENT_NORM:
        raise ValidationError(
            f"the gradient's norm is {grad_norm:.3g}; the limit is {LARGEST_GRADIENT_NORM:g}. No "
            f"step was taken: weights, optimizer state and step count ({step}) are unchanged. The "
            "gradient has been dropped; look for extreme advantages, weights or log-probabilities "
            "in the passes since the last step"
        )


def check_update_norm(update_norm: float, params: AdamParams, step: int) -> None:
    """Refuse a step that would move the weights out of all bounds; the caller takes it back."""
    if not update_norm <= LARGEST_NORM:
        raise ValidationError(
            f"the update's norm would be {update_norm:.3g}; the limit is {LARGEST_NORM:g}. No step "
            f"was taken: weights, optimizer state, gradient and step count ({step}) are unchanged. "
            f"Lower learning_rate ({params.learning_rate:g}) or weight_decay "
            f"({params.weight_decay:g}), or raise eps ({params.eps:g})"
        )


def step_metrics(
    params: AdamParams, step: int, grad_norm: float, update_norm: float
) -> dict[str, float]:
    """A step's metrics; `step` is the number of steps taken so far, this one included.

    Callers merge them into their own metrics: the plain name is the hosted service's, and ours
    have a prefix, so that none overwrites a caller's `step` or `learning_rate`.
    """
    return {
        "unclipped_grad_l2:mean": grad_norm,
        "optim/update_norm": update_norm,
        "optim/learning_rate": params.learning_rate,
        "optim/step": float(step),
    }
