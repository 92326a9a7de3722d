"""Arithmetic in which a row's result does not depend on the rows beside it, to the last bit.

With it sampling, which reads one token of many sequences, and training, which reads all of some,
find the same numbers (`on_policy = "exact"`). A product with other rows in it, or more of
them, is otherwise added up in another order. Here

- products are made of tiles of a fixed number of rows, the last one filled up with zeros: the
  library then takes one way for all of them, in which a row does not see its neighbours. Larger
  tiles are taken where this machine's library was seen to find the same bits with them;
- a query meets the keys from the first one on, in blocks of a fixed size, of which those that it
  must not see change nothing, exactly.

This was tried for the CPU in float32, on one thread, since where the work is divided among several
depends on how much there is; and for CUDA in bfloat16. There the matrix units add up a row's
product in the same order in a tile of any size, so that products of all sizes agree as long as the
library does not divide the sum itself, which it can be told (`prepare_cuda`) and which is tried for
every shape of a model (`check_cuda`). Attention is `kernels.ordered_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.errors import EngineError

_TILE = 16
_LARGE_TILE = 128
_BLOCK = 64
_PIECE = 128
_FEWEST_ROWS = 8
_MOST_TRIED_ROWS = 4096


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of x (N, inputs) and a weight (outputs, inputs)."""
    weight_t = weight.t()
    return in_tiles(lambda tile: torch.mm(tile, weight_t), x, ("plain", *weight.shape))


def in_tiles(multiply: Callable[[Tensor], Tensor], x: Tensor, kind: Hashable) -> Tensor:
    """multiply(x) of x (N, inputs), in tiles of rows; products of one `kind` go one way."""
    if kind not in _large_tiles:
        _large_tiles[kind] = _LARGE_TILE if _is_alike(multiply, x.shape[1]) else _TILE
    rest = -len(x) % _TILE
    padded = (F.pad(x, (0, 0, 0, rest)) if rest else x).contiguous()
    large = len(padded) // _large_tiles[kind] * _large_tiles[kind]
    tiles = [*padded[:large].split(_large_tiles[kind]), *padded[large:].split(_TILE)]
    first, *others = (tile for tile in tiles if len(tile))
    part = multiply(first)
    if not others:
        return part[: len(x)]
    # Each part goes to its place while the cache still has it.
    found = part.new_empty(len(padded), part.shape[1])
    places = iter(found.split([len(first), *map(len, others)]))
    next(places).copy_(part)
    for place, tile in zip(places, others, strict=True):
        place.copy_(multiply(tile))
    return found[: len(x)]


_large_tiles: dict[Hashable, int] = {}
"""Rows of the largest tile that finds the bits of the smallest, by kind of product."""


def _is_alike(multiply: Callable[[Tensor], Tensor], num_inputs: int) -> bool:
    """Whether a row's product is the same in a large tile. Which way the library takes depends on
    shapes, not on numbers, so that one try tells."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_LARGE_TILE, num_inputs, generator=generator)
    return torch.equal(multiply(x), torch.cat([multiply(tile) for tile in x.split(_TILE)]))


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
    num_tiles = -(-num_rows // _TILE)
    if len(k) * num_tiles == 1:
        num_tiles = 2  # a batch of one product takes another way
    padding = num_tiles * _TILE - num_rows

    def in_rows(x: Tensor) -> Tensor:
        """(B, n, H, …) as tiles (B · K · t, 16, …) of queries of one key/value head."""
        rows = x.view(batch, num_queries, num_kv_heads, group, -1).transpose(1, 2)
        rows = rows.reshape(len(k), num_rows, -1)
        return F.pad(rows, (0, 0, 0, padding)).view(len(k) * num_tiles, _TILE, -1)

    tiles = in_rows(q)
    at = in_rows(positions[:, :, None].expand(-1, -1, num_heads).contiguous())
    # Keys and values in whole blocks. A column of ones adds up the weights; with a number of
    # columns that is not round, rows of a product would not be alike.
    rest = -k.shape[1] % _BLOCK
    keys = F.pad(k, (0, 0, 0, rest))
    values = F.pad(v, (0, 1), value=1.0)
    values = F.pad(values, (0, -values.shape[2] % _TILE, 0, rest))
    if num_tiles > 1:
        keys, values = (x.repeat_interleave(num_tiles, dim=0) for x in (keys, values))
    # Weights (B · K · t, 16, m), against each row's peak.
    blocks = [torch.bmm(tiles, block.transpose(1, 2)) for block in keys.split(_BLOCK, dim=1)]
    weights = torch.cat(blocks, dim=2).mul_(spec.scale)
    if spec.softcap is not None:
        weights = torch.tanh(weights / spec.softcap) * spec.softcap
    token = torch.arange(weights.shape[2], device=q.device)
    is_hidden = token > at
    if spec.window is not None:
        is_hidden |= token <= at - spec.window
    weights = weights.masked_fill_(is_hidden, -torch.inf)
    peak = weights.amax(dim=2, keepdim=True)
    sink = None
    if sinks is not None:
        sink = in_rows(sinks.to(q.dtype).expand(batch, num_queries, -1).contiguous())
        peak = torch.maximum(peak, sink)
    weights = (weights - peak).exp_()
    # Weighted sums of the values, block after block, and of the weights.
    out = torch.zeros(len(tiles), _TILE, values.shape[2], dtype=q.dtype, device=q.device)
    parts = zip(weights.split(_BLOCK, dim=2), values.split(_BLOCK, dim=1), strict=True)
    for weight, block in parts:
        out += torch.bmm(weight.contiguous(), block)
    total = out[..., dim : dim + 1]
    if sink is not None:
        total = total + (sink - peak).exp_()
    found = (out[..., :dim] / total).view(len(k), -1, dim)[:, :num_rows]
    found = found.reshape(batch, num_kv_heads, num_queries, group, dim).transpose(1, 2)
    return found.reshape(q.shape)
