"""The experts that the tokens of a sampling step went to, noted beside their keys and values.

So they are there for whoever reads a token's keys: samples of one prompt, a later prompt that
begins alike, a sequence that gave way and came back. Nothing here waits for the device.

Shapes: L layers with experts, N blocks and one more for rows that are padding, S tokens of a block,
k experts of each token, B rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tinsmith.engine.local.sample.cached_rows import Rows


class CachedChoices:
    """The `Steering` of a step, which changes nothing."""

    def __init__(self, cached: Tensor, layers: Sequence[int], places: Tensor) -> None:
        """`cached` (L, N + 1, S, k) are those of the cache; `places` (B,) say where each row's
        token is among its N · S."""
        self._of_layer = {
            layer: part.flatten(0, 1) for layer, part in zip(layers, cached, strict=True)
        }
        self._places = places

    @classmethod
    def of(cls, sequences: Sequence[Rows]) -> CachedChoices | None:
        """For the rows of a mixed step; None where nothing is to be noted."""
        cache = sequences[0].table.cache
        routed = cache.shape.routed
        if cache.choices is None or routed is None:
            return None
        places = torch.from_numpy(places_of(sequences, cache.shape.block_tokens))
        return cls(cache.choices, routed.layers, places.to(cache.shape.device))

    def __call__(self, layer: int, choices: Tensor) -> Tensor:
        own = self._of_layer[layer]
        own.index_copy_(0, self._places, choices.to(own.dtype))
        return choices


def places_of(sequences: Sequence[Rows], block_tokens: int) -> np.ndarray:
    """Where the tokens of a mixed step are, in the order of its rows."""
    parts = []
    for rows in sorted(sequences):
        positions = np.arange(rows.num_past, rows.end)
        blocks = np.array(rows.table.blocks)[positions // block_tokens]
        parts.append(blocks * block_tokens + positions % block_tokens)
    return np.concatenate(parts)


def places_of_rows(lengths: Tensor, firsts: Tensor, blocks: Tensor, cached: Tensor) -> Tensor:
    """The same for a decoding step on a GPU, from its table: how many tokens each row has with the
    new one, zero for padding, and where its blocks begin among `blocks`."""
    _, num_blocks, block_tokens, _ = cached.shape
    positions = (lengths - 1).clamp(min=0)
    found = blocks.index_select(0, firsts + positions // block_tokens).long()
    spare = num_blocks - 1
    return torch.where(lengths > 0, found, spare) * block_tokens + positions % block_tokens
