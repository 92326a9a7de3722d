"""What a pass tells about the data it saw, beside its loss: numbers for curves.

Only what costs microseconds on a small pass. Tokens that were sampled are those with a
log-probability other than zero: that is how clients fill up the context before them.
"""

from __future__ import annotations

import math

import numpy as np
import orjson

from tinsmith.engine.base import Pass
from tinsmith.types import ForwardBackwardOutput
from tinsmith.types.non_finite import to_json

_COUNTS = ("weights:sum", "advantage_tokens:sum", "tokens:sum")
"""What a loss is divided by to be one per token: the first of these that is there."""


def observed(item: Pass, output: ForwardBackwardOutput) -> dict[str, float]:
    """The metrics of a pass: the engine's own, and what is known of lengths and advantages."""
    metrics = dict(output.metrics)
    count = next((metrics[name] for name in _COUNTS if name in metrics), 0.0)
    if count and "loss:sum" in metrics:
        metrics["loss"] = metrics["loss:sum"] / count
    # There is a target for each position; an image need not say how many it takes.
    lengths = [len(datum.loss_fn_inputs["target_tokens"].to_numpy()) for datum in item.data]
    metrics["sequences"] = len(lengths)
    if lengths:
        metrics["length:mean"] = sum(lengths) / len(lengths)
        metrics["length:max"] = max(lengths)
        if item.custom_loss is None and "advantages" in item.data[0].loss_fn_inputs:
            metrics.update(_of_policy(item, output))
    return metrics


def _of_policy(item: Pass, output: ForwardBackwardOutput) -> dict[str, float]:
    """Advantages, and how far the policy has moved, over the tokens that were sampled."""
    advantages, sampled = (
        np.concatenate([datum.loss_fn_inputs[name].to_numpy().ravel() for datum in item.data])
        for name in ("advantages", "logprobs")
    )
    policy = np.concatenate([one["logprobs"].to_numpy().ravel() for one in output.loss_fn_outputs])
    is_sampled = (sampled != 0) | (advantages != 0)
    if not is_sampled.any():
        return {}
    advantages = advantages[is_sampled].astype(np.float64)
    gaps = np.abs(policy[is_sampled].astype(np.float64) - sampled[is_sampled])
    return {
        "advantage:mean": float(advantages.mean()),
        "advantage:std": float(advantages.std()),
        "advantage_zero_fraction": float(np.mean(advantages == 0)),
        "logprob_gap:mean": float(gaps.mean()),
        "logprob_gap:max": float(gaps.max()),
    }


def encode_metrics(metrics: dict[str, float]) -> str:
    """As JSON, those that are not finite as words."""
    text = orjson.dumps(metrics, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"null" in text:
        words = {n: v if math.isfinite(v) else to_json(float(v)) for n, v in metrics.items()}
        text = orjson.dumps(words, option=orjson.OPT_SERIALIZE_NUMPY)
    return text.decode()
