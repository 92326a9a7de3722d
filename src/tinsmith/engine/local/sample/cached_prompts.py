"""What chunks of prompts see: themselves, and what the cache holds of their prompts.

Shapes: N rows of the step, H query heads, K key/value heads, G = H / K, D head size, T tokens of a
chunk.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.attention import sinks as sink_attention
from tinsmith.engine.local.model.batch import (
    Bounds,
    PackedAttention,
    has_packed_kernel,
    is_by_hand,
    of_distances,
    packed_attention,
    split_query,
)
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig
from tinsmith.engine.local.sample.cached_rows import MASKED, Gathered, Rows, rows_of, scores_of
from tinsmith.engine.local.sample.kvcache import KVCache


class PackedPrompts:
    """All chunks of a step without running rows, on CUDA: few launches, whatever their number.

    Chunks at the start of their prompt attend in one call of a kernel for packed sequences, and
    those further on in another.
    """

    def __init__(self, config: DecoderConfig, cache: KVCache, chunks: list[Rows]) -> None:
        fresh = [chunk for chunk in chunks if not chunk.num_past]
        later = [chunk for chunk in chunks if chunk.num_past]
        self._later = _LaterRows(later, cache) if later else None
        self._attention = PackedAttention(config, [chunk.stop - chunk.start for chunk in fresh])
        self._fresh = rows_of(fresh, cache.shape.device) if fresh else None

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
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
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
        self._parts = [PromptRows(chunk, cache) for chunk in chunks]
        self._rows = rows_of(chunks, shape.device)
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
        if not has_packed_kernel(spec, q):
            for part in self._parts:
                rows = part.rows
                out[rows] = part.attend(layer, spec, q[rows], k[rows], v[rows], sinks)
            return
        # Pack what the tables hold: (sum of T, K, D).
        size = (-1, *k.shape[1:])
        keys = self._cache.keys[layer].view(-1, k.shape[-1])[self._places].view(size)
        values = self._cache.values[layer].view(-1, k.shape[-1])[self._places].view(size)
        out[self._rows] = packed_attention(
            spec, q[self._rows], keys, values, self._queries, self._keys, sinks
        )


class PromptRows:
    """One chunk of one prompt."""

    def __init__(self, chunk: Rows, cache: KVCache) -> None:
        self.rows = slice(chunk.start, chunk.stop)
        self._past = chunk.num_past
        self._stop = chunk.end
        self._device = cache.shape.device
        self._bias: dict[tuple[int, int | None], Tensor] = {}
        self._gathered: Gathered | None = None
        if chunk.num_past:
            blocks = chunk.table.blocks[: cache.shape.blocks_for(chunk.end)]
            self._gathered = Gathered(cache, np.array([blocks], dtype=np.int64))

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
        if sinks is not None:
            batch = (q.transpose(0, 1)[None], keys[None], values[None])
            return sink_attention.attend(spec, *batch, sinks)[0].transpose(0, 1)
        if is_by_hand(spec):
            return self._attend_by_hand(spec, q, keys, values, first)
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
        self, spec: AttentionSpec, q: Tensor, keys: Tensor, values: Tensor, first: int
    ) -> Tensor:
        q, by_distance = split_query(spec, q)
        num_tokens, num_heads, head_dim = q.shape
        kv_heads = len(keys)
        # (T, H, D) to (K, G, T, D) to (K, G · T, D).
        grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        grouped = grouped.reshape(kv_heads, -1, head_dim)
        # (H, T, keys).
        scores = scores_of(grouped, keys, spec, None).view(num_heads, num_tokens, keys.shape[1])
        if by_distance is not None:
            scores += of_distances(by_distance.transpose(0, 1), self._distances(first))
        scores += self._mask(first, spec.window)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        out = torch.bmm(weights.view(kv_heads, -1, keys.shape[1]), values)
        # (K, G · T, D) back to (T, H, D).
        out = out.view(kv_heads, -1, num_tokens, head_dim).permute(2, 0, 1, 3)
        return out.reshape(num_tokens, num_heads, head_dim)

    def _mask(self, first: int, window: int | None) -> Tensor:
        """(T, keys from `first`): zero where a token may look."""
        if (first, window) not in self._bias:
            distances = self._distances(first)
            is_seen = distances >= 0
            if window is not None:
                is_seen &= distances < window
            self._bias[first, window] = torch.where(is_seen, 0.0, MASKED)
        return self._bias[first, window]

    def _distances(self, first: int) -> Tensor:
        """(T, keys from `first`): from each token back to each key."""
        token = torch.arange(self._past, self._stop, device=self._device)[:, None]
        return token - torch.arange(first, self._stop, device=self._device)
