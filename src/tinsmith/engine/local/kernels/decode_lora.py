"""Triton kernels that add many adapters' parts to the products of a decoding step.

Rows of one adapter lie together and are cut into tiles of sixteen; a tile belongs to one adapter,
or to none, so no row ever meets another adapter's numbers. Like the cache (`decode_attention`),
adapters are found by address: a table on the device names, for each adapter and projection, where A
and the modules' B lie. Tiles and tables change between steps, a captured graph stays valid.

`adapted_linear` does the same in plain torch and is the reference. Products that are read once, by
a kernel of ours, need only the first kernel here: `decode_joins`.

Shapes: B rows, T tiles, R the largest rank rounded up, P projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Staged
from tinsmith.engine.local.kernels.low_rank import inputs_per_share, num_shares
from tinsmith.engine.local.model.families import Projection

TILE_ROWS = 16
NO_ADAPTER = -1
"""In the place of an adapter's number."""

MAX_MODULES = 3
"""Modules that share one product: queries, keys and values."""

NUM_ADDRESSES = 1 + MAX_MODULES
"""A, and the B of each module."""

NUM_TILE_FIELDS = 3
_FIRST = tl.constexpr(0)
_COUNT = tl.constexpr(1)
_ADAPTER = tl.constexpr(2)

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""As kernels call them."""

_BLOCK_INPUTS = 128
_BLOCK_OUTPUTS = 128


class TiledAdapters(NamedTuple):
    """The adapters of a step. To every tile of rows, scale · (x Aᵀ) Bᵀ is added, each with its
    adapter's A and B: first `shrink`, which needs x alone, then `expand`."""

    tiles: Tensor
    """(NUM_TILE_FIELDS, T) int64: first row, number of rows (zero for none), adapter (-1: none).
    Every row that is not padding is in one tile."""

    row_adapters: Tensor
    """(B,) int64: the number of each row's adapter, -1 for none."""

    addresses: Tensor
    """(adapters, P, NUM_ADDRESSES) int64, zero where an adapter leaves a projection as it is."""

    facts: Tensor
    """(adapters, 2) float32: rank and scale."""

    dtype: torch.dtype
    """Of A and B."""

    max_rank: int
    is_aligned: bool
    """Whether every address is a multiple of 16 bytes and every rank one of 8."""

    def new_inner(self, x: Tensor, projection: Projection) -> Tensor:
        """Room for what `shrink` finds: (S, B, modules, R), a sum over S shares of the inputs."""
        shape = (num_shares(projection.inputs), len(x), len(projection.modules), self.max_rank)
        return torch.empty(shape, device=x.device, dtype=torch.float32)

    def shrink(self, inner: Tensor, x: Tensor, index: int, projection: Projection) -> None:
        """Put x Aᵀ into `inner`, for projection `index`."""
        inputs, (splits, num_rows, num_modules, max_rank) = projection.inputs, inner.shape
        _shrink_kernel[(self.tiles.shape[1], num_modules, splits)](
            x,
            inner,
            self.tiles,
            self.addresses,
            self.facts,
            index,
            self.addresses.shape[1],
            self.tiles.stride(0),
            num_rows,
            INPUTS=inputs,
            MODULES=num_modules,
            RANK=max_rank,
            PER_SPLIT=inputs_per_share(inputs),
            BLOCK=_BLOCK_INPUTS,
            IS_ALIGNED=self.is_aligned and inputs % 8 == 0,
            num_warps=4,
        )

    def expand(self, y: Tensor, inner: Tensor, index: int, projection: Projection) -> None:
        """Add scale · inner Bᵀ to y (B, outputs), of the adapters' dtype or float32."""
        splits, num_rows, num_modules, max_rank = inner.shape
        outputs = (*projection.outputs, 0, 0)[:MAX_MODULES]
        num_blocks = sum(triton.cdiv(size, _BLOCK_OUTPUTS) for size in outputs)
        _expand_kernel[(self.tiles.shape[1], num_blocks)](
            y,
            inner,
            self.tiles,
            self.addresses,
            self.facts,
            index,
            self.addresses.shape[1],
            self.tiles.stride(0),
            num_rows,
            OUTPUTS_0=outputs[0],
            OUTPUTS_1=outputs[1],
            OUTPUTS_2=outputs[2],
            MODULES=num_modules,
            RANK=max_rank,
            SPLITS=splits,
            BLOCK=_BLOCK_OUTPUTS,
            DTYPE=DTYPES[self.dtype],
            IS_ALIGNED=self.is_aligned,
            num_warps=4,
        )


class Part(NamedTuple):
    """What adapters add to a product, as far as `shrink` has it."""

    adapters: TiledAdapters
    inner: Tensor
    place: int
    """The projection's number among those of the model."""

    projection: Projection

    def add_to(self, y: Tensor) -> Tensor:
        """The whole product, in the place of y (B, outputs)."""
        self.adapters.expand(y, self.inner, self.place, self.projection)
        return y


@Staged
@triton.jit(do_not_specialize=["index"])
def _shrink_kernel(
    x,
    inner,
    tiles,
    addresses,
    facts,
    index,
    num_projections,
    tile_stride,
    num_rows,
    INPUTS: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """x Aᵀ of one tile, one module and one share of the inputs."""
    # A tile is up to 16 rows of one adapter; empty tiles and untouched projections end here.
    tile = tiles + tl.program_id(0)
    module = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(tile + _COUNT * tile_stride)
    if count == 0:
        return
    adapter = tl.load(tile + _ADAPTER * tile_stride)
    if adapter < 0:
        return
    address = tl.load(addresses + (adapter * num_projections + index) * 4)
    if address == 0:
        return
    # A of this module: (rank, inputs) at an address of its own.
    rank = tl.load(facts + adapter * 2).to(tl.int32)
    dtype = x.dtype.element_ty
    base = address.to(tl.pointer_type(dtype))
    if IS_ALIGNED:
        base = tl.multiple_of(base, 16)
    member = tl.arange(0, 16)
    row = tl.load(tile + _FIRST * tile_stride) + member
    rank_row = tl.arange(0, RANK)
    column = tl.arange(0, BLOCK)
    a = base + (module * rank + rank_row)[:, None] * INPUTS
    source = x + row[:, None] * INPUTS
    # x (16, inputs) times Aᵀ, over this split's share of the inputs: (16, RANK).
    sums = tl.zeros([16, RANK], tl.float32)
    for first in range(0, PER_SPLIT, BLOCK):
        at = split * PER_SPLIT + first + column
        is_in = (at < INPUTS)[None, :]
        left = tl.load(source + at[None, :], mask=is_in & (member < count)[:, None], other=0.0)
        right = tl.load(a + at[None, :], mask=is_in & (rank_row < rank)[:, None], other=0.0)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    # Each split stores its part; whoever multiplies them by B adds them up.
    target = inner + ((split * num_rows + row) * MODULES + module)[:, None] * RANK
    tl.store(target + rank_row[None, :], sums, mask=(member < count)[:, None])


@triton.jit
def add_expanded(
    sums,
    inner,
    row,
    is_row,
    column,
    num_columns,
    addresses,
    facts,
    index,
    num_projections,
    num_rows,
    adapter,
    module,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """sums (16, COLUMNS) plus scale · (x Aᵀ) Bᵀ for some columns of a module, where the tile's
    adapter changes it; in float32, as in training."""
    # B of this module: (outputs, rank) at an address of its own.
    address = tl.load(addresses + (adapter * num_projections + index) * 4 + 1 + module)
    if address != 0:
        rank = tl.load(facts + adapter * 2).to(tl.int32)
        scale = tl.load(facts + adapter * 2 + 1)
        base = address.to(tl.pointer_type(DTYPE))
        if IS_ALIGNED:
            base = tl.multiple_of(base, 16)
            rank = tl.multiple_of(rank, 8)
        rank_row = tl.arange(0, RANK)
        # Add up the splits of x Aᵀ: (16, RANK).
        low = tl.zeros([16, RANK], tl.float32)
        for split in range(SPLITS):
            source = inner + ((split * num_rows + row) * MODULES + module)[:, None] * RANK
            low += tl.load(source + rank_row[None, :], mask=is_row, other=0.0)
        b = base + column[:, None] * rank + rank_row[None, :]
        is_b = (column < num_columns)[:, None] & (rank_row < rank)[None, :]
        weight = tl.load(b, mask=is_b, other=0.0)
        sums = tl.dot((low * scale).to(DTYPE), tl.trans(weight), sums, input_precision="ieee")
    return sums


@Staged
@triton.jit(do_not_specialize=["index"])
def _expand_kernel(
    y,
    inner,
    tiles,
    addresses,
    facts,
    index,
    num_projections,
    tile_stride,
    num_rows,
    OUTPUTS_0: tl.constexpr,
    OUTPUTS_1: tl.constexpr,
    OUTPUTS_2: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Add scale · inner Bᵀ to one block of outputs of one module, for one tile."""
    # A tile is up to 16 rows of one adapter.
    tile = tiles + tl.program_id(0)
    block = tl.program_id(1)
    count = tl.load(tile + _COUNT * tile_stride)
    if count == 0:
        return
    # Which module's outputs this block is of, and where they begin in y.
    module = 0
    left = 0
    size = OUTPUTS_0
    if MODULES > 1:
        blocks_before = (OUTPUTS_0 + BLOCK - 1) // BLOCK
        if block >= blocks_before:
            block -= blocks_before
            module += 1
            left += OUTPUTS_0
            size = OUTPUTS_1
            if MODULES > 2:
                blocks_before = (OUTPUTS_1 + BLOCK - 1) // BLOCK
                if block >= blocks_before:
                    block -= blocks_before
                    module += 1
                    left += OUTPUTS_1
                    size = OUTPUTS_2
    adapter = tl.load(tile + _ADAPTER * tile_stride)
    if adapter < 0:
        return
    if tl.load(addresses + (adapter * num_projections + index) * 4 + 1 + module) == 0:
        return
    member = tl.arange(0, 16)
    row = tl.load(tile + _FIRST * tile_stride) + member
    is_row = (member < count)[:, None]
    column = block * BLOCK + tl.arange(0, BLOCK)
    width = OUTPUTS_0 + OUTPUTS_1 + OUTPUTS_2
    target = y + row[:, None] * width + (left + column)[None, :]
    is_out = is_row & (column < size)[None, :]
    sums = tl.load(target, mask=is_out, other=0.0).to(tl.float32)
    sums = add_expanded(
        sums,
        inner,
        row,
        is_row,
        column,
        size,
        addresses,
        facts,
        index,
        num_projections,
        num_rows,
        adapter,
        module,
        MODULES,
        RANK,
        SPLITS,
        DTYPE,
        IS_ALIGNED,
    )
    tl.store(target, sums, mask=is_out)
