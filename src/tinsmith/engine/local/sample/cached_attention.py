"""What the tokens of one sampling step see: their own sequence, by way of the cache.

A step mixes two kinds of rows: chunks of prompts, and one new token for each running sequence. The
new keys and values are written to the cache first, then every row attends to what its sequence
holds. Blocks lie anywhere, so what is read is first copied together. Running sequences of like
length are taken at once, in one call over padded rows; on the CPU in float32 that is torch's own
kernel, where the heads that share keys are rows of one product (two cores, 16 sequences of 100
tokens: 0.14 ms a layer, and 0.26 ms as batched products). What counts there is how often keys and
values are read, so the samples of one prompt attend to it together; the two partial results are
then weighed by the probability each part holds.

Shapes: N rows of the step, B sequences of like length, H query heads, K key/value heads,
G = H / K, D head size, T tokens of a chunk, S of a block, M blocks of each sequence.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.batch import (
    Bounds,
    PackedAttention,
    has_packed_kernel,
    packed_attention,
    softmax_with_sinks,
)
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig
from tinsmith.engine.local.sample.cached_states import CachedStates
from tinsmith.engine.local.sample.kvcache import BlockTable, KVCache

_MASKED = -1e30
"""Finite, so that a row whose every key is masked gives a weight of zero and not a NaN."""


class Rows(NamedTuple):
    """Rows start to stop of the step hold the tokens that follow those in `table`."""

    start: int
    stop: int
    table: BlockTable

    @property
    def num_past(self) -> int:
        return self.table.num_tokens

    @property
    def end(self) -> int:
        """How many tokens the table holds after the step."""
        return self.num_past + self.stop - self.start


class CachedAttention:
    """The `Attention` of one step. Lengths are those before it; the caller counts up after."""

    def __init__(
        self,
        config: DecoderConfig,
        prompts: list[Rows],
        running: list[Rows],
        *,
        is_invariant: bool = False,
    ) -> None:
        """A row of `running` is one sequence's new token. With `is_invariant` every row finds what
        it would find in training, to the last bit; see `invariant`."""
        self._sequences = sorted([*prompts, *running])
        self._layers = config.layers
        self._cache = cache = self._sequences[0].table.cache
        self._places = _places(cache, self._sequences)
        self._packed: _PackedPrompts | None = None
        self._ordered: _OrderedRows | None = None
        self._alike: list[_InvariantRows] = []
        has_kernels = kernels.are_usable(cache.keys)
        if is_invariant and has_kernels:
            self._ordered = _OrderedRows(self._sequences, cache)
        elif is_invariant:
            self._alike = _InvariantRows.of(self._sequences, cache)
        elif prompts and not running and has_kernels:
            self._packed = _PackedPrompts(config, cache, sorted(prompts))
        if is_invariant:
            prompts, running = [], []
        self._prompts = [_PromptRows(rows, cache) for rows in prompts]
        self._running = [_RunningRows(rows, cache) for rows in _of_like_length(running)]
        self._is_whole = not prompts and len(self._running) == 1 and self._running[0].are_in_order

    @functools.cached_property
    def sequences(self) -> CachedStates:
        return CachedStates(self._cache.states, self._sequences)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        spec = self._layers[layer]
        # KV cache first: k and v (N, K, D) to the vectors (D,) of the layer's blocks.
        head_dim = k.shape[-1]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.view(-1, head_dim).index_copy_(0, self._places, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self._places, v.reshape(-1, head_dim))
        # On CUDA, in the order of training.
        if self._ordered is not None:
            return self._ordered.attend(layer, spec, q)
        # Only prefill, on CUDA.
        if self._packed is not None:
            return self._packed.attend(layer, spec, q, k, v, sinks)
        # Only decode, all at once: no rows to pick.
        if self._is_whole:
            return self._running[0].attend(layer, spec, q, sinks)
        # Mixed: each part takes its rows of (N, H, D).
        out = torch.empty_like(q)
        for alike in self._alike:
            out[alike.rows] = alike.attend(layer, spec, q[alike.rows], sinks)
        for prompt in self._prompts:
            rows = prompt.rows
            out[rows] = prompt.attend(layer, spec, q[rows], k[rows], v[rows], sinks)
        for part in self._running:
            out[part.rows] = part.attend(layer, spec, q[part.rows], sinks)
        return out


def _places(cache: KVCache, sequences: list[Rows]) -> Tensor:
    """(N · K,) which vectors of a layer's blocks (N, K, S, D), in a row, the new tokens get."""
    size, num_heads = cache.shape.block_tokens, cache.shape.num_kv_heads
    firsts = []
    for rows in sequences:
        position = np.arange(rows.num_past, rows.end)
        first = rows.num_past // size
        blocks = np.array(rows.table.blocks[first : (rows.end - 1) // size + 1], dtype=np.int64)
        firsts.append(blocks[position // size - first] * (num_heads * size) + position % size)
    heads = np.arange(num_heads) * size
    places = np.concatenate(firsts)[:, None] + heads
    return torch.from_numpy(places.ravel()).to(cache.shape.device)


class _Gathered:
    """Copies of blocks of B sequences, M of each, with the tokens of a head in a row."""

    def __init__(self, cache: KVCache, blocks: np.ndarray) -> None:
        """`blocks` (B, M)."""
        self._cache = cache
        shape = cache.shape
        heads = np.arange(shape.num_kv_heads)
        # (B, K, M): where the S · D numbers of a head lie in a layer's blocks.
        places = blocks[:, None, :] * shape.num_kv_heads + heads[None, :, None]
        self._places = torch.from_numpy(places.ravel()).to(shape.device)
        self._size = (len(blocks) * shape.num_kv_heads, -1, shape.head_dim)
        numbers = (len(self._places), shape.block_tokens * shape.head_dim)
        # Used again for each layer: fresh memory would take longer than the copy.
        self._keys = torch.empty(numbers, dtype=shape.dtype, device=shape.device)
        self._values = torch.empty_like(self._keys)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B · K, M · S, D), good until the next layer is read."""
        for source, target in (
            (self._cache.keys[layer], self._keys),
            (self._cache.values[layer], self._values),
        ):
            torch.index_select(source.view(-1, target.shape[1]), 0, self._places, out=target)
        return self._keys.view(self._size), self._values.view(self._size)


class _PackedPrompts:
    """All chunks of a step without running rows, on CUDA: few launches, whatever their number.

    Chunks at the start of their prompt attend in one call of a kernel for packed sequences, and
    those further on in another.
    """

    def __init__(self, config: DecoderConfig, cache: KVCache, chunks: list[Rows]) -> None:
        fresh = [chunk for chunk in chunks if not chunk.num_past]
        later = [chunk for chunk in chunks if chunk.num_past]
        self._later = _LaterRows(later, cache) if later else None
        self._attention = PackedAttention(config, [chunk.stop - chunk.start for chunk in fresh])
        self._fresh = _rows_of(fresh, cache.shape.device) if fresh else None

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        if self._later is None:
            return self._attention(layer, q, k, v, sinks)
        out = torch.empty_like(q)
        self._later.attend(layer, spec, q, k, v, out, sinks)
        if self._fresh is not None:
            rows = self._fresh
            out[rows] = self._attention(layer, q[rows], k[rows], v[rows], sinks)
        return out


class _LaterRows:
    """Chunks whose prompts have been read in part: what the cache holds of them is packed.

    A kernel that takes a mask would plan anew for each length, and that takes far longer than
    the chunk.
    """

    def __init__(self, chunks: list[Rows], cache: KVCache) -> None:
        shape = cache.shape
        self._cache = cache
        self._parts = [_PromptRows(chunk, cache) for chunk in chunks]
        self._rows = _rows_of(chunks, shape.device)
        self._queries = Bounds.of([chunk.stop - chunk.start for chunk in chunks], shape.device)
        self._keys = Bounds.of([chunk.end for chunk in chunks], shape.device)
        # (sum of ends · K,): the vectors (D,) of all tokens so far, token by token.
        size, heads = shape.block_tokens, np.arange(shape.num_kv_heads)
        firsts = []
        for chunk in chunks:
            position = np.arange(chunk.end)
            blocks = np.array(chunk.table.blocks, dtype=np.int64)[position // size]
            firsts.append(blocks * (shape.num_kv_heads * size) + position % size)
        places = np.concatenate(firsts)[:, None] + heads * size
        self._places = torch.from_numpy(places.ravel()).to(shape.device)

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """From these rows of q (N, H, D) to the same of `out`."""
        if not has_packed_kernel(spec, q, sinks):
            for part in self._parts:
                rows = part.rows
                out[rows] = part.attend(layer, spec, q[rows], k[rows], v[rows], sinks)
            return
        # Pack what the tables hold: (sum of T, K, D).
        size = (-1, *k.shape[1:])
        keys = self._cache.keys[layer].view(-1, k.shape[-1])[self._places].view(size)
        values = self._cache.values[layer].view(-1, k.shape[-1])[self._places].view(size)
        out[self._rows] = packed_attention(
            spec, q[self._rows], keys, values, self._queries, self._keys
        )


def _rows_of(chunks: list[Rows], device: torch.device) -> Tensor:
    """The step's rows that some chunks have."""
    rows = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
    return torch.from_numpy(np.concatenate(rows)).to(device)


class _PromptRows:
    """One chunk of one prompt."""

    def __init__(self, chunk: Rows, cache: KVCache) -> None:
        self.rows = slice(chunk.start, chunk.stop)
        self._past = chunk.num_past
        self._stop = chunk.end
        self._device = cache.shape.device
        self._bias: dict[tuple[int, int | None], Tensor] = {}
        self._gathered: _Gathered | None = None
        if chunk.num_past:
            blocks = chunk.table.blocks[: cache.shape.blocks_for(chunk.end)]
            self._gathered = _Gathered(cache, np.array([blocks], dtype=np.int64))

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """q (T, H, D) to (T, H, D), over its own k and v (T, K, D) and what the cache holds."""
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if self._gathered is not None:
            keys, values = self._gathered.read(layer)
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


class _InvariantRows:
    """Tokens, as many of each, of sequences of like length; they find the bits of training."""

    def __init__(self, parts: list[Rows], cache: KVCache) -> None:
        device = cache.shape.device
        self.rows = _rows_of(parts, device)
        self._size = (len(parts), -1)
        num_blocks = [cache.shape.blocks_for(part.end) for part in parts]
        blocks = np.zeros((len(parts), max(num_blocks)), dtype=np.int64)
        for row, (part, count) in enumerate(zip(parts, num_blocks, strict=True)):
            blocks[row, :count] = part.table.blocks[:count]
        self._gathered = _Gathered(cache, blocks)
        positions = [np.arange(part.num_past, part.end) for part in parts]
        self._positions = torch.from_numpy(np.stack(positions)).to(device)

    @classmethod
    def of(cls, sequences: list[Rows], cache: KVCache) -> list[_InvariantRows]:
        parts: dict[tuple[int, int], list[Rows]] = {}
        for rows in sequences:
            key = (rows.stop - rows.start, cache.shape.blocks_for(rows.end).bit_length())
            parts.setdefault(key, []).append(rows)
        return [cls(part, cache) for part in parts.values()]

    def attend(self, layer: int, spec: AttentionSpec, q: Tensor, sinks: Tensor | None) -> Tensor:
        """q (N, H, D) to (N, H, D), over all that the cache holds."""
        keys, values = self._gathered.read(layer)
        batch = q.unflatten(0, self._size)
        return invariant.attend(spec, batch, keys, values, self._positions, sinks).flatten(0, 1)


class _OrderedRows:
    """All tokens of a step, on CUDA; they find the bits of training."""

    def __init__(self, sequences: list[Rows], cache: KVCache) -> None:
        self._ordered = kernels.module("ordered_attention")
        begins = np.cumsum([0, *(len(rows.table.blocks) for rows in sequences)]).tolist()
        self._spans = [
            self._ordered.Span(rows.start, rows.stop, rows.num_past, begin)
            for rows, begin in zip(sequences, begins[:-1], strict=True)
        ]
        blocks = np.concatenate([np.array(rows.table.blocks) for rows in sequences])
        self._cache = cache
        self._blocks = torch.from_numpy(blocks.astype(np.int32)).to(cache.shape.device)
        self._tiles: Any = None

    def attend(self, layer: int, spec: AttentionSpec, q: Tensor) -> Tensor:
        """q (N, H, D) to (N, H, D), over all that the cache holds."""
        if self._tiles is None:
            group = q.shape[1] // self._cache.shape.num_kv_heads
            self._tiles = self._ordered.tiles_of(self._spans, group, q.device)
        keys, values = self._cache.keys, self._cache.values
        found: Tensor = self._ordered.attend_cached(
            spec, q, keys, values, self._blocks, layer, self._tiles
        )
        return found


class _Own(NamedTuple):
    """A running sequence, and how many of its first blocks others of the step read too."""

    rows: Rows
    num_common: int


def _of_like_length(running: list[Rows]) -> list[list[_Own]]:
    """Sequences whose own blocks are about as many: padding is then less than what is read."""
    num_readers = Counter(id(rows.table.common) for rows in running)
    parts: dict[int, list[_Own]] = {}
    for rows in running:
        table = rows.table
        num_common = len(table.common) if num_readers[id(table.common)] > 1 else 0
        num_own = max(4, len(table.blocks) - num_common)
        parts.setdefault((num_own - 1).bit_length(), []).append(_Own(rows, num_common))
    return list(parts.values())


class _RunningRows:
    """Sequences of like length with a new token each, and the prompts that some of them share."""

    def __init__(self, part: list[_Own], cache: KVCache) -> None:
        shape = cache.shape
        self._num_kv_heads = shape.num_kv_heads
        self._device = shape.device
        rows = [own.rows.start for own in part]
        self.rows = torch.tensor(rows, device=shape.device)
        self.are_in_order = rows == list(range(len(rows)))
        """Whether they are the first rows of the step, in this order."""
        num_own = [own.rows.num_past - own.num_common * shape.block_tokens for own in part]
        self._own = torch.tensor(num_own, device=shape.device)
        self._longest = max(num_own) + 1
        self._are_equal = min(num_own) + 1 == self._longest
        self._own_bias: dict[int | None, Tensor | None] = {}
        self._gathered = _Gathered(cache, _own_blocks(part, shape.blocks_for(self._longest)))
        sharing: dict[int, list[int]] = {}
        for member, own in enumerate(part):
            if own.num_common:
                sharing.setdefault(id(own.rows.table.common), []).append(member)
        self._prompts = [
            _SharedRows([part[member].rows for member in members], members, cache)
            for members in sharing.values()
        ]

    def attend(self, layer: int, spec: AttentionSpec, q: Tensor, sinks: Tensor | None) -> Tensor:
        """q (B, H, D) to (B, H, D)."""
        count, num_heads, head_dim = q.shape
        kv_heads = self._num_kv_heads
        # 1. Each sequence's own tokens: q to (B · K, G, D), over keys (B · K, longest, D).
        keys, values = self._gathered.read(layer)
        keys, values = keys[:, : self._longest], values[:, : self._longest]
        grouped = q.reshape(count * kv_heads, -1, head_dim)
        out, mass = _attend(grouped, keys, values, spec, self._bias(spec.window))
        # 2. Shared prompts, blended by mass: (B, K, G).
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
        # 3. What the sinks leave of it: exp(mass) / (exp(mass) + exp(sink)).
        share = torch.sigmoid(mass.reshape(count, num_heads) - sinks.float())
        return (out.float() * share[..., None]).to(out.dtype)

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


def _own_blocks(part: list[_Own], num_blocks: int) -> np.ndarray:
    """(B, M): the last block of a sequence again where it has fewer."""
    found = np.empty((len(part), num_blocks), dtype=np.int64)
    for row, own in zip(found, part, strict=True):
        blocks = own.rows.table.blocks[own.num_common : own.num_common + num_blocks]
        row[: len(blocks)] = blocks
        row[len(blocks) :] = blocks[-1]
    return found


class _SharedRows:
    """The samples of one prompt: they attend together to the blocks they have in common."""

    def __init__(self, rows: list[Rows], members: list[int], cache: KVCache) -> None:
        device = cache.shape.device
        self.members = torch.tensor(members, device=device)
        positions = [each.num_past for each in rows]
        self._positions = torch.tensor(positions, device=device)
        self._last = max(positions)
        self._device = device
        self._gathered = _Gathered(cache, np.array([rows[0].table.common], dtype=np.int64))

    def blend(
        self, layer: int, spec: AttentionSpec, q: Tensor, own: Tensor, own_mass: Tensor
    ) -> Tensor:
        """Mix the prompt's part into `own` (B, K, G, D).

        `own_mass` (B, K, G) is the log of the summed exponentials of the own scores; the answer
        (members, K, G) that of the prompt's.
        """
        keys, values = self._gathered.read(layer)
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
