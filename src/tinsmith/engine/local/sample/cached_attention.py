"""What the tokens of one sampling step see: their own sequence, by way of the cache.

A step mixes two kinds of rows: chunks of prompts (`cached_prompts`), and one new token for each
running sequence (`cached_running`). The new keys and values are written to the cache first, then
every row attends to what its sequence holds. Blocks lie anywhere, so what is read is first copied
together.

Shapes: N rows of the step, H query heads, K key/value heads, D head size, S tokens of a block.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.families import AttentionSpec, DecoderConfig
from tinsmith.engine.local.model.latent.heads import LatentHeads
from tinsmith.engine.local.sample.cached_latents import CachedLatents
from tinsmith.engine.local.sample.cached_prompts import PackedPrompts, PromptRows
from tinsmith.engine.local.sample.cached_rows import Gathered, Rows, rows_of
from tinsmith.engine.local.sample.cached_running import RunningRows, of_like_length
from tinsmith.engine.local.sample.cached_states import CachedStates
from tinsmith.engine.local.sample.kvcache import KVCache

if TYPE_CHECKING:
    from tinsmith.engine.local.kernels.ordered_attention import Tiles


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
        self._packed: PackedPrompts | None = None
        self._ordered: _OrderedRows | None = None
        self._alike: list[_InvariantRows] = []
        has_kernels = kernels.are_usable(cache.keys)
        if is_invariant and has_kernels:
            self._ordered = _OrderedRows(self._sequences, cache)
        elif is_invariant:
            self._alike = _InvariantRows.of(self._sequences, cache)
        elif prompts and not running and has_kernels and config.latent is None:
            self._packed = PackedPrompts(config, cache, sorted(prompts))
        if is_invariant:
            prompts, running = [], []
        if any(spec.extent is not None for spec in config.layers):
            # A sequence's new token is the last chunk of a prompt: scores are more than products.
            prompts, running = [*prompts, *running], []
        self._prompts = [PromptRows(rows, cache) for rows in prompts if config.latent is None]
        self._running = [RunningRows(part, cache) for part in of_like_length(running)]
        self._latents: CachedLatents | None = None
        if config.latent is not None:
            self._latents = CachedLatents(config, cache, prompts, self._running)
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
        out = q.new_empty(*q.shape[:-1], head_dim)
        for alike in self._alike:
            out[alike.rows] = alike.attend(layer, spec, q[alike.rows], sinks)
        for prompt in self._prompts:
            rows = prompt.rows
            out[rows] = prompt.attend(layer, spec, q[rows], k[rows], v[rows], sinks)
        for part in self._running:
            out[part.rows] = part.attend(layer, spec, q[part.rows], sinks)
        return out

    def of_latents(self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads) -> Tensor:
        assert self._latents is not None, "the model attends to latent vectors"
        kept = self._cache.keys[layer].view(-1, latents.shape[-1])
        kept.index_copy_(0, self._places, latents)
        return self._latents.attend(layer, self._layers[layer], q, latents, heads)


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


class _InvariantRows:
    """Tokens, as many of each, of sequences of like length; they find the bits of training."""

    def __init__(self, parts: list[Rows], cache: KVCache) -> None:
        device = cache.shape.device
        self.rows = rows_of(parts, device)
        self._size = (len(parts), -1)
        num_blocks = [cache.shape.blocks_for(part.end) for part in parts]
        blocks = np.zeros((len(parts), max(num_blocks)), dtype=np.int64)
        for row, (part, count) in enumerate(zip(parts, num_blocks, strict=True)):
            blocks[row, :count] = part.table.blocks[:count]
        self._gathered = Gathered(cache, blocks)
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
        self._tiles: Tiles | None = None

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
