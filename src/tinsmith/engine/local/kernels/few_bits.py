"""Products of a few rows with a weight in few bits, which is read as it lies.

A decoding step multiplies as many rows as there are sequences, and takes as long as reading the
weights does. Here codes are read and become numbers in registers, so that memory sees 4.5 or 8 bits
of each number and no copy in full. A number is rounded to the dtype of x, as in the weight's
`dense()`, and sums are in float32: the product is that with `dense()`, but for the order of the
additions.

The weight is the left side of each product, numbers (outputs, inputs) times xᵀ (inputs, rows):
tensor cores take that side from registers. Tiles of outputs that fill the device evenly are whole
sums. What is left over is cut into shares of the inputs, which a second kernel adds up in their
order, so that a product is the same each time.

Of many rows the full weight is multiplied, which `dense` makes in one pass.

    int8, fp8   a byte for each number, and a scale for each output
    nf4         a byte for numbers k and k + 32 of a block of 64, and a scale for each block
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher

MAX_ROWS = 128
"""Each tile of 128 rows makes the weight's numbers once more. With two of them an H200 takes as
long as with the weight made whole: 6144x2560 in int8 31 and 28 µs, 9728x2560 in nf4 54 and 51."""

_OUTPUTS = 128
_INPUTS = 128
"""Of a tile; as inputs two blocks of nf4."""

_MIN_STEPS = 2
"""Tiles of the inputs in a share: with fewer, starting and adding it up costs more than it is."""

_MAX_SHARES = 16
_SUM_BLOCK = 512
_DENSE_OUTPUTS, _DENSE_INPUTS = 16, 256
_MULTIPROCESSORS = 132
"""Where there is no device to ask."""


class Plan(NamedTuple):
    """How a product is divided among programs."""

    block_rows: int
    block_outputs: int
    whole: int
    """Tiles of outputs that one program each adds up over all inputs: the first ones."""
    shares: int
    """Programs for each of the other tiles."""
    share_inputs: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    """Of a thread."""


def product(
    x: Tensor,
    kind: str,
    codes: Tensor,
    scales: Tensor,
    values: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x Wᵀ + bias of x (N, inputs), in `dtype`.

    `codes` are (outputs, bytes of a row), `scales` (outputs, 1 or blocks), and `values` what the
    sixteen codes of nf4 stand for.
    """
    outputs = len(codes)
    plan = plan_for(len(x), x.shape[1], outputs, _multiprocessors(x.device))
    return run(plan, x, kind, codes, scales, values, bias, dtype)


@functools.cache
def plan_for(num_rows: int, inputs: int, outputs: int, multiprocessors: int) -> Plan:
    """Each multiprocessor gets as many whole tiles as all others, and shares of the rest."""
    block_rows = max(16, min(128, triton.next_power_of_2(num_rows)))
    tiles, steps = -(-outputs // _OUTPUTS), -(-inputs // _INPUTS)
    # Two programs run on a multiprocessor at the same time, if their registers are few.
    at_once = 2 if block_rows <= 64 else 1
    programs = max(1, multiprocessors // -(-num_rows // block_rows))
    whole = tiles // programs * programs
    rest = tiles - whole
    wanted = (programs if whole else at_once * programs) // rest if rest else 1
    shares = max(1, min(wanted, steps // _MIN_STEPS, _MAX_SHARES))
    share_steps = -(-steps // shares)
    shares = -(-steps // share_steps)
    return Plan(
        block_rows=block_rows,
        block_outputs=_OUTPUTS,
        whole=whole if shares > 1 else tiles,
        shares=shares,
        share_inputs=share_steps * _INPUTS,
        num_warps=8,
        num_stages=3,
        max_registers=128 if at_once == 2 else None,
    )


def run(
    plan: Plan,
    x: Tensor,
    kind: str,
    codes: Tensor,
    scales: Tensor,
    values: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product by a plan."""
    (num_rows, inputs), outputs = x.shape, len(codes)
    y = x.new_empty(num_rows, outputs, dtype=dtype)
    tiles = -(-outputs // plan.block_outputs)
    rest = tiles - plan.whole
    left = min(outputs, plan.whole * plan.block_outputs)
    # (shares, N, outputs that are added up); where there are none, anything of that dtype.
    parts = scales
    if rest:
        parts = x.new_empty(plan.shares, num_rows, outputs - left, dtype=torch.float32)
    _PRODUCT(
        (-(-num_rows // plan.block_rows), plan.whole + rest * plan.shares, 1),
        (
            x,
            codes,
            scales,
            values,
            bias if bias is not None else x,
            y,
            parts,
            num_rows,
            inputs,
            outputs,
            plan.whole,
            max(1, rest),
            plan.share_inputs,
            x.stride(0),
            codes.stride(0),
            scales.stride(0),
            scales.stride(1),
        ),
        (kind, bias is not None, plan.block_rows, plan.block_outputs, _INPUTS, _IS_COMPILED),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        max_registers=plan.max_registers,
    )
    if rest:
        _SUM(
            (-(-(outputs - left) // _SUM_BLOCK), num_rows, 1),
            (parts, bias if bias is not None else x, y, num_rows, outputs, left),
            (plan.shares, bias is not None, _SUM_BLOCK),
            num_warps=4,
        )
    return y


def dense(
    kind: str, codes: Tensor, scales: Tensor, values: Tensor, inputs: int, dtype: torch.dtype
) -> Tensor:
    """The numbers (outputs, inputs) themselves."""
    outputs = len(codes)
    weight = codes.new_empty(outputs, inputs, dtype=dtype)
    _DENSE(
        (-(-outputs // _DENSE_OUTPUTS), -(-inputs // _DENSE_INPUTS), 1),
        (
            codes,
            scales,
            values,
            weight,
            inputs,
            outputs,
            codes.stride(0),
            scales.stride(0),
            scales.stride(1),
        ),
        (kind, _DENSE_OUTPUTS, _DENSE_INPUTS),
        num_warps=4,
    )
    return weight


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _lookups() -> str:
    """Four bytes to the values of their upper halves, and of their lower ones: lane n of a warp
    holds the value of code n % 16, and a lane is asked for by the last five bits of a number."""
    lines = [
        f"shr.u32 code, $8, {4 * place}; "
        f"shfl.sync.idx.b32 ${place // 2 + (0 if place % 2 else 4)}, $9, code, 31, 0xffffffff;"
        for place in range(8)
    ]
    return "\n".join(["{", ".reg .b32 code;", *lines, "}"])


_LOOKUPS = tl.constexpr(_lookups())
_LOOKUP_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 5))

_FLOATS = tl.constexpr("""{
    .reg .b32 pair, number;
    cvt.u32.u16 pair, $2;
    xor.b32 pair, pair, 0x8080;
    prmt.b32 number, pair, 0x4b000000, 0x7440;
    mov.b32 $0, number;
    add.f32 $0, $0, 0fCB000080;
    prmt.b32 number, pair, 0x4b000000, 0x7441;
    mov.b32 $1, number;
    add.f32 $1, $1, 0fCB000080;
}""")
"""Two signed bytes to floats: b + 128 in the last bits of 2²³ is 2²³ + 128 + b."""

_FLOAT_REGISTERS = tl.constexpr("=&f,=&f,h")


@triton.jit(do_not_specialize=["num_rows", "whole", "rest"])
def _product_kernel(
    x,
    codes,
    scales,
    values,
    bias,
    y,
    parts,
    num_rows,
    inputs,
    outputs,
    whole,
    rest,
    share_inputs,
    x_row,
    code_row,
    scale_row,
    scale_block,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_COMPILED: tl.constexpr,
):
    # One program per tile of outputs, or of one of its shares of the inputs, and block of rows.
    tile, share = tl.program_id(1), 0
    first, end = 0, inputs
    is_whole = tile < whole
    if not is_whole:
        share = (tile - whole) // rest
        tile = whole + (tile - whole) % rest
        first = share * share_inputs
        end = tl.minimum(first + share_inputs, inputs)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < num_rows, output < outputs
    dtype = x.dtype.element_ty
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    code_rows = codes + output.to(tl.int64)[:, None] * code_row
    # Numbers (OUTPUTS, INPUTS) times xᵀ (INPUTS, ROWS), INPUTS of them at a time.
    sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    if KIND == "nf4":
        table = values
        if IS_COMPILED:
            lane = tl.inline_asm_elementwise(
                "mov.u32 $0, %laneid;", "=r,r", [num_rows], dtype=tl.int32, is_pure=True, pack=1
            )
            table = tl.load(values + (lane & 15))
        # A row of the tile has the 64 bytes of two blocks, each with its scale.
        byte = tl.arange(0, INPUTS // 2)
        column = byte // 32 * 64 + byte % 32
        scale_rows = scales + output.to(tl.int64) * scale_row
        for at in range(first, end, INPUTS):
            is_in = at + column < end
            is_byte = is_output[:, None] & is_in[None, :]
            pairs = tl.load(code_rows + (at // 2 + byte)[None, :], mask=is_byte, other=0)
            is_x = is_row[:, None] & is_in[None, :]
            x_high = tl.load(x_rows + (at + column)[None, :], mask=is_x, other=0.0)
            x_low = tl.load(x_rows + (at + 32 + column)[None, :], mask=is_x, other=0.0)
            blocks = scale_rows + at // 64 * scale_block
            left = tl.load(blocks, mask=is_output, other=0.0)
            right = tl.load(blocks + scale_block, mask=is_output & (at + 64 < end), other=0.0)
            scale = tl.where((byte < 32)[None, :], left[:, None], right[:, None])
            if IS_COMPILED:
                high, low = tl.inline_asm_elementwise(
                    _LOOKUPS,
                    _LOOKUP_REGISTERS,
                    [pairs, table],
                    dtype=(tl.float32, tl.float32),
                    is_pure=True,
                    pack=4,
                )
            else:
                high, low = tl.load(table + (pairs >> 4)), tl.load(table + (pairs & 15))
            sums = tl.dot((high * scale).to(dtype), tl.trans(x_high), sums)
            sums = tl.dot((low * scale).to(dtype), tl.trans(x_low), sums)
    else:
        column = tl.arange(0, INPUTS)
        scale = tl.load(scales + output * scale_row, mask=is_output, other=0.0)[:, None]
        for at in range(first, end, INPUTS):
            is_in = at + column < end
            is_byte = is_output[:, None] & is_in[None, :]
            code = tl.load(code_rows + (at + column)[None, :], mask=is_byte, other=0.0)
            is_x = is_row[:, None] & is_in[None, :]
            values_of_x = tl.load(x_rows + (at + column)[None, :], mask=is_x, other=0.0)
            if KIND == "int8" and IS_COMPILED:
                number = tl.inline_asm_elementwise(
                    _FLOATS,
                    _FLOAT_REGISTERS,
                    [code],
                    dtype=tl.float32,
                    is_pure=True,
                    pack=2,
                )
            else:
                number = code.to(tl.float32)
            sums = tl.dot((number * scale).to(dtype), tl.trans(values_of_x), sums)
    # A whole sum goes to y (N, outputs), a share's to its part (N, outputs that are added up).
    inside = is_row[None, :] & is_output[:, None]
    if is_whole:
        if HAS_BIAS:
            sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        to_y = y + row.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(to_y, sums, mask=inside)
    else:
        left = whole * OUTPUTS
        of_share = (share * num_rows + row).to(tl.int64)[None, :]
        to_part = parts + of_share * (outputs - left) + (output - left)[:, None]
        tl.store(to_part, sums, mask=inside)


@triton.jit
def _sum_kernel(
    parts,
    bias,
    y,
    num_rows,
    outputs,
    left,
    SHARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per block of outputs and row: the parts of all shares, one after another.
    width = outputs - left
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for share in tl.static_range(SHARES):
        part = parts + (share * num_rows + row) * width
        total += tl.load(part + column, mask=is_in, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + left + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(y + row * outputs + left + column, total, mask=is_in)


@triton.jit
def _dense_kernel(
    codes,
    scales,
    values,
    weight,
    inputs,
    outputs,
    code_row,
    scale_row,
    scale_block,
    KIND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    # One program per tile of the weight.
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_output = output < outputs
    first = tl.program_id(1) * INPUTS
    if KIND == "nf4":
        byte = tl.arange(0, INPUTS // 2)
        column = first + byte // 32 * 64 + byte % 32
        inside = is_output[:, None] & (column < inputs)[None, :]
        at = output[:, None] * code_row + (first // 2 + byte)[None, :]
        pair = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        block = output[:, None] * scale_row + (column // 64)[None, :] * scale_block
        scale = tl.load(scales + block, mask=inside, other=0.0)
        to = weight + output[:, None] * inputs + column[None, :]
        tl.store(to, tl.load(values + (pair >> 4)) * scale, mask=inside)
        tl.store(to + 32, tl.load(values + (pair & 15)) * scale, mask=inside)
    else:
        column = first + tl.arange(0, INPUTS)
        inside = is_output[:, None] & (column < inputs)[None, :]
        at = output[:, None] * code_row + column[None, :]
        code = tl.load(codes + at, mask=inside, other=0.0)
        scale = tl.load(scales + output * scale_row, mask=is_output, other=0.0)
        to = weight + output[:, None] * inputs + column[None, :]
        tl.store(to, code.to(tl.float32) * scale[:, None], mask=inside)


_IS_COMPILED = isinstance(_product_kernel, triton.JITFunction)
"""Triton's interpreter knows no instructions of the device."""

_PRODUCT, _SUM, _DENSE = Launcher(_product_kernel), Launcher(_sum_kernel), Launcher(_dense_kernel)
