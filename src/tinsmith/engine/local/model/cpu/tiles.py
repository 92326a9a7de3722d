"""Products in which a row has the same bits whatever rows are beside it, on any number of cores.

The smallest product is one of `_TILE` rows, the last ones filled up with zeros: in it the library
goes one way, whatever is in the rows. A larger one, and one that is divided among cores, is taken
where this machine's library was seen to find the same bits with it. Which way it takes depends on
shapes, not on numbers, so that one try tells.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.cpu import cores

_TILE = 16
_LARGE_TILE = 128
_LARGEST_TILE = 512

_FEWEST_DIVIDED = 1 << 20
"""Multiplications of a product that are worth more than one core."""

_Multiply = Callable[[Tensor], Tensor]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of x (N, inputs) and a weight (outputs, inputs)."""
    weight_t = weight.t()
    return in_tiles(lambda tile: torch.mm(tile, weight_t), x, ("plain", *weight.shape))


def in_tiles(multiply: _Multiply, x: Tensor, kind: Hashable) -> Tensor:
    """multiply(x) of x (N, inputs), in tiles of rows; products of one `kind` go one way."""
    rest = -len(x) % _TILE
    padded = (F.pad(x, (0, 0, 0, rest)) if rest else x).contiguous()
    found: Tensor | None = None
    done = 0
    for part in padded.split(_LARGEST_TILE):
        way = _way_of(multiply, part.shape, kind)
        with cores.divided() if way.is_divided else cores.undivided():
            for tile in part.split(way.sizes):
                y = multiply(tile)
                if len(tile) == len(padded):
                    return y[: len(x)]
                if found is None:
                    found = y.new_empty(len(padded), y.shape[1])
                # Each goes to its place while the cache still has it.
                found[done : done + len(y)].copy_(y)
                done += len(y)
    assert found is not None, "there are rows"
    return found[: len(x)]


class _Way(NamedTuple):
    sizes: list[int]
    """Rows of the tiles, one after another."""
    is_divided: bool
    """Whether a tile's product is divided among the cores."""


_ways: dict[Hashable, _Way] = {}
"""By kind of product, number of rows and number of cores."""


def _way_of(multiply: _Multiply, shape: tuple[int, ...], kind: Hashable) -> _Way:
    num_rows, num_inputs = shape
    key = (kind, num_rows, cores.num_cores())
    if key not in _ways:
        _ways[key] = _quickest(multiply, num_rows, num_inputs)
    return _ways[key]


def _quickest(multiply: _Multiply, num_rows: int, num_inputs: int) -> _Way:
    """With the fewest tiles, of those that find the bits of small tiles on one core."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    small = [_TILE] * (num_rows // _TILE)
    with cores.undivided():
        expected = torch.cat([multiply(tile) for tile in x.split(small)])
    num_large = num_rows // _LARGE_TILE
    large = [_LARGE_TILE] * num_large + small[num_large * _LARGE_TILE // _TILE :]
    is_divided = expected.numel() * num_inputs >= _FEWEST_DIVIDED
    for sizes in ([num_rows], large, small):
        with cores.divided() if is_divided else cores.undivided():
            found = torch.cat([multiply(tile) for tile in x.split(sizes)])
        if torch.equal(found, expected):
            return _Way(sizes, is_divided)
    return _Way(small, is_divided=False)
