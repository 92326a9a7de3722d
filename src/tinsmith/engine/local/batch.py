"""Packing sequences into micro-batches, and attention over what was packed.

Sequences lie one after another in a row of tokens, each seeing only itself. Micro-batches stay
under a token budget, except that a sequence longer than the budget has one to itself. Rows of
one adapter are kept together, so that its products are few and large.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.families import AttentionSpec, DecoderConfig


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of a call: datum `datum` of pass `pass_index`, `length` tokens long."""

    pass_index: int
    datum: int
    length: int
    adapter_id: str
    forward_only: bool = False


def plan(
    items: Iterable[Item], *, max_tokens: int, one_by_one: bool = False
) -> Iterator[tuple[Item, ...]]:
    """Yield micro-batches, early items first; within one, items of an adapter are neighbours.

    A micro-batch holds only items that need gradients, or only items that do not. With
    `one_by_one` every item has a micro-batch to itself, in order.
    """
    waiting: dict[bool, list[Item]] = {False: [], True: []}
    num_tokens = {False: 0, True: 0}
    for item in items:
        if one_by_one:
            yield (item,)
            continue
        mode = item.forward_only
        if waiting[mode] and num_tokens[mode] + item.length > max_tokens:
            yield _by_adapter(waiting[mode])
            waiting[mode], num_tokens[mode] = [], 0
        waiting[mode].append(item)
        num_tokens[mode] += item.length
    for batch in waiting.values():
        if batch:
            yield _by_adapter(batch)


def _by_adapter(batch: Sequence[Item]) -> tuple[Item, ...]:
    first_seen = {item.adapter_id: place for place, item in reversed(list(enumerate(batch)))}
    return tuple(sorted(batch, key=lambda item: first_seen[item.adapter_id]))


class PackedAttention:
    """Causal attention within each of a row of packed sequences.

    On CUDA in half precision it is one call of a kernel made for this. Elsewhere it is one call
    per sequence, which on two cores beats one call with a block-diagonal mask by a quarter,
    and makes a sequence's result independent of its neighbours.
    """

    def __init__(self, config: DecoderConfig, lengths: Sequence[int]) -> None:
        self._config = config
        self._lengths = list(lengths)
        self._bounds: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self._config.layers[layer]
        if _has_packed_kernel(spec, q):
            return self._attend_packed(spec, q, k, v)
        parts = zip(*(x.split(self._lengths) for x in (q, k, v)), strict=True)
        outputs = [_attend(spec, *part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_packed(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self._bounds is None:
            bounds = [0, *itertools.accumulate(self._lengths)]
            self._bounds = torch.tensor(bounds, dtype=torch.int32, device=q.device)
        longest = max(self._lengths)
        options = {"enable_gqa": True}
        if not _varlen_options() >= {"enable_gqa"}:
            options = {}
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        window = -1 if spec.window is None or spec.window > longest else spec.window - 1
        return varlen_attn(
            q,
            k,
            v,
            self._bounds,
            self._bounds,
            longest,
            longest,
            scale=spec.scale,
            window_size=(window, 0),
            **options,
        )


def _has_packed_kernel(spec: AttentionSpec, q: Tensor) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return (
        q.is_cuda
        and is_half
        and spec.softcap is None
        and {"scale", "window_size"} <= _varlen_options()
    )


@functools.cache
def _varlen_options() -> frozenset[str]:
    """What the packed kernel of this torch can be asked for; nothing where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence of n tokens: q (n, H, D), k and v (n, K, D)."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    num_tokens = q.shape[2]
    is_windowed = spec.window is not None and num_tokens > spec.window
    if spec.softcap is not None:
        out = _attend_softcapped(spec, q, k, v)
    elif is_windowed:
        mask = causal_mask(num_tokens, spec.window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.squeeze(0).transpose(0, 1)


def _attend_softcapped(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by hand, because no fused kernel squeezes the scores. (1, heads, n, D) each."""
    assert spec.softcap is not None
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(2, 3) * spec.scale
    scores = torch.tanh(scores / spec.softcap) * spec.softcap
    mask = causal_mask(q.shape[2], spec.window, q.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


def causal_mask(num_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """(n, n) of bool: whether the row's position sees the column's."""
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if window is not None:
        mask &= ~torch.ones_like(mask).tril(-window)
    return mask
