"""What the tokens of one sampling step see: their own sequence, by way of the cache.

A step mixes two kinds of rows: chunks of prompts, and one new token for each running sequence. The
new keys and values are written to the cache first, then every row attends to what its sequence
holds. Running sequences are taken a slab at a time, in one call over padded rows; on the CPU in
float32 that is torch's own kernel, where the heads that share keys are rows of one product (two
cores, 16 sequences of 100 tokens: 0.14 ms a layer, and 0.26 ms as batched products). What counts
there is how often keys and values are read, so the samples of one prompt attend to it together; the
two partial results are then weighed by the probability each part holds.

Shapes: N rows of the step, B sequences in a slab, H query heads, K key/value heads, G = H / K,
D head size, T tokens of a chunk or span, R slots of a slab, C its capacity in tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.batch import (
    Bounds,
    PackedAttention,
    has_packed_kernel,
    packed_attention,
    softmax_with_sinks,
)
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig
from tinsmith.engine.local.sample.cached_states import CachedStates
from tinsmith.engine.local.sample.kvcache import Slab, Span

_MASKED = -1e30
"""Finite, so that a row whose every key is masked gives a weight of zero and not a NaN."""


@dataclass(slots=True)
class PromptChunk:
    """Rows start to stop hold tokens `num_past` and following of the prompt in `span`."""

    start: int
    stop: int
    span: Span
    num_past: int


@dataclass(slots=True)
class SharedPrompt:
    """Which rows of a slab part continue the prompt in `span`."""

    span: Span
    members: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SlabRows:
    """The sequences in consecutive rows of a slab, one new token each."""

    slab: Slab
    first: int
    rows: list[int] = field(default_factory=list)
    """For each sequence, the step's row that holds its new token."""
    num_own: list[int] = field(default_factory=list)
    """For each, how many tokens its slot held before."""
    num_shared: list[int] = field(default_factory=list)
    """For each, how many tokens precede the slot's in a shared prompt."""
    prompts: list[SharedPrompt] = field(default_factory=list)


class CachedAttention:
    """The `Attention` of one step. Lengths are those before it; the caller counts up after."""

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device,
        prompts: list[PromptChunk],
        running: list[SlabRows],
    ) -> None:
        self._parts = prompts, running, device
        self._layers = config.layers
        self._num_kv_heads = config.num_kv_heads
        num_rows = sum(part.stop - part.start for part in prompts)
        num_rows += sum(len(part.rows) for part in running)
        self._packed: _PackedPrompts | None = None
        if prompts and not running and kernels.are_usable(prompts[0].span.keys):
            self._packed = _PackedPrompts(config, prompts, device)
        self._prompts = [_PromptRows(part, device) for part in prompts]
        self._running = [_RunningRows(part, config.num_kv_heads, device) for part in running]
        self._is_whole = (
            not prompts and len(running) == 1 and self._running[0].is_in_order(num_rows)
        )

    @functools.cached_property
    def sequences(self) -> CachedStates:
        return CachedStates(*self._parts)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        spec = self._layers[layer]
        # Only prefill, on CUDA.
        if self._packed is not None:
            return self._packed.attend(layer, spec, q, k, v, sinks)
        # Only decode, in the order of one slab: no rows to pick.
        if self._is_whole:
            return self._running[0].attend(layer, spec, q, k, v, sinks)
        # Mixed: each part takes its rows of (N, H, D).
        out = torch.empty_like(q)
        for prompt in self._prompts:
            rows = prompt.rows
            prompt.write(layer, k[rows], v[rows])
            out[rows] = prompt.attend(layer, spec, q[rows], sinks)
        for part in self._running:
            index = part.rows
            out[index] = part.attend(layer, spec, q[index], k[index], v[index], sinks)
        return out


class _PackedPrompts:
    """All chunks of a step without running rows, on CUDA: few launches, whatever their number.

    Keys and values are written by one kernel. Chunks at the start of their prompt then attend in
    one call of a kernel for packed sequences, and those further on in another.
    """

    def __init__(
        self, config: DecoderConfig, chunks: list[PromptChunk], device: torch.device
    ) -> None:
        from tinsmith.engine.local.sample.decode_tables import prompt_places

        chunks = sorted(chunks, key=lambda chunk: chunk.start)
        parts = [(c.span, c.num_past, c.num_past + c.stop - c.start) for c in chunks]
        self._places = prompt_places(parts, device)
        fresh = [chunk for chunk in chunks if not chunk.num_past]
        later = [chunk for chunk in chunks if chunk.num_past]
        self._later = _LaterRows(later, device) if later else None
        self._attention = PackedAttention(config, [chunk.stop - chunk.start for chunk in fresh])
        self._fresh = _rows_of(fresh, device) if fresh else None

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        from tinsmith.engine.local.kernels.decode_attention import write

        # KV cache first: k and v (N, K, D) go to their spans.
        write(k, v, self._places, layer)
        if self._later is None:
            return self._attention(layer, q, k, v, sinks)
        out = torch.empty_like(q)
        self._later.attend(layer, spec, q, out, sinks)
        if self._fresh is not None:
            rows = self._fresh
            out[rows] = self._attention(layer, q[rows], k[rows], v[rows], sinks)
        return out


class _LaterRows:
    """Chunks whose prompts have been read in part: what the cache holds of them is packed.

    A kernel that takes a mask would plan anew for each length, and that takes far longer than
    the chunk.
    """

    def __init__(self, chunks: list[PromptChunk], device: torch.device) -> None:
        self._parts = [_PromptRows(chunk, device) for chunk in chunks]
        self._rows = _rows_of(chunks, device)
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        self._stops = [c.num_past + length for c, length in zip(chunks, lengths, strict=True)]
        self._spans = [chunk.span for chunk in chunks]
        self._queries = Bounds.of(lengths, device)
        self._keys = Bounds.of(self._stops, device)

    def attend(
        self, layer: int, spec: AttentionSpec, q: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        """From these rows of q (N, H, D) to the same of `out`."""
        if not has_packed_kernel(spec, q, sinks):
            for part in self._parts:
                out[part.rows] = part.attend(layer, spec, q[part.rows], sinks)
            return
        ends = list(zip(self._spans, self._stops, strict=True))
        # Pack what the spans hold: (K, T, D) each to (sum of T, K, D).
        keys = torch.cat([span.keys[layer, :, :stop].transpose(0, 1) for span, stop in ends])
        values = torch.cat([span.values[layer, :, :stop].transpose(0, 1) for span, stop in ends])
        out[self._rows] = packed_attention(
            spec, q[self._rows], keys, values, self._queries, self._keys
        )


def _rows_of(chunks: list[PromptChunk], device: torch.device) -> Tensor:
    """The step's rows that some chunks have."""
    rows = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
    return torch.from_numpy(np.concatenate(rows)).to(device)


class _PromptRows:
    """One chunk of one prompt."""

    def __init__(self, chunk: PromptChunk, device: torch.device) -> None:
        self.rows = slice(chunk.start, chunk.stop)
        self._span = chunk.span
        self._past = chunk.num_past
        self._stop = chunk.num_past + chunk.stop - chunk.start
        self._device = device
        self._bias: dict[tuple[int, int | None], Tensor] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put k and v (T, K, D) into the span."""
        self._span.keys[layer, :, self._past : self._stop] = k.transpose(0, 1)
        self._span.values[layer, :, self._past : self._stop] = v.transpose(0, 1)

    def attend(self, layer: int, spec: AttentionSpec, q: Tensor, sinks: Tensor | None) -> Tensor:
        """q (T, H, D) to (T, H, D), over what the span holds."""
        keys, values = self._span.keys[layer], self._span.values[layer]
        first = 0 if spec.window is None else max(0, self._past - spec.window + 1)
        keys, values = keys[:, first : self._stop], values[:, first : self._stop]
        is_plain = self._past == 0 and (spec.window is None or self._stop <= spec.window)
        if spec.softcap is not None or sinks is not None:
            return self._attend_by_hand(spec, q, keys, values, first, sinks)
        group = q.shape[1] // len(keys)
        bias = None if is_plain else self._mask(first, spec.window).to(q.dtype)
        if bias is not None and q.is_cuda and group > 1:
            # No fused kernel takes both a mask and grouped heads.
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            group = 1
        # (T, H, D) to (1, H, T, D), over keys and values (1, K, keys, D).
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=bias,
            is_causal=is_plain,
            scale=spec.scale,
            enable_gqa=group > 1,
        )
        return out[0].transpose(0, 1)

    def _attend_by_hand(
        self,
        spec: AttentionSpec,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        first: int,
        sinks: Tensor | None,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        kv_heads = len(keys)
        # (T, H, D) to (K, G, T, D) to (K, G · T, D).
        grouped = q.view(num_tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(kv_heads, -1, head_dim)
        # (H, T, keys).
        scores = _scores(grouped, keys, spec, None).view(num_heads, num_tokens, keys.shape[1])
        scores += self._mask(first, spec.window)
        weights = softmax_with_sinks(scores, sinks).to(values.dtype)
        out = torch.bmm(weights.view(kv_heads, -1, keys.shape[1]), values)
        # (K, G · T, D) back to (T, H, D).
        out = out.view(kv_heads, -1, num_tokens, head_dim).permute(2, 0, 1, 3)
        return out.reshape(num_tokens, num_heads, head_dim)

    def _mask(self, first: int, window: int | None) -> Tensor:
        """(T, keys from `first`): zero where a token may look."""
        if (first, window) not in self._bias:
            token = torch.arange(self._past, self._stop, device=self._device)[:, None]
            key = torch.arange(first, self._stop, device=self._device)[None]
            is_seen = key <= token
            if window is not None:
                is_seen &= key > token - window
            self._bias[first, window] = torch.where(is_seen, 0.0, _MASKED)
        return self._bias[first, window]


class _RunningRows:
    """The sequences of one slab, and the prompts that some of them share."""

    def __init__(self, part: SlabRows, num_kv_heads: int, device: torch.device) -> None:
        self._part = part
        self._slab = part.slab
        self._num_kv_heads = num_kv_heads
        self._device = device
        self.rows = torch.tensor(part.rows, device=device)
        self._slots = slice(part.first, part.first + len(part.rows))
        self._own = torch.tensor(part.num_own, device=device)
        self._places = self._new_token_places()
        self._longest = max(part.num_own) + 1
        self._are_equal = min(part.num_own) + 1 == self._longest
        self._own_bias: dict[int | None, Tensor | None] = {}
        position = np.add(part.num_own, part.num_shared)
        self._prompts = [
            _SharedRows(shared, position[shared.members], device) for shared in part.prompts
        ]

    def is_in_order(self, num_rows: int) -> bool:
        """Whether the step's rows are these sequences, in this order."""
        return self._part.rows == list(range(num_rows))

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """q (B, H, D), k and v (B, K, D) to (B, H, D)."""
        count, num_heads, head_dim = q.shape
        kv_heads = self._num_kv_heads
        # 1. KV cache: k and v (B, K, D) go behind the slots' tokens, (R, K, C, D).
        all_keys, all_values = self._slab.keys[layer], self._slab.values[layer]
        all_keys.view(-1, head_dim).index_copy_(0, self._places, k.reshape(-1, head_dim))
        all_values.view(-1, head_dim).index_copy_(0, self._places, v.reshape(-1, head_dim))
        # 2. Each slot's own tokens: q to (B · K, G, D), over keys (B · K, longest, D).
        keys = all_keys[self._slots, :, : self._longest].flatten(0, 1)
        values = all_values[self._slots, :, : self._longest].flatten(0, 1)
        grouped = q.reshape(count * kv_heads, -1, head_dim)
        out, mass = _attend(grouped, keys, values, spec, self._bias(spec.window))
        # 3. Shared prompts, blended by mass: (B, K, G).
        if self._prompts:
            mass = mass.view(count, kv_heads, -1)
            out = out.view(count, kv_heads, -1, head_dim)
            grouped = grouped.view(count, kv_heads, -1, head_dim)
            for prompt in self._prompts:
                prompt_mass = prompt.blend(layer, spec, grouped, out, mass)
                if sinks is not None:
                    mass[prompt.members] = torch.logaddexp(prompt_mass, mass[prompt.members])
        out = out.view(count, num_heads, head_dim)
        if sinks is None:
            return out
        # 4. What the sinks leave of it: exp(mass) / (exp(mass) + exp(sink)).
        share = torch.sigmoid(mass.reshape(count, num_heads) - sinks.float())
        return (out.float() * share[..., None]).to(out.dtype)

    def _new_token_places(self) -> Tensor:
        """(B · K,) which vectors of a layer of the slab, in a row, are to hold the new token's."""
        num_heads, capacity = self._num_kv_heads, self._slab.capacity
        slot = torch.arange(self._slots.start, self._slots.stop, device=self._device)
        head = torch.arange(num_heads, device=self._device)
        return ((slot[:, None] * num_heads + head) * capacity + self._own[:, None]).flatten()

    def _bias(self, window: int | None) -> Tensor | None:
        """(B · K, 1, longest), or None when every key is seen."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._own_bias:
            self._own_bias[window] = self._make_bias(window)
        return self._own_bias[window]

    def _make_bias(self, window: int | None) -> Tensor | None:
        if self._are_equal and window is None:
            return None
        key = torch.arange(self._longest, device=self._device)[None]
        own = self._own[:, None]
        is_seen = key <= own
        if window is not None:
            is_seen &= key > own - window
        bias = torch.where(is_seen, 0.0, _MASKED)
        return bias.repeat_interleave(self._num_kv_heads, 0)[:, None]


class _SharedRows:
    """The samples of one prompt: they attend to it together."""

    def __init__(self, shared: SharedPrompt, positions: np.ndarray, device: torch.device) -> None:
        self._span = shared.span
        self.members = torch.tensor(shared.members, device=device)
        self._positions = torch.tensor(positions, device=device)
        self._last = int(positions.max())
        self._device = device

    def blend(
        self, layer: int, spec: AttentionSpec, q: Tensor, own: Tensor, own_mass: Tensor
    ) -> Tensor:
        """Mix the prompt's part into `own` (B, K, G, D).

        `own_mass` (B, K, G) is the log of the summed exponentials of the slot's scores; the answer
        (members, K, G) that of the prompt's.
        """
        keys, values = self._span.keys[layer], self._span.values[layer]
        kv_heads, num_tokens, head_dim = keys.shape
        count = len(self.members)
        # (members, K, G, D) to (K, members · G, D): one product for all samples of the prompt.
        grouped = q[self.members].transpose(0, 1).reshape(kv_heads, -1, head_dim)
        bias = None
        if spec.window is not None and self._last >= spec.window:
            key = torch.arange(num_tokens, device=self._device)
            is_hidden = key[None] <= (self._positions - spec.window)[:, None]
            bias = torch.where(is_hidden, _MASKED, 0.0)
            bias = bias.repeat_interleave(grouped.shape[1] // count, 0)[None]
        out, mass = _attend(grouped, keys, values, spec, bias)
        # Back to (members, K, G) and (members, K, G, D).
        mass = mass.view(kv_heads, count, -1).transpose(0, 1)
        out = out.view(kv_heads, count, -1, head_dim).transpose(0, 1)
        # The prompt's share of the probability: exp(mass) / (exp(mass) + exp(own_mass)).
        share = torch.sigmoid(mass - own_mass[self.members])[..., None]
        own[self.members] = torch.lerp(own[self.members].float(), out.float(), share).to(own.dtype)
        return mass


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q (n, rows, D) over keys and values (n, tokens, D), with `bias` (1 or n, 1 or rows, tokens).

    Also (n, rows) float32: the log of each row's summed exponentials.
    """
    if q.device.type == "cpu" and q.dtype == torch.float32 and spec.softcap is None:
        if bias is not None:
            bias = bias.expand(len(q), q.shape[1], -1)[None]
        out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], keys[None], values[None], 0.0, False, attn_mask=bias, scale=spec.scale
        )
        return out[0].contiguous(), mass[0]
    scores = _scores(q, keys, spec, bias)
    out = torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values)
    return out, torch.logsumexp(scores, dim=-1)


def _scores(q: Tensor, keys: Tensor, spec: AttentionSpec, bias: Tensor | None) -> Tensor:
    """(n, rows, tokens) float32 from q (n, rows, D) and keys (n, tokens, D)."""
    keys = keys.transpose(1, 2)
    if q.dtype == torch.float32 and spec.softcap is None and bias is not None:
        return torch.baddbmm(bias, q, keys, alpha=spec.scale)
    if q.dtype == torch.float32:
        scores = torch.bmm(q, keys)
    elif q.is_cuda:
        scores = torch.bmm(q, keys, out_dtype=torch.float32)
    else:
        scores = torch.bmm(q.float(), keys.float())
    scores *= spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    return scores if bias is None else scores.add_(bias)
