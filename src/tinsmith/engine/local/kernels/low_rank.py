"""Products with low-rank matrices of many adapters: each row of a batch with its own adapter.

Three kernels are enough for a linear layer under adapters, forward and backward. With A (ranks,
inputs) and B (outputs, rank) as they lie in an adapter's vector:

    shrink   rows · wide  →  ranks      x Aᵀ, and the gradient times B
    expand   rows · ranks →  wide       adds (x Aᵀ) Bᵀ to y, and the same with A to the gradient
    outer    sums over rows             the gradients of A and of B

Rows come in blocks of one adapter, so no product ever mixes rows of two. Adapters' vectors and
their float32 gradients are found by address and lie wherever they are, so that nothing is copied.
Which columns belong to which matrix stands in tables that the host makes once for a projection.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher
from tinsmith.engine.local.model.transfers import to_device

_WIDE_BLOCK = 128
_INPUTS_PER_SHARE = 256
_MAX_SHARES = 16
_ALIGNMENT = 16
CHUNK_ROWS = 512
"""Rows that one program sums up for a gradient; parts of a longer run are added as they end. With
1,024 an H200 takes up to a quarter longer for 4,096 rows, and as long or a fifth longer for
16,384."""


class Table(NamedTuple):
    """A few rows of int32 that programs look up by their number."""

    values: Tensor
    length: int
    is_aligned: bool
    """Whether all numbers are multiples of sixteen, so that loads may be wide."""


class Vectors(NamedTuple):
    """Flat vectors of adapters, of their weights or of float32 gradients."""

    addresses: Tensor
    """(adapters,) int64: where each begins; zero where an adapter has none."""

    is_aligned: bool
    """Whether all addresses are multiples of sixteen bytes."""


def vectors_at(vectors: Sequence[Tensor | None], device: torch.device) -> Vectors:
    """Where vectors lie; whoever asks keeps them."""
    addresses = [0 if vector is None else vector.data_ptr() for vector in vectors]
    is_aligned = all(address % _ALIGNMENT == 0 for address in addresses)
    return Vectors(to_device(torch.tensor(addresses, dtype=torch.int64), device), is_aligned)


class Rows(NamedTuple):
    """Which rows have which adapter: tables of (start, stop, adapter). Entries without rows are
    passed over."""

    blocks: Table
    block_rows: int
    chunks: Table
    is_split: bool
    """Whether the gradients of an adapter come from several chunks."""


def divide_rows(
    runs: Sequence[tuple[int, int, int]],
    device: torch.device,
    split: bool,
    chunk_rows: int = CHUNK_ROWS,
) -> Rows:
    """Tables for runs (start, stop, adapter) of rows.

    With `split` long runs are summed up in parts at the same time, which is quicker and leaves
    the order of the additions open.
    """
    block_rows = rows_of_block(sum(stop - start for start, stop, _ in runs))
    blocks = divided(runs, block_rows)
    chunks = divided(runs, chunk_rows if split else 1 << 30)
    return Rows(_table(blocks, device), block_rows, _table(chunks, device), len(chunks) > len(runs))


def rows_of_block(num_rows: int) -> int:
    """The rows of a block of `Rows`, for a batch of so many."""
    return 64 if num_rows >= 4096 else 32 if num_rows >= 2048 else 16


def divided(runs: Sequence[tuple[int, int, int]], num_rows: int) -> list[tuple[int, int, int]]:
    """Runs (start, stop, adapter) in parts of at most so many rows."""
    return [part for run in runs for part in _parts(run, num_rows)]


class Columns(NamedTuple):
    """Where the matrices of one projection lie in a vector, as the kernels read them."""

    rank: int
    num_modules: int
    inputs: int
    of_a: Table
    """The inputs in pieces: (first column, end, first rank, place of the first number)."""
    of_b: Table
    """The outputs in pieces, each of one module: the same."""
    into_a: Table
    """For x Aᵀ: (first column, end, first rank, end, place of the first number)."""
    into_b: Table
    """The same for the gradient times B, module by module."""
    ranks_a: int
    """Ranks in a piece of `into_a`, rounded up to a power of two."""
    ranks_b: int


def divide_columns(
    offset: int, rank: int, inputs: int, outputs: Sequence[int], device: torch.device
) -> Columns:
    """Tables for a projection whose matrices begin at `offset` of the vector."""
    ranks = rank * len(outputs)
    of_a = [
        (start, stop, 0, offset + start) for start, stop, _ in _parts((0, inputs, 0), _WIDE_BLOCK)
    ]
    ranks_a = _block(ranks, 128)
    into_a = [
        (0, inputs, first, end, offset + first * inputs)
        for first, end, _ in _parts((0, ranks, 0), ranks_a)
    ]
    of_b, into_b = [], []
    place, left = offset + ranks * inputs, 0
    ranks_b = _block(rank, 128)
    for module, size in enumerate(outputs):
        of_b += [
            (left + start, left + stop, module * rank, place + start * rank)
            for start, stop, _ in _parts((0, size, 0), _WIDE_BLOCK)
        ]
        into_b += [
            (left, left + size, module * rank + first, module * rank + end, place + first)
            for first, end, _ in _parts((0, rank, 0), ranks_b)
        ]
        left += size
        place += size * rank
    return Columns(
        rank=rank,
        num_modules=len(outputs),
        inputs=inputs,
        of_a=_table(of_a, device),
        of_b=_table(of_b, device),
        into_a=_table(into_a, device),
        into_b=_table(into_b, device),
        ranks_a=ranks_a,
        ranks_b=ranks_b,
    )


def num_shares(inputs: int) -> int:
    """Into how many shares the inputs are cut, each summed up by itself.

    Decoding computes shares at the same time (`decode_lora`); here they come one after another, and
    the sums are the same.
    """
    return min(_MAX_SHARES, max(1, inputs // _INPUTS_PER_SHARE))


def inputs_per_share(inputs: int) -> int:
    return -(-inputs // (num_shares(inputs) * _WIDE_BLOCK)) * _WIDE_BLOCK


def shrink_by_a(x: Tensor, weights: Vectors, rows: Rows, columns: Columns, scale: float) -> Tensor:
    """scale · x Aᵀ, (N, modules · rank); rows of no adapter are left as they are in memory."""
    ranks = columns.rank * columns.num_modules
    out = x.new_empty(len(x), ranks)
    share = inputs_per_share(columns.inputs)
    strides = (1, columns.inputs)
    _launch_shrink(x, weights, out, rows, columns.into_a, strides, columns.ranks_a, scale, share)
    return out


def shrink_by_b(
    grad: Tensor, weights: Vectors, rows: Rows, columns: Columns, scale: float
) -> Tensor:
    """scale · grad B, (N, modules · rank)."""
    out = grad.new_empty(len(grad), columns.rank * columns.num_modules)
    strides = (columns.rank, 1)
    _launch_shrink(grad, weights, out, rows, columns.into_b, strides, columns.ranks_b, scale)
    return out


def expand_by_b(
    inner: Tensor,
    weights: Vectors,
    rows: Rows,
    columns: Columns,
    y: Tensor,
    residual: Tensor | None = None,
) -> None:
    """Add inner Bᵀ, and `residual` where given, to y, in place."""
    strides = (1, columns.rank)
    _launch_expand(inner, weights, rows, columns.of_b, strides, columns.rank, y, residual)


def expand_by_a(
    inner_grad: Tensor, weights: Vectors, rows: Rows, columns: Columns, grad_x: Tensor
) -> None:
    """Add inner_grad A to grad_x, in place."""
    ranks = columns.rank * columns.num_modules
    _launch_expand(inner_grad, weights, rows, columns.of_a, (columns.inputs, 1), ranks, grad_x)


def add_gradient_of_a(
    inner_grad: Tensor, x: Tensor, grads: Vectors, rows: Rows, columns: Columns
) -> None:
    """Add inner_gradᵀ x to the gradients of A, of the adapters that have some."""
    ranks = columns.rank * columns.num_modules
    _launch_outer(inner_grad, x, grads, rows, columns.of_a, (columns.inputs, 1), ranks)


def add_gradient_of_b(
    inner: Tensor, grad: Tensor, grads: Vectors, rows: Rows, columns: Columns
) -> None:
    """Add gradᵀ inner to the gradients of B, of the adapters that have some."""
    _launch_outer(inner, grad, grads, rows, columns.of_b, (1, columns.rank), columns.rank)


def _launch_shrink(
    x: Tensor,
    weights: Vectors,
    out: Tensor,
    rows: Rows,
    table: Table,
    strides: tuple[int, int],
    block_ranks: int,
    scale: float,
    share: int = 1 << 30,
) -> None:
    is_aligned = weights.is_aligned and table.is_aligned
    _SHRINK(
        (rows.blocks.length, table.length, 1),
        (
            x,
            weights.addresses,
            out,
            rows.blocks.values,
            table.values,
            x.stride(0),
            out.stride(0),
            *strides,
            scale,
            share,
        ),
        (rows.block_rows, block_ranks, _WIDE_BLOCK, is_aligned, _precision(x)),
        num_warps=4,
    )


def _launch_expand(
    inner: Tensor,
    weights: Vectors,
    rows: Rows,
    table: Table,
    strides: tuple[int, int],
    num_ranks: int,
    y: Tensor,
    residual: Tensor | None = None,
) -> None:
    _EXPAND(
        (rows.blocks.length, table.length, 1),
        (
            inner,
            weights.addresses,
            y,
            residual if residual is not None else y,
            rows.blocks.values,
            table.values,
            inner.stride(0),
            y.stride(0),
            *strides,
            num_ranks,
        ),
        (
            rows.block_rows,
            _block(num_ranks, 128),
            _WIDE_BLOCK,
            residual is not None,
            weights.is_aligned and table.is_aligned,
            _precision(inner),
        ),
        num_warps=4,
        num_stages=2,
    )


def _launch_outer(
    narrow: Tensor,
    wide: Tensor,
    grads: Vectors,
    rows: Rows,
    table: Table,
    strides: tuple[int, int],
    num_ranks: int,
) -> None:
    block = _block(num_ranks, 64)
    is_aligned = grads.is_aligned and table.is_aligned
    _OUTER(
        (rows.chunks.length, table.length, -(-num_ranks // block)),
        (
            narrow,
            wide,
            grads.addresses,
            rows.chunks.values,
            table.values,
            narrow.stride(0),
            wide.stride(0),
            *strides,
            num_ranks,
        ),
        (64, block, _WIDE_BLOCK, rows.is_split, is_aligned, _precision(wide)),
        num_warps=4,
    )


@functools.cache
def _block(num_ranks: int, largest: int) -> int:
    return max(16, min(largest, triton.next_power_of_2(num_ranks)))


def _parts(run: tuple[int, int, int], size: int) -> list[tuple[int, int, int]]:
    start, stop, tag = run
    return [(at, min(at + size, stop), tag) for at in range(start, stop, size)]


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Table:
    is_aligned = all(number % _ALIGNMENT == 0 for row in rows for number in row)
    return Table(to_device(torch.tensor(rows, dtype=torch.int32), device), len(rows), is_aligned)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _shrink(
    x,
    addresses,
    out,
    blocks,
    table,
    x_row,
    out_row,
    wide_stride,
    rank_stride,
    scale,
    share,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per block of rows (of one adapter) and entry of the table (one module's ranks).
    block, entry = blocks + 3 * tl.program_id(0), table + 5 * tl.program_id(1)
    start, stop, adapter = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if start >= stop:
        return
    vector = tl.load(addresses + adapter).to(tl.pointer_type(x.dtype.element_ty))
    left, right = tl.load(entry), tl.load(entry + 1)
    first, end, place = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    if IS_ALIGNED:
        left, right = tl.multiple_of(left, 16), tl.multiple_of(right, 16)
        first, end = tl.multiple_of(first, 16), tl.multiple_of(end, 16)
        place, vector = tl.multiple_of(place, 16), tl.multiple_of(vector, 16)
    row = start + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    is_row, is_rank = row < stop, first + rank < end
    weights = vector + place
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    # x (ROWS, WIDE) times the adapter's matrix (WIDE, RANKS), WIDE columns at a time. A share's
    # sum joins the total where the share ends; one loop, so that loads run ahead of the products.
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    part = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for at in range(left, right, WIDE):
        wide = at + tl.arange(0, WIDE)
        is_wide = wide < right
        values = tl.load(x_rows + wide[None, :], mask=is_row[:, None] & is_wide[None, :], other=0.0)
        matrix = tl.load(
            weights + (wide - left)[:, None] * wide_stride + rank[None, :] * rank_stride,
            mask=is_wide[:, None] & is_rank[None, :],
            other=0.0,
        )
        part = tl.dot(values, matrix, part, input_precision=PRECISION)
        is_end = (at + WIDE - left) % share == 0
        total += tl.where(is_end, part, 0.0)
        part = tl.where(is_end, 0.0, part)
    total += part
    # scale · x Aᵀ, or scale · grad B: (ROWS, RANKS).
    to = out + row.to(tl.int64)[:, None] * out_row + first + rank[None, :]
    tl.store(to, total * scale, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _expand(
    inner,
    addresses,
    y,
    residual,
    blocks,
    table,
    inner_row,
    y_row,
    rank_stride,
    wide_stride,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per block of rows (of one adapter) and entry of the table (WIDE columns of y).
    block, entry = blocks + 3 * tl.program_id(0), table + 4 * tl.program_id(1)
    start, stop, adapter = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if start >= stop:
        return
    vector = tl.load(addresses + adapter).to(tl.pointer_type(inner.dtype.element_ty))
    left, right = tl.load(entry), tl.load(entry + 1)
    first, place = tl.load(entry + 2), tl.load(entry + 3)
    if IS_ALIGNED:
        vector = tl.multiple_of(vector, 16)
        left, right = tl.multiple_of(left, 16), tl.multiple_of(right, 16)
        first, place = tl.multiple_of(first, 16), tl.multiple_of(place, 16)
    row = start + tl.arange(0, ROWS)
    wide = left + tl.arange(0, WIDE)
    is_row, is_wide = row < stop, wide < right
    weights = vector + place
    at_y = row.to(tl.int64)[:, None] * y_row + wide[None, :]
    inside = is_row[:, None] & is_wide[None, :]
    # Begin with what y holds: (ROWS, WIDE) in float32.
    total = tl.load(y + at_y, mask=inside, other=0.0).to(tl.float32)
    # Add inner (ROWS, RANKS) times the adapter's matrix (RANKS, WIDE), RANKS at a time.
    for at in range(0, num_ranks, RANKS):
        rank = at + tl.arange(0, RANKS)
        is_rank = rank < num_ranks
        values = tl.load(
            inner + row.to(tl.int64)[:, None] * inner_row + first + rank[None, :],
            mask=is_row[:, None] & is_rank[None, :],
            other=0.0,
        )
        matrix = tl.load(
            weights + rank[:, None] * rank_stride + (wide - left)[None, :] * wide_stride,
            mask=is_rank[:, None] & is_wide[None, :],
            other=0.0,
        )
        total = tl.dot(values, matrix, total, input_precision=PRECISION)
    # As in decoding, a product in half precision is rounded before it joins the residual stream.
    if HAS_RESIDUAL:
        total = total.to(y.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + at_y, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at_y, total, mask=inside)


@triton.jit
def _outer(
    narrow,
    wide_values,
    addresses,
    chunks,
    table,
    narrow_row,
    wide_row,
    rank_stride,
    wide_stride,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # One program per chunk of rows (of one adapter), entry of the table (WIDE columns) and block
    # of RANKS ranks.
    chunk, entry = chunks + 3 * tl.program_id(0), table + 4 * tl.program_id(1)
    start, stop, adapter = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    if start >= stop:
        return
    address = tl.load(addresses + adapter)
    if address == 0:
        return
    grads = address.to(tl.pointer_type(tl.float32))
    left, right = tl.load(entry), tl.load(entry + 1)
    first, place = tl.load(entry + 2), tl.load(entry + 3)
    if IS_ALIGNED:
        grads = tl.multiple_of(grads, 16)
        left, right = tl.multiple_of(left, 16), tl.multiple_of(right, 16)
        first, place = tl.multiple_of(first, 16), tl.multiple_of(place, 16)
    rank = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    wide = left + tl.arange(0, WIDE)
    is_rank, is_wide = rank < num_ranks, wide < right
    # narrowᵀ (RANKS, ROWS) times wide (ROWS, WIDE), over the chunk's rows: dA, or dBᵀ.
    total = tl.zeros((RANKS, WIDE), dtype=tl.float32)
    for at in range(start, stop, ROWS):
        row = at + tl.arange(0, ROWS)
        is_row = row < stop
        left_side = tl.load(
            narrow + row.to(tl.int64)[None, :] * narrow_row + first + rank[:, None],
            mask=is_rank[:, None] & is_row[None, :],
            other=0.0,
        )
        right_side = tl.load(
            wide_values + row.to(tl.int64)[:, None] * wide_row + wide[None, :],
            mask=is_row[:, None] & is_wide[None, :],
            other=0.0,
        )
        total = tl.dot(left_side, right_side, total, input_precision=PRECISION)
    # To the adapter's part of the gradients; chunks of one run share it, and then add atomically.
    to = grads + place + rank[:, None] * rank_stride + (wide - left)[None, :] * wide_stride
    inside = is_rank[:, None] & is_wide[None, :]
    if IS_SPLIT:
        tl.atomic_add(to, total, mask=inside, sem="relaxed")
    else:
        tl.store(to, tl.load(to, mask=inside, other=0.0) + total, mask=inside)


_SHRINK, _EXPAND, _OUTER = Launcher(_shrink), Launcher(_expand), Launcher(_outer)
