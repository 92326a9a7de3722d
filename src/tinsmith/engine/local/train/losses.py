"""Token losses: pure functions from one datum's log-probabilities to one number.

Every loss looks at the same facts about a token: how likely the model finds it now (`policy`),
how likely it was when sampled (`logprobs`), and how good it turned out to be (`advantages`).
All tensors have shape (N,), or (N, K) for cross-entropy with K targets a position. A loss returns
what each token contributes; a datum's loss is their sum, never a mean. The formulas are the public
ones of the service.

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
"""A datum's metrics: detached scalars by metric name; the suffix says how datums combine. A mean
over nothing is left out."""

LARGEST = torch.finfo(torch.float32).max


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
        loss, stats = _built_in_loss(loss_fn, logprobs, inputs, config)
    if not loss.isfinite():
        raise ValidationError(f"the loss is {loss.item()}; it must be within ±{LARGEST:.2g}")
    always = {"loss:sum": loss.detach(), "tokens:sum": _count(logprobs)}
    return loss, always | stats


def _built_in_loss(
    loss_fn: str,
    logprobs: Tensor,
    inputs: Mapping[str, Tensor],
    config: Mapping[str, float | str],
) -> tuple[Tensor, Stats]:
    spec = loss_named(loss_fn)
    given = {name: value for name, value in inputs.items() if name != "target_tokens"}
    policy = logprobs
    if "logprobs" in given:
        # exp(p − q) may be beyond float32 where the loss is not: clipped, or of small advantage.
        policy, given = policy.double(), {name: value.double() for name, value in given.items()}
    terms, stats = _FUNCTIONS[loss_fn](policy, **{**spec.config, **config, **given})
    wrong = ~(terms.detach().abs() <= LARGEST)
    if wrong.any():
        raise _beyond_float32(int(wrong.int().argmax()), terms, logprobs, given)
    return terms.sum().float(), stats


def _beyond_float32(
    position: int, terms: Tensor, logprobs: Tensor, given: Mapping[str, Tensor]
) -> ValidationError:
    """The error that names the token whose loss is too large, and what made it so."""
    facts = [f"{name} {value.flatten()[position].item():.6g}" for name, value in given.items()]
    return ValidationError(
        f"the loss of token {position} is {terms.detach().flatten()[position].item():.3g}; it must "
        f"be within ±{LARGEST:.2g}. The model's log-probability is "
        f"{logprobs.detach().flatten()[position].item():.6g}, the inputs are {', '.join(facts)}",
        "loss_fn_inputs",
    )


def combine_metrics(stats: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The metrics of a pass from its datums' statistics: sums added, means averaged over datums.

    The client weighs `:mean` values by number of datums when it joins passes, which is why a mean
    here is over datums and not over tokens. A datum that lacks a mean does not count in it.
    Values leave the device in one transfer.
    """
    columns: dict[str, list[Tensor]] = {}
    for datum in stats:
        for name, value in datum.items():
            columns.setdefault(name, []).append(value.double())
    if not columns:
        return {}
    values = iter(torch.stack([value for column in columns.values() for value in column]).tolist())
    metrics = {}
    for name, column in columns.items():
        total = sum(next(values) for _ in column)
        metrics[name] = total / len(column) if name.endswith(":mean") else total
    return metrics


def cross_entropy(policy: Tensor, *, weights: Tensor | None = None) -> tuple[Tensor, Stats]:
    """−p·w for all positions, and all K targets of a position. Without weights w is 1."""
    if weights is None:
        weights = torch.ones_like(policy)
    return -(policy * weights), {"weights:sum": weights.double().sum()}


def importance_sampling(
    policy: Tensor, *, logprobs: Tensor, advantages: Tensor
) -> tuple[Tensor, Stats]:
    """−r·A, the policy gradient for tokens that an older policy sampled."""
    ratio = _ratio(policy - logprobs, ~_counts(advantages))
    return -(ratio * advantages), _policy_stats(policy - logprobs, _counts(advantages))


def ppo(
    policy: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: Tensor | float,
    clip_high_threshold: Tensor | float,
) -> tuple[Tensor, Stats]:
    """−min(r·A, clip(r, low, high)·A); the thresholds bound r itself."""
    terms, clipped = _clipped_objective(
        policy - logprobs, advantages, clip_low_threshold, clip_high_threshold
    )
    return terms, _policy_stats(policy - logprobs, _counts(advantages), clipped)


def cispo(
    policy: Tensor,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    clip_low_threshold: Tensor | float,
    clip_high_threshold: Tensor | float,
) -> tuple[Tensor, Stats]:
    """−sg(clip(r, low, high))·p·A: clipping bounds a token's weight, never silences it."""
    log_ratio = policy.detach() - logprobs
    ratio = torch.exp(log_ratio)
    low, high = _bounds(ratio, clip_low_threshold, clip_high_threshold)
    stats = _policy_stats(log_ratio, _counts(advantages), (ratio < low) | (ratio > high))
    return -(ratio.clamp(low, high) * (policy * advantages)), stats


def dro(
    policy: Tensor, *, logprobs: Tensor, advantages: Tensor, beta: float
) -> tuple[Tensor, Stats]:
    """−(p·A − ½·beta·(p − q)²). Tokens of advantage zero are held near q all the same."""
    penalty = 0.5 * beta * (policy - logprobs).square()
    return penalty - policy * advantages, _policy_stats(policy - logprobs, _counts(advantages))


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
    and with that token's gradient alone. All tokens have this ratio in the statistics, too.
    """
    log_sequence_ratio = (policy.detach() - logprobs)[sequence_ratio_mask != 0].mean()
    log_ratio = log_sequence_ratio + (policy - policy.detach())
    terms, clipped = _clipped_objective(
        log_ratio, advantages, clip_low_threshold, clip_high_threshold
    )
    return terms, _policy_stats(log_ratio, _counts(advantages), clipped)


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
    """(−min(r·A, clip(r)·A), which tokens are clipped); clipped tokens have no gradient."""
    ratio = torch.exp(log_ratio.detach())
    low, high = _bounds(ratio, low, high)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bounded = torch.where(
        clipped, ratio.clamp(low, high), _ratio(log_ratio, clipped | ~_counts(advantages))
    )
    return -(bounded * advantages), clipped


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


def _policy_stats(log_ratio: Tensor, counted: Tensor, clipped: Tensor | None = None) -> Stats:
    """How far the policy has moved, over the tokens that count.

    The mean of −log r estimates KL(q, p) from q's samples. Each mean stands beside its sum: sums
    and the number of tokens stay right however the client cuts its data.
    """
    log_ratio = log_ratio.detach()[counted]
    per_token = {"kl_q_p": -log_ratio, "ratio": log_ratio.exp()}
    if clipped is not None:
        per_token["clip_fraction"] = clipped[counted].double()
    stats: Stats = {"advantage_tokens:sum": counted.sum()}
    for name, values in per_token.items():
        stats[f"{name}:sum"] = values.sum()
        if len(values):
            stats[f"{name}:mean"] = values.mean()
    return stats


def _count(targets: Tensor) -> Tensor:
    return torch.full((), float(targets.shape[0]), device=targets.device)
