"""Packing sequences into micro-batches, and attention over what was packed.

Sequences lie one after another in a row of tokens, each seeing only itself. Micro-batches stay
under a token budget, except that a sequence longer than the budget has one to itself. Rows of
one adapter are kept together, so that its products are few and large.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig
from tinsmith.engine.local.model.recurrent.recurrence import FreshStates


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of a call: datum `datum` of pass `pass_index`, `length` tokens long."""

    pass_index: int
    datum: int
    length: int
    adapter_id: str
    forward_only: bool = False
    keeps_apart: bool = False
    """Whether it shares micro-batches with items of its own pass only."""


def plan(
    items: Iterable[Item], *, max_tokens: Callable[[], int], one_by_one: bool = False
) -> Iterator[tuple[Item, ...]]:
    """Yield micro-batches, early items first; within one, items of an adapter are neighbours.

    A micro-batch holds only items that need gradients, or only items that do not; items that keep
    apart come last. `max_tokens` is asked anew for each. With `one_by_one` every item has a
    micro-batch to itself, in order.
    """
    waiting: dict[tuple[bool, int], list[Item]] = {}
    num_tokens: Counter[tuple[bool, int]] = Counter()
    for item in items if one_by_one else sorted(items, key=lambda item: item.keeps_apart):
        if one_by_one:
            yield (item,)
            continue
        company = (item.forward_only, item.pass_index if item.keeps_apart else -1)
        if company in waiting and num_tokens[company] + item.length > max_tokens():
            yield _by_adapter(waiting.pop(company))
            del num_tokens[company]
        waiting.setdefault(company, []).append(item)
        num_tokens[company] += item.length
    for batch in waiting.values():
        yield _by_adapter(batch)


def _by_adapter(batch: Sequence[Item]) -> tuple[Item, ...]:
    first_seen = {item.adapter_id: place for place, item in reversed(list(enumerate(batch)))}
    return tuple(sorted(batch, key=lambda item: first_seen[item.adapter_id]))


class PackedAttention:
    """Causal attention within each of a row of packed sequences.

    On CUDA in half precision it is one call of a kernel made for this. Elsewhere it is one call
    for neighbours of one length, which on two cores beats one call with a block-diagonal mask by a
    quarter, and makes a sequence's result independent of the others.
    """

    def __init__(
        self, config: DecoderConfig, lengths: Sequence[int], *, is_invariant: bool = False
    ) -> None:
        """With `is_invariant` the same to the last bit as token by token; see `invariant`."""
        self._is_invariant = is_invariant
        self.sequences = FreshStates(lengths)
        self._config = config
        self._lengths = list(lengths)
        self._bounds: Bounds | None = None
        self._even: bool | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        spec = self._config.layers[layer]
        if has_packed_kernel(spec, q, sinks):
            return self._attend_packed(spec, q, k, v)
        groups = [(length, len(list(same))) for length, same in itertools.groupby(self._lengths)]
        sizes = [length * count for length, count in groups]
        parts = zip(groups, *(x.split(sizes) for x in (q, k, v)), strict=True)
        outputs = [self._attend(spec, length, sinks, *part) for (length, _), *part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, spec: AttentionSpec, length: int, sinks: Tensor | None, *parts: Tensor
    ) -> Tensor:
        if self._is_invariant:
            found: Tensor = _InvariantAttention.apply(spec, length, sinks, *parts)
            return found
        return _attend(spec, length, sinks, *parts)

    def _attend_packed(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._bounds is None:
            self._bounds = Bounds.of(self._lengths, q.device)
        is_windowed = spec.window is not None and spec.window < self._bounds.longest
        if not is_windowed and self._is_even(q, k, v):
            return self._attend_evenly(spec, q, k, v)
        return packed_attention(spec, q, k, v, self._bounds, self._bounds)

    def _is_even(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether sequences of one length can be left to cuDNN's kernel for plain batches.

        It is about twice as fast as the one for packed sequences. For each new shape it plans
        for some time, so it is kept for shapes that come again: several sequences, cut to a
        round length. Whether it adds in the same order each time is not known.
        """
        if self._even is None:
            length = self._lengths[0]
            is_round = len(self._lengths) > 1 and length % 128 == 0
            self._even = (
                is_round
                and self._lengths.count(length) == len(self._lengths)
                and not torch.are_deterministic_algorithms_enabled()
                and _can_use_cudnn(*self._as_batch(q, k, v))
            )
        return self._even

    def _as_batch(self, *parts: Tensor) -> list[Tensor]:
        """(N, heads, D) as (sequences, heads, length, D)."""
        shape = (len(self._lengths), self._lengths[0])
        return [part.unflatten(0, shape).transpose(1, 2) for part in parts]

    def _attend_evenly(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *self._as_batch(q, k, v), None, True, 0.0, True, False, scale=spec.scale
        )[0]
        return out.transpose(1, 2).flatten(0, 1)


def _can_use_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


class Bounds(NamedTuple):
    """Where each of a row of packed sequences begins, and where the last ends (int32)."""

    starts: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Bounds:
        starts = [0, *itertools.accumulate(lengths)]
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(lengths))


def packed_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, queries: Bounds, keys: Bounds
) -> Tensor:
    """Causal attention where `has_packed_kernel`: q (n, H, D), k and v (m, K, D), packed alike.

    A sequence with fewer queries than keys has them for its last tokens.
    """
    window = spec.window if spec.window is not None and spec.window < keys.longest else None
    return _FlashAttention.apply(q, k, v, queries, keys, spec.scale, window)


class _FlashAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    """The kernel behind `torch.nn.attention.varlen`, called without the layers in between, which
    cost more than a small batch computes."""

    @staticmethod
    def forward(ctx, q, k, v, queries, keys, scale, window):  # type: ignore[no-untyped-def]
        no_dropout, is_causal = 0.0, window is None
        longest = (queries.longest, keys.longest)
        ctx.settings = (queries.starts, keys.starts, *longest, no_dropout, is_causal)
        ctx.options = {"scale": scale}
        if window is not None:
            ctx.options |= {"window_size_left": window - 1, "window_size_right": 0}
        out, normalizers, *random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ctx.settings, False, **ctx.options
        )
        ctx.save_for_backward(q, k, v, out, normalizers, *random)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, normalizers, *random = ctx.saved_tensors
        with _strictly_deterministic():
            grads = torch.ops.aten._flash_attention_backward(
                grad, q, k, v, out, normalizers, *ctx.settings, *random, **ctx.options
            )
        return *grads, None, None, None, None


class _InvariantAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated
    """`_attend` with the bits of decoding. Its gradient is the plain one's."""

    @staticmethod
    def forward(ctx, spec, length, sinks, q, k, v):  # type: ignore[no-untyped-def]
        ctx.settings = (spec, length, sinks)
        ctx.save_for_backward(q, k, v)
        positions = torch.arange(length, device=q.device)[None]
        found = [
            invariant.attend(
                spec, one[None], k.transpose(0, 1), v.transpose(0, 1), positions, sinks
            )
            for one, k, v in zip(*(x.split(length) for x in (q, k, v)), strict=True)
        ]
        return torch.cat([part[0] for part in found])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = _attend(*ctx.settings, *inputs)
        return None, None, None, *torch.autograd.grad(out, inputs, grad)


@contextlib.contextmanager
def _strictly_deterministic() -> Iterator[None]:
    """Where deterministic algorithms are wanted at all, insist on them.

    Asked to warn only, this kernel warns and adds in any order; told to, it can do better.
    """
    is_lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    if not (is_lenient and torch.are_deterministic_algorithms_enabled()):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def has_packed_kernel(spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and is_half and spec.softcap is None and sinks is None


def _attend(
    spec: AttentionSpec, length: int, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Causal attention of B sequences of n tokens: q (B · n, H, D), k and v (B · n, K, D)."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    is_windowed = spec.window is not None and length > spec.window
    if spec.softcap is not None or sinks is not None:
        out = _attend_by_hand(spec, q, k, v, sinks)
    elif is_windowed:
        mask = causal_mask(length, spec.window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).flatten(0, 1)


def _attend_by_hand(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """The same where no fused kernel squeezes the scores or knows sinks. (B, heads, n, D) each."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    mask = causal_mask(q.shape[2], spec.window, q.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    return softmax_with_sinks(scores, sinks).to(v.dtype) @ v


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Probabilities (…, heads, n, keys) in float32; a head's sink takes its part of them."""
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    joined = torch.cat([scores, column], dim=-1)
    return joined.softmax(dim=-1, dtype=torch.float32)[..., :-1]


def causal_mask(num_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """(n, n) of bool: whether the row's position sees the column's."""
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if window is not None:
        mask &= ~torch.ones_like(mask).tril(-window)
    return mask
