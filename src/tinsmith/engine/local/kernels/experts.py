"""Triton kernels for layers of experts: products with their weights, and with adapters' factors.

Rows are sorted by expert, and within one by adapter (`model.experts.routing`). They come in tiles
of one expert, or of one expert and adapter, which a table on the device names; the host knows how
many there can be, not where they are. So nothing waits for the device, and a captured graph stays
valid whatever the router chooses. Nothing is added atomically.

An adapter's matrices of all experts lie one behind the other, A as (rank, wide) and B as (wide,
rank). Like those of `decode_lora` they are found by address, zero where an adapter has none.

`model.experts.factors` does the same in plain torch and is the reference.

Shapes: S rows, N tiles, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher
from tinsmith.engine.local.kernels.low_rank import Vectors
from tinsmith.engine.local.model.experts.routing import Routing, Tiles, TokenAdapters

_WIDE_BLOCK = 128
_MAX_RANKS = 128
_GRADIENT_ROWS = 32
_FEW_ROWS = 16
_MANY_ROWS = 64
"""Rows of a tile where an expert has as many on average."""


class Matrices(NamedTuple):
    """The factors of all experts in one module, of every adapter."""

    addresses: Tensor
    """(adapters,) int64; may be strided."""

    offset: int
    """Numbers between an address and the first expert's matrix."""

    facts: Tensor
    """(adapters, 2) float32: rank and scale."""

    size: int
    """Wide columns of a matrix."""

    is_b: bool
    max_rank: int
    is_aligned: bool
    """Whether every first number is at a multiple of 16 bytes, ranks and `size` of 8."""


class Sorted(NamedTuple):
    """Rows and their adapters: numbers, negative for none."""

    routing: Routing
    adapters: TokenAdapters

    @property
    def tiles(self) -> Tiles:
        """Of one expert and adapter each."""
        average = self.routing.num_rows // self.routing.num_experts
        num_rows = _MANY_ROWS if average >= _MANY_ROWS else _FEW_ROWS
        return self.routing.tiles(num_rows, self.adapters)


def product(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    experts: Tensor,
    first_expert: int,
    tiles: Tiles,
    sources: Tensor | None,
    biases: Tensor | None = None,
) -> None:
    """Put x W of each row into y (S, outputs), where its expert is one of `weight`.

    `weight` is (some, inputs, outputs), of the experts from `first_expert` on; `experts` (S,) has
    each row's. Row s is found in row `sources[s]` of x. `biases` (E, outputs) of all experts are
    added where given.
    """
    num_tiles, (count, inputs, outputs) = tiles.table.shape[1], weight.shape
    wide = 64 if tiles.num_rows <= 16 else _WIDE_BLOCK
    _PRODUCT(
        (num_tiles, triton.cdiv(outputs, wide), 1),
        (
            x,
            weight,
            y,
            sources if sources is not None else experts,
            biases if biases is not None else x,
            experts,
            tiles.table,
            num_tiles,
            first_expert,
            first_expert + count,
            x.stride(0),
            y.stride(0),
            weight.stride(0),
            weight.stride(1),
            weight.stride(2),
            inputs,
            outputs,
        ),
        (tiles.num_rows, wide, 64, sources is not None, biases is not None, _precision(x)),
        num_warps=8 if tiles.num_rows >= 128 else 4,
        num_stages=4 if tiles.num_rows <= 32 else 3,
    )


def shrink(wide: Tensor, matrices: Matrices, rows: Sorted, out: Tensor, *, scales: bool) -> None:
    """Put the product of each row of `wide` with its matrix into out (S, rank), times scale."""
    tiles, ranks = rows.tiles, _ranks(matrices.max_rank)
    num_tiles = tiles.table.shape[1]
    _SHRINK(
        (num_tiles, triton.cdiv(matrices.max_rank, ranks), 1),
        (
            wide,
            out,
            *_places(rows, tiles),
            *_found_at(matrices),
            wide.stride(0),
            wide.stride(1),
            out.stride(0),
        ),
        (
            tiles.num_rows,
            ranks,
            _WIDE_BLOCK,
            matrices.is_b,
            matrices.is_aligned,
            scales,
            _precision(wide),
        ),
        num_warps=4,
    )


def expand(into: Tensor, narrow: Tensor, matrices: Matrices, rows: Sorted, *, scales: bool) -> None:
    """Add to each row of `into` the product of its row of narrow (S, rank), times scale, with its
    matrix, transposed."""
    tiles, ranks = rows.tiles, _ranks(matrices.max_rank)
    num_tiles = tiles.table.shape[1]
    _EXPAND(
        (num_tiles, triton.cdiv(matrices.size, _WIDE_BLOCK), 1),
        (
            into,
            narrow,
            *_places(rows, tiles),
            *_found_at(matrices),
            into.stride(0),
            into.stride(1),
            narrow.stride(0),
        ),
        (
            tiles.num_rows,
            ranks,
            _WIDE_BLOCK,
            matrices.is_b,
            matrices.is_aligned,
            scales,
            _precision(into),
        ),
        num_warps=4,
        num_stages=2,
    )


def add_gradients(
    wide: Tensor,
    narrow: Tensor,
    grads: Vectors,
    offset: int,
    size: int,
    rank: int,
    segments: tuple[Tensor, Tensor, Tensor],
    is_b: bool,
) -> None:
    """Add narrowᵀ wide, summed over the rows of each expert and run, to the runs' gradients.

    The first expert's matrix is at `offset` of an adapter. `segments` are the first rows (E, R) of
    each expert and run, those behind the last, and the runs' adapters (R,).
    """
    firsts, stops, adapters = segments
    num_experts, num_runs = firsts.shape
    ranks = max(16, min(64, triton.next_power_of_2(rank)))
    _OUTER(
        (num_experts * num_runs, triton.cdiv(size, _WIDE_BLOCK), triton.cdiv(rank, ranks)),
        (
            narrow,
            wide,
            grads.addresses,
            firsts,
            stops,
            adapters,
            num_runs,
            narrow.stride(0),
            wide.stride(0),
            wide.stride(1),
            offset,
            size,
            rank,
        ),
        (_GRADIENT_ROWS, ranks, _WIDE_BLOCK, is_b, grads.is_aligned, _precision(wide)),
        num_warps=4,
    )


def _places(rows: Sorted, tiles: Tiles) -> tuple[Tensor | int, ...]:
    routing, table = rows.routing, tiles.table
    return rows.adapters.of_tokens, routing.tokens, routing.experts, table, table.shape[1]


def _found_at(matrices: Matrices) -> tuple[Tensor | int, ...]:
    addresses = matrices.addresses
    return addresses, addresses.stride(0), matrices.offset, matrices.facts, matrices.size


def _ranks(max_rank: int) -> int:
    return max(16, min(_MAX_RANKS, triton.next_power_of_2(max_rank)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _product(
    x,
    weight,
    y,
    sources,
    biases,
    experts,
    tiles,
    num_tiles,
    first_expert,
    end_expert,
    x_row,
    y_row,
    expert_stride,
    input_stride,
    output_stride,
    inputs,
    outputs,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per tile of rows (of one expert) and WIDE outputs.
    tile = tl.program_id(0)
    first, count = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    if count == 0:
        return
    expert = tl.load(experts + first)
    if (expert < first_expert) | (expert >= end_expert):
        return
    member = tl.arange(0, ROWS)
    is_row, row = member < count, first + member
    source = row
    if HAS_SOURCES:
        source = tl.load(sources + row, mask=is_row, other=0)
    wide = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    is_wide = wide < outputs
    deep = tl.arange(0, DEEP)
    left = x + source[:, None] * x_row
    right = weight + (expert - first_expert) * expert_stride + wide[None, :] * output_stride
    # x (ROWS, DEEP) times the expert's matrix (DEEP, WIDE), DEEP inputs at a time.
    total = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for at in range(0, inputs, DEEP):
        column = at + deep
        is_in = column < inputs
        values = tl.load(left + column[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        matrix = tl.load(
            right + column[:, None] * input_stride,
            mask=is_in[:, None] & is_wide[None, :],
            other=0.0,
        )
        total = tl.dot(values, matrix, total, input_precision=PRECISION)
    if HAS_BIASES:
        bias = tl.load(biases + expert * outputs + wide, mask=is_wide, other=0.0)
        total += bias.to(tl.float32)[None, :]
    to = y + row[:, None] * y_row + wide[None, :]
    tl.store(to, total, mask=is_row[:, None] & is_wide[None, :])


@triton.jit
def _shrink(
    wide_values,
    out,
    adapters,
    tokens,
    experts,
    tiles,
    num_tiles,
    addresses,
    address_stride,
    offset,
    facts,
    size,
    wide_row,
    wide_stride,
    out_row,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    IS_B: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per tile of rows (of one expert and adapter) and RANKS ranks.
    tile = tl.program_id(0)
    first, count = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    if count == 0:
        return
    adapter = tl.load(adapters + tl.load(tokens + first))
    if adapter < 0:
        return
    address = tl.load(addresses + adapter * address_stride)
    if address == 0:
        return
    rank = tl.load(facts + adapter * 2).to(tl.int32)
    expert = tl.load(experts + first)
    base = address.to(tl.pointer_type(wide_values.dtype.element_ty)) + offset + expert * rank * size
    if IS_ALIGNED:
        base, rank = tl.multiple_of(base, 16), tl.multiple_of(rank, 8)
    member = tl.arange(0, ROWS)
    is_row, row = member < count, first + member
    rank_row = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    is_rank = rank_row < rank
    # Wide rows (ROWS, WIDE) times the matrix (WIDE, RANKS), WIDE columns at a time.
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for at in range(0, size, WIDE):
        column = at + tl.arange(0, WIDE)
        is_in = column < size
        values = tl.load(
            wide_values + row[:, None] * wide_row + column[None, :] * wide_stride,
            mask=is_row[:, None] & is_in[None, :],
            other=0.0,
        )
        if IS_B:
            place = column[:, None] * rank + rank_row[None, :]
        else:
            place = rank_row[None, :] * size + column[:, None]
        matrix = tl.load(base + place, mask=is_in[:, None] & is_rank[None, :], other=0.0)
        total = tl.dot(values, matrix, total, input_precision=PRECISION)
    if SCALES:
        total *= tl.load(facts + adapter * 2 + 1)
    to = out + row[:, None] * out_row + rank_row[None, :]
    tl.store(to, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _expand(
    into,
    narrow,
    adapters,
    tokens,
    experts,
    tiles,
    num_tiles,
    addresses,
    address_stride,
    offset,
    facts,
    size,
    into_row,
    into_stride,
    narrow_row,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    IS_B: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per tile of rows (of one expert and adapter) and WIDE columns.
    # It begins as `_shrink` does, written again: a helper cannot return in place of its kernel.
    tile = tl.program_id(0)
    first, count = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    if count == 0:
        return
    adapter = tl.load(adapters + tl.load(tokens + first))
    if adapter < 0:
        return
    address = tl.load(addresses + adapter * address_stride)
    if address == 0:
        return
    rank = tl.load(facts + adapter * 2).to(tl.int32)
    expert = tl.load(experts + first)
    dtype = into.dtype.element_ty
    base = address.to(tl.pointer_type(dtype)) + offset + expert * rank * size
    if IS_ALIGNED:
        base, rank = tl.multiple_of(base, 16), tl.multiple_of(rank, 8)
    member = tl.arange(0, ROWS)
    is_row, row = member < count, first + member
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    is_in = column < size
    to = into + row[:, None] * into_row + column[None, :] * into_stride
    inside = is_row[:, None] & is_in[None, :]
    # Begin with what is there: (ROWS, WIDE) in float32.
    total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    # Add narrow (ROWS, RANKS) times the matrix (RANKS, WIDE), RANKS at a time.
    for at in range(0, rank, RANKS):
        rank_row = at + tl.arange(0, RANKS)
        is_rank = rank_row < rank
        low = tl.load(
            narrow + row[:, None] * narrow_row + rank_row[None, :],
            mask=is_row[:, None] & is_rank[None, :],
            other=0.0,
        )
        if SCALES:
            low = low * tl.load(facts + adapter * 2 + 1)
        if IS_B:
            place = column[None, :] * rank + rank_row[:, None]
        else:
            place = rank_row[:, None] * size + column[None, :]
        matrix = tl.load(base + place, mask=is_rank[:, None] & is_in[None, :], other=0.0)
        total = tl.dot(low.to(dtype), matrix, total, input_precision=PRECISION)
    tl.store(to, total, mask=inside)


@triton.jit
def _outer(
    narrow,
    wide_values,
    addresses,
    firsts,
    stops,
    adapters,
    num_runs,
    narrow_row,
    wide_row,
    wide_stride,
    offset,
    size,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    IS_B: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per expert and run, WIDE columns and RANKS ranks.
    segment = tl.program_id(0)
    expert, run = segment // num_runs, segment % num_runs
    start, stop = tl.load(firsts + segment), tl.load(stops + segment)
    address = tl.load(addresses + tl.load(adapters + run))
    if start >= stop or address == 0:
        return
    grads = address.to(tl.pointer_type(tl.float32))
    if IS_ALIGNED:
        grads = tl.multiple_of(grads, 16)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    rank_row = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    is_in, is_rank = column < size, rank_row < num_ranks
    # narrowᵀ (RANKS, ROWS) times wide (ROWS, WIDE), over the segment's rows.
    total = tl.zeros((RANKS, WIDE), dtype=tl.float32)
    for at in range(start, stop, ROWS):
        row = at + tl.arange(0, ROWS)
        is_row = row < stop
        left = tl.load(
            narrow + row[None, :] * narrow_row + rank_row[:, None],
            mask=is_rank[:, None] & is_row[None, :],
            other=0.0,
        )
        right = tl.load(
            wide_values + row[:, None] * wide_row + column[None, :] * wide_stride,
            mask=is_row[:, None] & is_in[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    # To the adapter's part of the gradients, where this program alone writes.
    base = grads + offset + expert.to(tl.int64) * num_ranks * size
    if IS_B:
        place = column[None, :] * num_ranks + rank_row[:, None]
    else:
        place = rank_row[:, None] * size + column[None, :]
    inside = is_rank[:, None] & is_in[None, :]
    tl.store(base + place, tl.load(base + place, mask=inside, other=0.0) + total, mask=inside)


_PRODUCT, _SHRINK = Launcher(_product), Launcher(_shrink)
_EXPAND, _OUTER = Launcher(_expand), Launcher(_outer)
