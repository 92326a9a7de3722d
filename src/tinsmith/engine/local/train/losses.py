"""Token losses: pure functions from one datum's log-probabilities to one number.

Every loss looks at the same facts about a token: how likely the model finds it now (`policy`),
how likely it was when sampled (`logprobs`), and how good it turned out to be (`advantages`).
All tensors are float32 of shape (N,), or (N, K) for cross-entropy with K targets a position;
every loss is a sum over tokens, never a mean. The formulas are the public ones of the service.

Parameters after the first carry the names that loss inputs and config have on the wire, so that
a call is a merge of dictionaries. None of this touches the model or the optimizer. What a loss
may be given stands in `loss_table`, whether it was is for `checks`, and uploaded graphs are run
by `custom_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tinsmith.engine.local.train.custom_loss import CompiledLoss
from tinsmith.engine.loss_table import loss_named
from tinsmith.errors import ValidationError

Stats = dict[str, Tensor]
"""A datum's metrics: detached scalars by metric name; the suffix says how datums combine."""


def datum_loss(
    loss_fn: str,
    logprobs: Tensor,
    inputs: Mapping[str, Tensor],
    config: Mapping[str, float | str],
    custom: CompiledLoss | None = None,
) -> tuple[Tensor, Stats]:
    """One datum's loss, a scalar differentiable in `logprobs`, and its statistics.

    `logprobs` is what the model gives to `target_tokens`, in its shape; `inputs` are the datum's
    loss inputs (`target_tokens` among them or not) on the same device. A per-token tensor wins
    over the config value of the same name.
    """
    if loss_fn == "custom":
        if custom is None:
            raise ValidationError("loss 'custom' came without its graph", "loss_fn_config.loss_id")
        loss, stats = custom(logprobs, inputs)
    else:
        spec = loss_named(loss_fn)
        given = {name: value for name, value in inputs.items() if name != "target_tokens"}
        loss, stats = _FUNCTIONS[loss_fn](logprobs, **{**spec.config, **config, **given})
    always = {"loss:sum": loss.detach(), "tokens:sum": _count(logprobs)}
    return loss, always | stats


def combine_metrics(stats: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The metrics of a pass from its datums' statistics: sums added, means averaged over datums.

    The client weighs `:mean` values by number of datums when it joins passes, which is why a
    mean here is over datums and not over tokens. Values leave the device in one transfer.
    """
    if not stats:
        return {}
    names = list(stats[0])
    table = torch.stack([torch.stack([datum[name].float() for name in names]) for datum in stats])
    columns = zip(*table.tolist(), strict=True)
    return {
        name: sum(column) / (len(stats) if name.endswith(":mean") else 1)
        for name, column in zip(names, columns, strict=True)
    }


def cross_entropy(policy: Tensor, *, weights: Tensor | None = None) -> tuple[Tensor, Stats]:
    """Σ −p·w over all positions, and over all K targets of a position. Without weights w is 1."""
    if weights is None:
        return -policy.sum(), {}
    return -(policy * weights).sum(), {}


def importance_sampling(
    policy: Tensor, *, logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Stats]:
    """Σ −r·A, the policy gradient for tokens that an older policy sampled."""
    ratio = _ratio(policy - logprobs, ~_counts(advantages))
    return -(ratio * advantages).sum(), _policy_stats(policy, logprobs, _counts(advantages))


def ppo(
    policy: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: Tensor | float,
    clip_high_threshold: Tensor | float,
) -> tuple[Tensor, Stats]:
    """Σ −min(r·A, clip(r, low, high)·A); the thresholds bound r itself."""
    loss, clipped = _clipped_objective(
        policy - logprobs, advantages, clip_low_threshold, clip_high_threshold
    )
    counted = _counts(advantages)
    stats = _policy_stats(policy, logprobs, counted)
    return loss, stats | {"clip_fraction:mean": _mean(clipped, counted)}


def cispo(
    policy: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: Tensor | float,
    clip_high_threshold: Tensor | float,
) -> tuple[Tensor, Stats]:
    """Σ −sg(clip(r, low, high))·p·A: clipping bounds a token's weight, never silences it."""
    ratio = torch.exp(policy.detach() - logprobs)
    low, high = _bounds(ratio, clip_low_threshold, clip_high_threshold)
    counted = _counts(advantages)
    stats = _policy_stats(policy, logprobs, counted)
    stats["clip_fraction:mean"] = _mean((ratio < low) | (ratio > high), counted)
    return -(ratio.clamp(low, high) * policy * advantages).sum(), stats


def dro(
    policy: Tensor, *, logprobs: Tensor, advantages: Tensor, beta: float
) -> tuple[Tensor, Stats]:
    """Σ −(p·A − ½·beta·(p − q)²). Tokens of advantage zero are held near q all the same."""
    penalty = 0.5 * beta * (policy - logprobs).square()
    stats = _policy_stats(policy, logprobs, _counts(advantages))
    return -(policy * advantages - penalty).sum(), stats


def gspo(
    policy: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    clip_low_threshold: Tensor | float,
    clip_high_threshold: Tensor | float,
) -> tuple[Tensor, Stats]:
    """PPO with one ratio for the sequence, s = exp(mean of p − q over the mask).

    s carries no gradient itself: each token's ratio is s·exp(p − sg(p)), equal to s in value
    and with that token's gradient alone.
    """
    masked = sequence_ratio_mask != 0
    log_sequence_ratio = _mean(policy.detach() - logprobs, masked)
    loss, clipped = _clipped_objective(
        log_sequence_ratio + policy - policy.detach(),
        advantages,
        clip_low_threshold,
        clip_high_threshold,
    )
    return loss, {
        "kl_q_p:mean": -log_sequence_ratio,
        "ratio:mean": log_sequence_ratio.exp(),
        "clip_fraction:mean": _mean(clipped, _counts(advantages)),
    }


_FUNCTIONS: Mapping[str, Callable[..., tuple[Tensor, Stats]]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def _clipped_objective(
    log_ratio: Tensor,
    advantages: Tensor,
    low: Tensor | float,
    high: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """(Σ −min(r·A, clip(r)·A), which tokens are clipped); clipped tokens have no gradient."""
    ratio = torch.exp(log_ratio.detach())
    low, high = _bounds(ratio, low, high)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bounded = torch.where(
        clipped, ratio.clamp(low, high), _ratio(log_ratio, clipped | ~_counts(advantages))
    )
    return -(bounded * advantages).sum(), clipped


def _ratio(log_ratio: Tensor, ignored: Tensor) -> Tensor:
    """exp(log_ratio), and 1 where ignored.

    An ignored token may have a ratio beyond float32, as a prompt token with a made-up
    log-probability does; infinity times zero would then turn the whole sum into NaN.
    """
    return torch.exp(log_ratio.masked_fill(ignored, 0.0))


def _bounds(like: Tensor, low: Tensor | float, high: Tensor | float) -> tuple[Tensor, Tensor]:
    # Plain numbers become tensors on the device itself: copying them there would wait for it.
    return (
        low if isinstance(low, Tensor) else like.new_full((), low),
        high if isinstance(high, Tensor) else like.new_full((), high),
    )


def _counts(advantages: Tensor) -> Tensor:
    """The tokens that statistics are about: those with an advantage; the rest are context."""
    return advantages != 0


def _policy_stats(policy: Tensor, sampled: Tensor, counted: Tensor) -> Stats:
    """How far the policy has moved: the estimate of KL(q, p) from q's samples, and the ratio."""
    log_ratio = (policy.detach() - sampled).masked_fill(~counted, 0.0)
    return {
        "kl_q_p:mean": -_mean(log_ratio, counted),
        "ratio:mean": _mean(log_ratio.exp(), counted),
    }


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` holds; zero where it holds nowhere."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def _count(targets: Tensor) -> Tensor:
    return torch.full((), float(targets.shape[0]), device=targets.device)
