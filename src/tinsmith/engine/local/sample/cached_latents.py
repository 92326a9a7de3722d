"""Latent attention in one sampling step, over what the cache holds: a vector of each token.

It is read as if it were the one key and value that all heads share. New tokens of running sequences
attend to the vectors themselves (absorbed); of prompts, keys and values are made of all that is
read (expanded), which is less work where many tokens look at many.

Shapes: N rows of the step, H heads, R the size of a latent vector, P that of the rotated part, T
tokens of a chunk.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.batch import (
    Bounds,
    PackedAttention,
    has_packed_kernel,
    packed_attention,
)
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig, LatentSpec
from tinsmith.engine.local.model.latent.heads import LatentHeads
from tinsmith.engine.local.sample.cached_rows import MASKED, Rows, rows_of
from tinsmith.engine.local.sample.cached_running import RunningRows
from tinsmith.engine.local.sample.kvcache import KVCache

_MOST_NUMBERS = 1 << 28
"""Most numbers of keys and values that are made of vectors at a time: 512 MiB in half precision."""


def heads_at_once(spec: LatentSpec, num_tokens: int) -> int:
    """So many that a long prompt's keys and values have room."""
    size = 2 * max(spec.key_dim, spec.value_dim)
    return max(1, _MOST_NUMBERS // (num_tokens * size))


class CachedLatents:
    """The rows of one step, whose own latents are in the cache already."""

    def __init__(
        self,
        config: DecoderConfig,
        cache: KVCache,
        chunks: list[Rows],
        running: list[RunningRows],
    ) -> None:
        chunks = sorted(chunks)
        fresh = [chunk for chunk in chunks if not chunk.num_past]
        later = [chunk for chunk in chunks if chunk.num_past]
        self._fresh = rows_of(fresh, cache.shape.device) if fresh else None
        self._attention = PackedAttention(config, [chunk.stop - chunk.start for chunk in fresh])
        self._later = _LaterChunks(later, cache) if later else None
        self._running = running

    def attend(
        self, layer: int, spec: AttentionSpec, q: Tensor, latents: Tensor, heads: LatentHeads
    ) -> Tensor:
        """(N, H, value_dim) of q (N, H, plain_dim + P) and the rows' own latents (N, R + P)."""
        out = q.new_empty(*q.shape[:2], heads.spec.value_dim)
        if self._fresh is not None:
            rows = self._fresh
            out[rows] = self._attention.of_latents(layer, q[rows], latents[rows], heads)
        if self._later is not None:
            rows = self._later.rows
            out[rows] = self._later.attend(layer, spec, q[rows], heads)
        for part in self._running:
            sums = part.attend(layer, spec, heads.absorbed(q[part.rows]), None)
            out[part.rows] = heads.values_of(sums[..., : heads.spec.rank])
        return out


class _LaterChunks:
    """Chunks whose prompts have been read in part."""

    def __init__(self, chunks: list[Rows], cache: KVCache) -> None:
        shape = cache.shape
        self.rows = rows_of(chunks, shape.device)
        self._cache = cache
        self._sizes = [chunk.stop - chunk.start for chunk in chunks]
        self._ends = [chunk.end for chunk in chunks]
        self._queries = Bounds.of(self._sizes, shape.device)
        self._keys = Bounds.of(self._ends, shape.device)
        # (sum of ends,): where the vectors of all tokens so far are in a layer's blocks.
        size = shape.block_tokens
        places = []
        for chunk in chunks:
            position = np.arange(chunk.end)
            blocks = np.array(chunk.table.blocks, dtype=np.int64)
            places.append(blocks[position // size] * size + position % size)
        self._places = torch.from_numpy(np.concatenate(places)).to(shape.device)
        self._masks: dict[int, Tensor] = {}

    def attend(self, layer: int, spec: AttentionSpec, q: Tensor, heads: LatentHeads) -> Tensor:
        """(sum of T, H, value_dim) of q (sum of T, H, plain_dim + P)."""
        kept = self._cache.keys[layer].view(-1, heads.spec.kept_dim)[self._places]
        attend = functools.partial(self._attend, spec)
        at_once = heads_at_once(heads.spec, len(kept))
        found = [
            LatentHeads(heads.spec, weight).attend_expanded(attend, part, kept)
            for weight, part in zip(
                heads.weight.split(at_once), q.split(at_once, dim=1), strict=True
            )
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if has_packed_kernel(spec, q):
            return packed_attention(spec, q, k, v, self._queries, self._keys)
        parts = zip(q.split(self._sizes), k.split(self._ends), v.split(self._ends), strict=True)
        return torch.cat(
            [self._attend_one(spec, number, *part) for number, part in enumerate(parts)]
        )

    def _attend_one(
        self, spec: AttentionSpec, number: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        # (T, H, D) to (1, H, T, D), over keys and values (1, H, end, D).
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = self._mask(number, q.device).to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
        return out[0].transpose(0, 1)

    def _mask(self, number: int, device: torch.device) -> Tensor:
        """(T, end): zero where a token may look."""
        if number not in self._masks:
            end = self._ends[number]
            token = torch.arange(end - self._sizes[number], end, device=device)[:, None]
            is_seen = torch.arange(end, device=device)[None] <= token
            self._masks[number] = torch.where(is_seen, 0.0, MASKED)
        return self._masks[number]
