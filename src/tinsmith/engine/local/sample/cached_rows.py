"""Rows of a sampling step, and what the cache holds of their sequences, copied together.

Shapes: B sequences, K key/value heads, D head size, S tokens of a block, M blocks of
each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.engine.local.sample.kvcache import BlockTable, KVCache

MASKED = -1e30
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


def rows_of(chunks: list[Rows], device: torch.device) -> Tensor:
    """The step's rows that some chunks have."""
    rows = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
    return torch.from_numpy(np.concatenate(rows)).to(device)


class Gathered:
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
        self._values = torch.empty_like(self._keys) if shape.has_values else self._keys

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B · K, M · S, D), good until the next layer is read; the same where
        values are a part of keys."""
        parts = [(self._cache.keys[layer], self._keys)]
        if self._cache.shape.has_values:
            parts.append((self._cache.values[layer], self._values))
        for source, target in parts:
            torch.index_select(source.view(-1, target.shape[1]), 0, self._places, out=target)
        return self._keys.view(self._size), self._values.view(self._size)


def scores_of(q: Tensor, keys: Tensor, spec: AttentionSpec, bias: Tensor | None) -> Tensor:
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
