"""Arithmetic in which a row's result does not depend on the rows beside it, to the last bit.

With it sampling, which reads one token of many sequences, and training, which reads all of some,
find the same numbers (`on_policy = "exact"`). A product with other rows in it, or more of
them, is otherwise added up in another order. Here

- products are made in one order (`cpu.tiles`);
- a query meets the keys from the first one on, in blocks of a fixed size, of which those that it
  must not see change nothing, exactly;
- on the CPU torch divides nothing among cores by itself (`cpu.cores.undivided`): where depends on
  how much there is. Products and blocks of attention are divided where that changes no bit.

This was tried for the CPU in float32, and for CUDA in bfloat16. There the matrix units add up a
row's product in the same order in a tile of any size, so that products of all sizes agree as long
as the library does not divide the sum itself, which it can be told (`prepare_cuda`) and which is
tried for every shape of a model (`check_cuda`). Attention is `kernels.ordered_attention`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.cpu import cores
from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.errors import EngineError

_TILE = 16
_FEW = (4, 8)
_BLOCK = 64
_PIECE = 128
_FEWEST_TILES_ALONE = 16
"""Of a head, beside no other: with fewer a part has little to do."""

_FEWEST_NUMBERS, _MOST_NUMBERS = 1 << 15, 1 << 17
"""Weights of a part of several heads: enough for a core of its own, and no more than a core keeps
at hand."""

_FEWEST_ROWS = 8
_MOST_TRIED_ROWS = 4096


def prepare_cuda() -> None:
    """Let the library choose among the ways that add up a product in one piece only.

    For the whole process: other ways of some products would be quicker.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def cuda_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias on CUDA. A few rows go another way alone, so there are never so few."""
    num_rows = len(x)
    if num_rows < _FEWEST_ROWS:
        x = F.pad(x, (0, 0, 0, _FEWEST_ROWS - num_rows))
    y = F.linear(x, weight)[:num_rows]
    return y if bias is None else y.add_(bias)


def check_cuda(weight: Tensor) -> None:
    """Refuse a shape for which a row's result changes with the number of rows beside it."""
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (_MOST_TRIED_ROWS, weight.shape[1])
    x = torch.randn(shape, generator=generator, device=weight.device, dtype=torch.float32)
    x = x.to(weight.dtype)
    whole = cuda_product(x, weight)
    tried = [1, *(size for power in range(3, 12) for size in (2**power - 1, 2**power, 3 << power))]
    for num_rows in tried:
        if num_rows < len(x) and not torch.equal(
            cuda_product(x[:num_rows], weight), whole[:num_rows]
        ):
            outputs, inputs = weight.shape
            raise EngineError(
                f'on_policy = "exact" cannot be kept on this device: a product with a weight of '
                f"{outputs} x {inputs} gives other numbers for {num_rows} rows than for {len(x)}"
            )


def row_sums(x: Tensor) -> Tensor:
    """(N, 1): the sum of each row of x (N, m), piece by piece: a long one alone would be divided
    among threads."""
    rest = -x.shape[1] % _PIECE
    pieces = (F.pad(x, (0, rest)) if rest else x).unflatten(1, (-1, _PIECE))
    return pieces.sum(dim=-1).sum(dim=-1, keepdim=True)


def attend(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """(B, n, H, D): attention of queries (B, n, H, D) of B sequences, at positions (B, n).

    Keys and values (B · K, m, D) are those of each sequence's first m positions.
    """
    (batch, num_queries, num_heads, dim), num_kv_heads = q.shape, len(k) // len(q)
    group = num_heads // num_kv_heads
    num_rows = num_queries * group
    tile = _tile_for(num_rows, dim)
    num_tiles = -(-num_rows // tile)
    if len(k) * num_tiles == 1:
        num_tiles = 2  # a batch of one product takes another way
    padding = num_tiles * tile - num_rows

    def in_rows(x: Tensor) -> Tensor:
        """(B, n, H, …) as tiles (B · K, t, r, …) of queries of one key/value head."""
        rows = x.view(batch, num_queries, num_kv_heads, group, -1).transpose(1, 2)
        rows = rows.reshape(len(k), num_rows, -1)
        return F.pad(rows, (0, 0, 0, padding)).view(len(k), num_tiles, tile, -1)

    # Keys and values in whole blocks; with a number of columns that is not round, rows of a product
    # would not be alike.
    rest, columns = -k.shape[1] % _BLOCK, -dim % _TILE
    keys = F.pad(k, (0, 0, 0, rest)) if rest else k
    values = F.pad(v, (0, columns, 0, rest)) if rest or columns else v
    tiles = in_rows(q)
    at = in_rows(positions[:, :, None].expand(-1, -1, num_heads).contiguous())
    sink = None
    if sinks is not None:
        sink = in_rows(sinks.to(q.dtype).expand(batch, num_queries, -1).contiguous())
    found = torch.empty_like(tiles)

    def attend_parts(parts: Sequence[_Part]) -> list[None]:
        for part in parts:
            num_seen = (int(part.of(at).max()) // _BLOCK + 1) * _BLOCK
            seen = [part.beside(x[:, :num_seen]) for x in (keys, values)]
            own = [None if x is None else part.of(x).flatten(0, 1) for x in (tiles, at, sink)]
            place = part.of(found)
            place.copy_(_attend_tiles(spec, *own, *seen).view(place.shape))
        return [None] * len(parts)

    cores.on_all_cores(attend_parts, _parts(len(k), num_tiles, keys.shape[1]))
    out = found.view(len(k), -1, dim)[:, :num_rows]
    out = out.reshape(batch, num_kv_heads, num_queries, group, dim).transpose(1, 2)
    return out.reshape(q.shape)


def _attend_tiles(
    spec: AttentionSpec,
    tiles: Tensor,
    at: Tensor,
    sink: Tensor | None,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Tiles (b, r, D) of queries at (b, r, 1), over keys and values (b, m, D or more); `sink` is
    (b, r, 1)."""
    # Weights (b, r, m), against each row's peak.
    blocks = [torch.bmm(tiles, block.transpose(1, 2)) for block in keys.split(_BLOCK, dim=1)]
    weights = torch.cat(blocks, dim=2).mul_(spec.scale)
    if spec.softcap is not None:
        weights = torch.tanh(weights / spec.softcap) * spec.softcap
    token = torch.arange(weights.shape[2], device=tiles.device)
    is_hidden = token > at
    if spec.window is not None:
        is_hidden |= token <= at - spec.window
    weights = weights.masked_fill_(is_hidden, -torch.inf)
    peak = weights.amax(dim=2, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    weights = weights.sub_(peak).exp_()
    # Sums of the values by weight, and of the weights, block after block.
    ones = values.new_ones(1, _BLOCK, _TILE).expand(len(tiles), -1, -1)
    out, total = (tiles.new_zeros(*tiles.shape[:2], x.shape[2]) for x in (values, ones))
    parts = zip(weights.split(_BLOCK, dim=2), values.split(_BLOCK, dim=1), strict=True)
    for weight, block in parts:
        weight = weight.contiguous()
        out += torch.bmm(weight, block)
        total += torch.bmm(weight, ones)
    total = total[..., :1]
    if sink is not None:
        total = total + (sink - peak).exp_()
    return out[..., : tiles.shape[2]] / total


def _tile_for(num_rows: int, dim: int) -> int:
    """Rows of a tile: fewer where a decoding step has fewer."""
    return next((few for few in _FEW if num_rows <= few and _is_alike(few, dim)), _TILE)


@functools.cache
def _is_alike(num_rows: int, dim: int) -> bool:
    """Whether tiles of so few rows find the bits of larger ones. Which way the library takes
    depends on shapes, not on numbers, so that one try tells."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    return all(
        torch.equal(torch.bmm(left[:, :num_rows].contiguous(), right), whole[:, :num_rows])
        for left, right in (
            (random(_TILE, dim), random(_BLOCK, dim).transpose(1, 2)),
            (random(_TILE, _BLOCK), random(_BLOCK, dim + -dim % _TILE)),
            (random(_TILE, _BLOCK), torch.ones(1, _BLOCK, _TILE).expand(2, -1, -1)),
        )
        for whole in [torch.bmm(left, right)]
    )


class _Part(NamedTuple):
    """Tiles of some heads: what is computed together."""

    heads: slice
    tiles: slice

    def of(self, x: Tensor) -> Tensor:
        """(h, t, …) of x (B · K, t, …)."""
        return x[self.heads, self.tiles]

    def beside(self, x: Tensor) -> Tensor:
        """(h · t, m, D): of x (B · K, m, D) what each tile meets; no copy for a single head."""
        count = self.tiles.stop - self.tiles.start
        return x[self.heads, None].expand(-1, count, -1, -1).flatten(0, 1)


def _parts(num_heads: int, num_tiles: int, num_keys: int) -> list[_Part]:
    """Many tiles of each head alone, or several heads; no part is a single tile."""
    if num_tiles >= _FEWEST_TILES_ALONE:
        ranges = _even_slices(num_tiles, -(-num_tiles // _FEWEST_TILES_ALONE))
        heads = _even_slices(num_heads, num_heads)
        return [_Part(head, tiles) for tiles in ranges for head in heads]
    numbers = num_heads * num_tiles * _TILE * num_keys
    wanted = max(min(cores.num_cores(), numbers // _FEWEST_NUMBERS), numbers // _MOST_NUMBERS, 1)
    most = num_heads if num_tiles > 1 else max(1, num_heads // 2)
    heads = _even_slices(num_heads, min(wanted, most))
    return [_Part(some, slice(0, num_tiles)) for some in heads]


def _even_slices(length: int, count: int) -> list[slice]:
    bounds = [length * number // count for number in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]
