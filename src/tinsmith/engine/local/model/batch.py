"""Packing sequences into micro-batches, and attention over what was packed.

Sequences lie one after another in a row of tokens, each seeing only itself. Micro-batches stay
under a token budget, except that a sequence longer than the budget has one to itself. Rows of
one adapter are kept together, so that its products are few and large.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.attention import causal, cudnn
from tinsmith.engine.local.model.attention import sinks as sink_attention
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig
from tinsmith.engine.local.model.latent.heads import LatentHeads
from tinsmith.engine.local.model.recurrent.recurrence import ChunkTables, FreshStates

if TYPE_CHECKING:
    from tinsmith.engine.local.kernels.ordered_attention import Tiles


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


_LONG = 16_384
"""A sequence of so many tokens gains more by cuDNN's kernel for plain batches than a plan costs."""

_LONG_STEP = 1024
"""What the lengths of such sequences are rounded up to, so that there are few plans."""


class PackedAttention:
    """Causal attention within each of a row of packed sequences.

    On CUDA in half precision it is one call of a kernel made for this. Elsewhere it is one call
    for neighbours of one length, or for each sequence where `attention.causal` is quicker: a
    sequence's result is then independent of the others.
    """

    def __init__(
        self,
        config: DecoderConfig,
        lengths: Sequence[int],
        *,
        is_invariant: bool = False,
        bounds: Bounds | None = None,
        tables: ChunkTables | None = None,
    ) -> None:
        """With `is_invariant` the same to the last bit as token by token; see `invariant`. `bounds`
        and `tables` that are given say where sequences lie in place of `lengths`, and may say
        something else when the same kernels run again."""
        self._is_invariant = is_invariant
        self.sequences = FreshStates(lengths, tables)
        self._config = config
        self._lengths = list(lengths)
        self._bounds = bounds
        self._are_given = bounds is not None
        self._tiles: Tiles | None = None
        self._even: bool | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        spec = self._config.layers[layer]
        if self._is_invariant and kernels.are_usable(q):
            return self._attend_in_order(spec, q, k, v)
        if has_packed_kernel(spec, q):
            return self._attend_packed(spec, q, k, v, sinks)
        return self._attend_by_length(spec, q, k, v, sinks)

    def of_latents(self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads) -> Tensor:
        return heads.attend_expanded(functools.partial(self, layer), q, latents)

    def _attend_by_length(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        groups = [(length, len(list(same))) for length, same in itertools.groupby(self._lengths)]
        sizes = [length * count for length, count in groups]
        parts = zip(groups, *(x.split(sizes) for x in (q, k, v)), strict=True)
        outputs = [self._attend(spec, length, sinks, *part) for (length, _), *part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, spec: AttentionSpec, length: int, sinks: Tensor | None, *parts: Tensor
    ) -> Tensor:
        if self._is_invariant and not parts[0].is_cuda:
            found: Tensor = _InvariantAttention.apply(spec, length, sinks, *parts)
            return found
        return _attend(spec, length, sinks, *parts)

    def _attend_in_order(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._bounds is None:
            self._bounds = Bounds.of(self._lengths, q.device)
        if self._tiles is None:
            ordered = kernels.module("ordered_attention")
            ends = itertools.accumulate(self._lengths)
            spans = [
                ordered.Span(end - length, end, position=0, begin=end - length)
                for length, end in zip(self._lengths, ends, strict=True)
            ]
            self._tiles = ordered.tiles_of(spans, q.shape[1] // k.shape[1], q.device)
        found: Tensor = _OrderedAttention.apply(q, k, v, spec, self._tiles, self)
        return found

    def backward_in_order(
        self, spec: AttentionSpec, grad: Tensor, kept: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The gradients of q, k and v, in the quickest way: they need not be the same to the bit.
        `kept` are the three, what they gave, and log Σ exp(scores), (H, n)."""
        q, k, v, out, normalizers = kept
        if not has_packed_kernel(spec, q):
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]
                found = self._attend_by_length(spec, inputs[0], inputs[1], inputs[2], None)
            return torch.autograd.grad(found, inputs, grad)
        assert self._bounds is not None, "made on the way forward"
        window = _window(spec, self._bounds)
        random = [grad.new_zeros(size, dtype=torch.uint64) for size in (2, 0)]
        if window is None and self._is_even(q, k, v):
            length = self._lengths[0]
            by_sequence = normalizers.view(len(normalizers), -1, length).transpose(0, 1)
            grad, *of_batch = self._as_batch(grad, q, k, v, out)
            grads = cudnn.backward(grad, of_batch, by_sequence, spec.scale)
            return [part.transpose(1, 2).flatten(0, 1) for part in grads]
        settings, options = _flash_arguments(self._bounds, self._bounds, spec.scale, window)
        return _flash_backward(grad, (*kept, *random), settings, options)

    def _attend_packed(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        if self._bounds is None:
            self._bounds = Bounds.of(self._lengths, q.device)
        if _window(spec, self._bounds) is None and not self._are_given:
            if self._is_even(q, k, v):
                return _attend_evenly(sinks, spec, *self._as_batch(q, k, v))
            if self._is_long(q, k, v):
                return self._attend_alone(spec, q, k, v, sinks)
        return packed_attention(spec, q, k, v, self._bounds, self._bounds, sinks)

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
                and cudnn.is_usable(*self._as_batch(q, k, v))
            )
        return self._even

    def _as_batch(self, *parts: Tensor) -> list[Tensor]:
        """(N, heads, D) as (sequences, heads, length, D)."""
        shape = (len(self._lengths), self._lengths[0])
        return [part.unflatten(0, shape).transpose(1, 2) for part in parts]

    def _is_long(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether there is one sequence, long enough for the same kernel."""
        return (
            len(self._lengths) == 1
            and self._lengths[0] >= _LONG
            and not torch.are_deterministic_algorithms_enabled()
            and cudnn.is_usable(*self._as_batch(q, k, v))
        )

    def _attend_alone(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Behind the last token there is padding, which no token before it sees."""
        length = self._lengths[0]
        padded = (F.pad(x, (0, 0, 0, 0, 0, -length % _LONG_STEP)) for x in (q, k, v))
        q, k, v = (x[None].transpose(1, 2) for x in padded)
        return _attend_evenly(sinks, spec, q, k, v)[:length]


def _attend_evenly(
    sinks: Tensor | None, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """(B · n, H, D) from q (B, H, n, D), k and v (B, K, n, D)."""
    out = cudnn.attend(q, k, v, spec.scale, sinks)
    return out.transpose(1, 2).flatten(0, 1)


class Bounds(NamedTuple):
    """Where each of a row of packed sequences begins, and where the last ends (int32)."""

    starts: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Bounds:
        starts = [0, *itertools.accumulate(lengths)]
        return cls(torch.tensor(starts, dtype=torch.int32, device=device), max(lengths))


def packed_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Bounds,
    keys: Bounds,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention where `has_packed_kernel`: q (n, H, D), k and v (m, K, D), packed alike.

    A sequence with fewer queries than keys has them for its last tokens.
    """
    return _FlashAttention.apply(q, k, v, queries, keys, spec.scale, _window(spec, keys), sinks)


def _window(spec: AttentionSpec, keys: Bounds) -> int | None:
    """None where no sequence reaches beyond it."""
    return spec.window if spec.window is not None and spec.window < keys.longest else None


class _FlashAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    """The kernel behind `torch.nn.attention.varlen`, called without the layers in between, which
    cost more than a small batch computes."""

    @staticmethod
    def forward(ctx, q, k, v, queries, keys, scale, window, sinks):  # type: ignore[no-untyped-def]
        ctx.settings, ctx.options = _flash_arguments(queries, keys, scale, window)
        out, normalizers, *random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ctx.settings, False, **ctx.options
        )
        if sinks is not None:
            sink_attention.take_share(out.transpose(0, 1), normalizers, sinks)
        ctx.save_for_backward(q, k, v, out, normalizers, *random)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grads = _flash_backward(grad, ctx.saved_tensors, ctx.settings, ctx.options)
        return *grads, None, None, None, None, None


def _flash_arguments(
    queries: Bounds, keys: Bounds, scale: float, window: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    no_dropout, is_causal = 0.0, window is None
    longest = (queries.longest, keys.longest)
    options: dict[str, Any] = {"scale": scale}
    if window is not None:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    return (queries.starts, keys.starts, *longest, no_dropout, is_causal), options


def _flash_backward(
    grad: Tensor, kept: Sequence[Tensor], settings: tuple[Any, ...], options: dict[str, Any]
) -> Sequence[Tensor]:
    """The gradients of q, k and v; `kept` are those three, the output, log Σ exp(scores) (H, n),
    and two of no meaning without dropout."""
    q, k, v, out, normalizers, *random = kept
    with _strictly_deterministic():
        grads: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, normalizers, *settings, *random, **options
        )
    return grads


class _OrderedAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    """`kernels.ordered_attention`, which has the bits of decoding."""

    @staticmethod
    def forward(ctx, q, k, v, spec, tiles, attention):  # type: ignore[no-untyped-def]
        ordered = kernels.module("ordered_attention")
        out, normalizers = ordered.attend_packed(spec, q, k, v, tiles)
        ctx.spec, ctx.attention = spec, attention
        ctx.save_for_backward(q, k, v, out, normalizers)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grads = ctx.attention.backward_in_order(ctx.spec, grad, ctx.saved_tensors)
        return *grads, None, None, None


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

    With `warn_only` this kernel warns and adds in any order; without, it adds in one order.
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


def has_packed_kernel(spec: AttentionSpec, q: Tensor) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and is_half and not is_by_hand(spec)


def is_by_hand(spec: AttentionSpec) -> bool:
    """Whether a layer's scores are more than products, which is nothing for fused kernels."""
    return spec.softcap is not None or spec.extent is not None


def _attend(
    spec: AttentionSpec, length: int, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Causal attention of B sequences of n tokens: q (B · n, H, D), k and v (B · n, K, D)."""
    is_windowed = spec.window is not None and length > spec.window
    is_plain = sinks is None and not is_by_hand(spec) and not is_windowed
    if is_plain and causal.is_quicker(length, q, v):
        parts = zip(*(x.split(length) for x in (q, k, v)), strict=True)
        outputs = [causal.attend(q_of, k_of, v_of, spec.scale) for q_of, k_of, v_of in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    if sinks is not None:
        assert not is_by_hand(spec), "no family has both"
        out = sink_attention.attend(spec, q, k, v, sinks)
    elif is_by_hand(spec):
        out = _attend_by_hand(spec, q, k, v)
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


def _attend_by_hand(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same where no fused kernel squeezes the scores. (B, heads, n, D) each."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q, by_distance = split_query(spec, q)
    scores = q @ k.transpose(2, 3) * spec.scale
    if by_distance is not None:
        position = torch.arange(q.shape[2], device=q.device)
        scores = scores + of_distances(by_distance, position[:, None] - position)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    mask = causal_mask(q.shape[2], spec.window, q.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


def split_query(spec: AttentionSpec, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """Queries (…, D), and (…, extent) what is added to scores by distance, where that is done."""
    if spec.extent is None:
        return q, None
    size = q.shape[-1] - spec.extent
    return q[..., :size], q[..., size:]


def of_distances(by_distance: Tensor, distances: Tensor) -> Tensor:
    """(…, heads, n, keys) of (…, heads, n, extent), for distances (n, keys) from query to key."""
    extent = by_distance.shape[-1]
    places = distances.clamp(0, extent - 1).expand(*by_distance.shape[:-1], -1)
    is_near = (distances >= 0) & (distances < extent)
    return by_distance.gather(-1, places).masked_fill(~is_near, 0.0)


def causal_mask(num_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """(n, n) of bool: whether the row's position sees the column's."""
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if window is not None:
        mask &= ~torch.ones_like(mask).tril(-window)
    return mask
