"""The built-in losses by name: what each reads and which settings it takes.

Only facts, and no torch, so that code that checks requests can read them; the mathematics is in
`losses`. Defaults that the service does not document (`beta`, missing `weights` meaning ones) are
our choice and stand in our documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith.errors import ValidationError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """What a loss reads besides `target_tokens`, one value per target each, and its settings."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    """The keys of `loss_fn_config` it knows, all numbers, with their defaults."""

    target_ranks: tuple[int, ...] = (1,)
    """How many dimensions `target_tokens` may have: 1 for (N,), 2 for (N, K)."""


_POLICY_INPUTS = ("logprobs", "advantages")
_CLIP_INPUTS = ("clip_low_threshold", "clip_high_threshold")
_CLIP_CONFIG = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CISPO_CONFIG = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}

LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(optional=("weights",), target_ranks=(1, 2)),
    "importance_sampling": LossSpec(required=_POLICY_INPUTS),
    "ppo": LossSpec(required=_POLICY_INPUTS, optional=_CLIP_INPUTS, config=_CLIP_CONFIG),
    "cispo": LossSpec(required=_POLICY_INPUTS, optional=_CLIP_INPUTS, config=_CISPO_CONFIG),
    "dro": LossSpec(required=_POLICY_INPUTS, config={"beta": 0.05}),
    "gspo": LossSpec(
        required=(*_POLICY_INPUTS, "sequence_ratio_mask"),
        optional=_CLIP_INPUTS,
        config=_CLIP_CONFIG,
    ),
}


def loss_named(loss_fn: str) -> LossSpec:
    """The built-in loss of that name; a loss we do not have is refused with the reason."""
    if loss_fn in LOSSES:
        return LOSSES[loss_fn]
    known = ", ".join([*LOSSES, "custom"])
    if loss_fn == "stable_reinforce":
        raise ValidationError(
            "'stable_reinforce' is not supported: its formula is not public and it needs stability "
            f"information recorded while sampling; known losses: {known}",
            "loss_fn",
        )
    raise ValidationError(f"no loss called {loss_fn!r}; known losses: {known}", "loss_fn")
