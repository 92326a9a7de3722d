"""Attention whose heads have a sink: a frozen score of one more key, whose value is zero.

With m = log Σ exp(scores) without the sink s, a query's output is what it would be without, times
sigmoid(m - s), and its normalizer is log(exp(m) + exp(s)). A kernel that gives m is all that is
needed (`take_share`), and its backward pass is that of attention without sinks, given the smaller
output and the larger normalizer: from these it makes the probabilities and, as the product of
output and gradient, what is taken from each score's gradient. A sink adds nothing to that, its
value being zero.

Where there is no such kernel, queries go through plain products, some at a time. Nothing then
grows with the square of a sequence's length.

Shapes: B sequences, n queries and m keys of each, H query heads, K key/value heads, G = H / K, D
head size, c queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.local.model.families import AttentionSpec

_BLOCK = 128
"""Queries that are computed at a time."""


def take_share(out: Tensor, normalizers: Tensor, sinks: Tensor) -> None:
    """Turn attention without sinks, out (…, H, n, D) and log Σ exp(scores) (…, H, n), into that
    with sinks (H,), in place."""
    sinks = sinks.float()[:, None]
    out.mul_(torch.sigmoid(normalizers - sinks)[..., None])
    torch.logaddexp(normalizers, sinks, out=normalizers)


def attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Causal attention of queries (B, H, n, D), which are the last n positions of keys and values
    (B, K, m, D)."""
    found: Tensor = _Attention.apply(spec, sinks, q, k, v)
    return found


class _Block(NamedTuple):
    """Some queries, and the keys that any of them sees."""

    queries: slice
    keys: slice
    hidden: Tensor
    """(c, keys) of bool: what a query does not see of these."""


def _blocks(spec: AttentionSpec, q: Tensor, k: Tensor) -> Iterator[_Block]:
    num_queries, past = q.shape[2], k.shape[2] - q.shape[2]
    for start in range(0, num_queries, _BLOCK):
        stop = min(start + _BLOCK, num_queries)
        first = 0 if spec.window is None else max(0, past + start - spec.window + 1)
        query = torch.arange(past + start, past + stop, device=q.device)[:, None]
        key = torch.arange(first, past + stop, device=q.device)
        hidden = key > query
        if spec.window is not None:
            hidden |= key <= query - spec.window
        yield _Block(slice(start, stop), slice(first, past + stop), hidden)


def _by_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """(B · K, G · c, …) float32 of (B, H, c, …): the heads that share keys are rows of one
    product."""
    shape = (len(x) * num_kv_heads, -1, *x.shape[3:])
    return x.float().reshape(shape)


def _of_keys(x: Tensor, keys: slice) -> Tensor:
    """(B · K, keys, D) float32 of (B, K, m, D)."""
    return x[:, :, keys].float().flatten(0, 1)


def _scores(spec: AttentionSpec, queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """(B · K, G · c, keys): minus infinity where a query does not see a key."""
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(spec.scale)
    return scores.unflatten(1, (-1, len(hidden))).masked_fill_(hidden, -torch.inf).flatten(1, 2)


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, spec, sinks, q, k, v):  # type: ignore[no-untyped-def]
        num_kv_heads = k.shape[1]
        out, normalizers = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for queries, keys, hidden in _blocks(spec, q, k):
            own = _by_group(q[:, :, queries], num_kv_heads)
            scores = _scores(spec, own, _of_keys(k, keys), hidden)
            # (B, H, c): log Σ exp(scores), the sink's included.
            shape = (*q.shape[:2], -1)
            total = torch.logsumexp(scores, dim=-1).view(shape)
            total = torch.logaddexp(total, sinks.float()[:, None])
            weights = scores.sub_(_by_group(total, num_kv_heads)[..., None]).exp_()
            out[:, :, queries] = torch.bmm(weights, _of_keys(v, keys)).view(*shape, q.shape[3])
            normalizers[:, :, queries] = total
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, out, normalizers)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        spec, (q, k, v, out, normalizers) = ctx.spec, ctx.saved_tensors
        num_kv_heads = k.shape[1]
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        # (B, H, n): what is taken from the gradient of each of a query's scores.
        along = torch.linalg.vecdot(grad.float(), out.float())
        for queries, keys, hidden in _blocks(spec, q, k):
            own, own_grad, peak, less = (
                _by_group(x[:, :, queries], num_kv_heads) for x in (q, grad, normalizers, along)
            )
            of_k, of_v = _of_keys(k, keys), _of_keys(v, keys)
            # Probabilities (B · K, G · c, keys) again, and the gradient of the scores.
            weights = _scores(spec, own, of_k, hidden).sub_(peak[..., None]).exp_()
            grad_v[:, :, keys] += torch.bmm(weights.transpose(1, 2), own_grad).view_as(
                grad_v[:, :, keys]
            )
            grad_scores = torch.bmm(own_grad, of_v.transpose(1, 2)).sub_(less[..., None])
            grad_scores.mul_(weights).mul_(spec.scale)
            grad_q[:, :, queries] = torch.bmm(grad_scores, of_k).view_as(q[:, :, queries])
            grad_k[:, :, keys] += torch.bmm(grad_scores.transpose(1, 2), own).view_as(
                grad_k[:, :, keys]
            )
        return None, None, grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)
