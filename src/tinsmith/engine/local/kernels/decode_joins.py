"""Triton kernels of a decoding step that read a product and add the adapters' part as they do.

The part is scale · (x Aᵀ) Bᵀ, of which `decode_lora` has found x Aᵀ. It joins the product in
float32 and the sum is rounded once, where the kernel of its own in `decode_lora` rounds it; the
order of the additions is another.

Shapes: B rows, T tiles, R the largest rank rounded up, d hidden size, I inner columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels import pointwise
from tinsmith.engine.local.kernels.decode_lora import DTYPES, Part, add_expanded
from tinsmith.engine.local.kernels.launching import Staged
from tinsmith.engine.local.kernels.pointwise import activate
from tinsmith.engine.local.model.families import Projection

_SWIGLU_BLOCK = 128
_MAX_B_OF_ROW = 1 << 17
_MAX_B_OF_ROWS = 1 << 23
"""Numbers of B that the norm reads for one row, and for all: each row has a program of its own,
which reads all of its adapter's B. Beyond these a kernel more is quicker; see decision 8."""

_MAX_NARROW = 1 << 12
"""Numbers of x Aᵀ that are left for a row by the programs before: all are read once more, to be
summed."""

_LARGEST_B = 1 << 16
"""Numbers of B that a program holds at a time: 128 in each thread of sixteen warps."""


def add_rms_norm(x: Tensor, y: Tensor, part: Part, weight: Tensor, eps: float) -> Tensor:
    """Add y and the part to x (B, d) in place, and return the RMS norm of the sum, in the adapters'
    dtype."""
    adapters, inner = part.adapters, part.inner
    num_rows, size = x.shape
    row_numbers = size * adapters.max_rank
    if row_numbers > _MAX_B_OF_ROW or num_rows * row_numbers > _MAX_B_OF_ROWS:
        return pointwise.add_rms_norm(x, part.add_to(y), weight, eps, adapters.dtype)
    out = torch.empty_like(x, dtype=adapters.dtype)
    block = triton.next_power_of_2(size)
    shares, _, _, max_rank = inner.shape
    _add_rms_norm_kernel[(num_rows,)](
        x,
        y,
        inner,
        weight,
        out,
        adapters.row_adapters,
        adapters.addresses,
        adapters.facts,
        part.place,
        adapters.addresses.shape[1],
        num_rows,
        eps,
        SIZE=size,
        BLOCK=block,
        RANK=max_rank,
        RANKS=min(16, max(1, _LARGEST_B // block)),
        SHARES=shares,
        SHARES_PAD=triton.next_power_of_2(shares),
        DTYPE=DTYPES[adapters.dtype],
        IS_ALIGNED=adapters.is_aligned,
        num_warps=16 if block > 2048 else 8,
    )
    return out


def swiglu(
    gate_up: Tensor, part: Part, is_silu: bool, place: int, down: Projection
) -> tuple[Tensor, Part | None]:
    """activation(gate) · up (B, I), of gate_up (B, 2I) and its part.

    And the part of what is multiplied next, the projection `down`: while the rows are at hand,
    so is their x Aᵀ, a share of the inputs from each program. None where that would be too much.
    """
    adapters, inner = part.adapters, part.inner
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    splits, _, _, max_rank = inner.shape
    num_blocks = triton.cdiv(size, _SWIGLU_BLOCK)
    begins_next = num_blocks * max_rank <= _MAX_NARROW
    shape = (num_blocks if begins_next else 0, num_rows, 1, max_rank)
    narrow = torch.empty(shape, device=inner.device, dtype=torch.float32)
    _swiglu_kernel[(adapters.tiles.shape[1], num_blocks)](
        gate_up,
        out,
        inner,
        narrow,
        adapters.tiles,
        adapters.addresses,
        adapters.facts,
        part.place,
        place,
        adapters.addresses.shape[1],
        adapters.tiles.stride(0),
        num_rows,
        SIZE=size,
        RANK=max_rank,
        SPLITS=splits,
        BLOCK=_SWIGLU_BLOCK,
        IS_SILU=is_silu,
        BEGINS_NEXT=begins_next,
        DTYPE=DTYPES[adapters.dtype],
        IS_ALIGNED=adapters.is_aligned,
        num_warps=4,
    )
    return out, Part(adapters, narrow, place, down) if begins_next else None


@Staged
@triton.jit(do_not_specialize=["index"])
def _add_rms_norm_kernel(
    x,
    y,
    inner,
    weight,
    out,
    row_adapters,
    addresses,
    facts,
    index,
    num_projections,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    SHARES_PAD: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    # One program per row of x (B, d).
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_in = column < SIZE
    values = tl.load(x + row * SIZE + column, mask=is_in, other=0.0).to(tl.float32)
    product = tl.load(y + row * SIZE + column, mask=is_in, other=0.0).to(tl.float32)
    adapter = tl.load(row_adapters + row)
    if adapter >= 0:
        address = tl.load(addresses + (adapter * num_projections + index) * 4 + 1)
        if address != 0:
            # B: (d, rank) at an address of its own.
            rank = tl.load(facts + adapter * 2).to(tl.int32)
            scale = tl.load(facts + adapter * 2 + 1)
            base = address.to(tl.pointer_type(DTYPE))
            if IS_ALIGNED:
                base = tl.multiple_of(base, 16)
                rank = tl.multiple_of(rank, 8)
            share = tl.arange(0, SHARES_PAD)
            at = (share * num_rows + row)[:, None] * RANK
            for first in range(0, rank, RANKS):
                rank_row = first + tl.arange(0, RANKS)
                is_rank = rank_row < rank
                # Some ranks of scale · x Aᵀ, summed over the shares of the inputs: (RANKS,).
                is_low = (share < SHARES)[:, None] & is_rank[None, :]
                shares = tl.load(inner + at + rank_row[None, :], mask=is_low, other=0.0)
                low = (tl.sum(shares, axis=0) * scale).to(DTYPE).to(tl.float32)
                # Times Bᵀ: (BLOCK,).
                b = base + column[:, None] * rank + rank_row[None, :]
                matrix = tl.load(b, mask=is_in[:, None] & is_rank[None, :], other=0.0)
                product += tl.sum(matrix.to(tl.float32) * low[None, :], axis=1)
    # The product and the sum are rounded as they are in memory.
    product = product.to(y.dtype.element_ty).to(tl.float32)
    total = (values + product).to(x.dtype.element_ty)
    tl.store(x + row * SIZE + column, total, mask=is_in)
    total = total.to(tl.float32)
    # RMS norm: x / sqrt(mean(x²) + eps) · weight.
    norm = tl.load(weight + column, mask=is_in, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    tl.store(out + row * SIZE + column, total * inverse * norm, mask=is_in)


@Staged
@triton.jit(do_not_specialize=["index", "down_index"])
def _swiglu_kernel(
    gate_up,
    out,
    inner,
    narrow,
    tiles,
    addresses,
    facts,
    index,
    down_index,
    num_projections,
    tile_stride,
    num_rows,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
    BEGINS_NEXT: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    # One program per tile, of up to 16 rows of one adapter or of none, and BLOCK columns of I.
    tile = tiles + tl.program_id(0)
    block = tl.program_id(1)
    count = tl.load(tile + tile_stride)
    if count == 0:
        return
    adapter = tl.load(tile + 2 * tile_stride)
    member = tl.arange(0, 16)
    row = tl.load(tile) + member
    is_row = (member < count)[:, None]
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_in = is_row & (column < SIZE)[None, :]
    # Gate and up: (16, BLOCK) each, with the adapter's part.
    source = gate_up + row[:, None] * (2 * SIZE) + column[None, :]
    gate = tl.load(source, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=is_in, other=0.0).to(tl.float32)
    if adapter >= 0:
        gate = add_expanded(
            gate,
            inner,
            row,
            is_row,
            column,
            SIZE,
            addresses,
            facts,
            index,
            num_projections,
            num_rows,
            adapter,
            0,
            2,
            RANK,
            SPLITS,
            DTYPE,
            IS_ALIGNED,
        )
        up = add_expanded(
            up,
            inner,
            row,
            is_row,
            column,
            SIZE,
            addresses,
            facts,
            index,
            num_projections,
            num_rows,
            adapter,
            1,
            2,
            RANK,
            SPLITS,
            DTYPE,
            IS_ALIGNED,
        )
    # activation(gate) · up, of rounded numbers as they would be in memory.
    active, _ = activate(gate.to(DTYPE).to(tl.float32), IS_SILU)
    z = (active * up.to(DTYPE).to(tl.float32)).to(DTYPE)
    tl.store(out + row[:, None] * SIZE + column[None, :], z, mask=is_in)
    # z Aᵀ of the next projection, over these columns: (16, RANK).
    if BEGINS_NEXT:
        address = adapter * 0
        if adapter >= 0:
            address = tl.load(addresses + (adapter * num_projections + down_index) * 4)
        if address != 0:
            rank = tl.load(facts + adapter * 2).to(tl.int32)
            base = address.to(tl.pointer_type(DTYPE))
            if IS_ALIGNED and SIZE % 8 == 0:
                base = tl.multiple_of(base, 16)
            rank_row = tl.arange(0, RANK)
            a = base + rank_row[:, None] * SIZE + column[None, :]
            is_a = (rank_row < rank)[:, None] & (column < SIZE)[None, :]
            matrix = tl.load(a, mask=is_a, other=0.0)
            low = tl.dot(z, tl.trans(matrix), input_precision="ieee")
            to = narrow + (block * num_rows + row)[:, None] * RANK + rank_row[None, :]
            tl.store(to, low, mask=is_row)
