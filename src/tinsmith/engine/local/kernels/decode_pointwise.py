"""Triton kernels for RMS norm and SwiGLU of a decoding step; `pointwise` is the reference.

They round where the plain forms round, so that sampler and trainer agree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.model.pointwise import Activation

_SWIGLU_BLOCK = 512


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add y to x (B, d) in place, if there is one, and return the RMS norm of the sum."""
    out = torch.empty_like(x)
    num_rows, size = x.shape
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_rows,)](
        x,
        x if y is None else y,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_Y=y is not None,
        num_warps=min(8, max(1, block // 256)),
    )
    return out


def swiglu(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(left half) · right half of gate_up (B, 2 n)."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    _swiglu_kernel[(num_rows, triton.cdiv(size, _SWIGLU_BLOCK))](
        gate_up, out, SIZE=size, BLOCK=_SWIGLU_BLOCK, IS_SILU=activation == "silu", num_warps=2
    )
    return out


@triton.jit
def _add_rms_norm_kernel(
    x, y, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_Y: tl.constexpr
):
    # One program per row of x (B, d).
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_in = column < SIZE
    dtype = x.dtype.element_ty
    # Add to the residual stream, and round as the stream in memory is rounded: (BLOCK,).
    total = tl.load(x + row * SIZE + column, mask=is_in, other=0.0).to(tl.float32)
    if HAS_Y:
        total += tl.load(y + row * SIZE + column, mask=is_in, other=0.0).to(tl.float32)
        rounded = total.to(dtype)
        tl.store(x + row * SIZE + column, rounded, mask=is_in)
        total = rounded.to(tl.float32)
    # RMS norm of the sum: (d,).
    factor = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    scale = tl.load(weight + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (total * factor * scale).to(dtype), mask=is_in)


@triton.jit
def _swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):
    # One program per row and BLOCK columns; gate_up is (B, 2 · SIZE): gate, then up.
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < SIZE
    dtype = gate_up.dtype.element_ty
    source = gate_up + row * 2 * SIZE + column
    left = tl.load(source, mask=is_in, other=0.0).to(tl.float32)
    right = tl.load(source + SIZE, mask=is_in, other=0.0).to(tl.float32)
    # f(gate): silu, or gelu by its tanh form, tanh(z) being 2 · sigmoid(2z) - 1.
    if IS_SILU:
        active = left * tl.sigmoid(left)
    else:
        inner = 0.7978845608028654 * (left + 0.044715 * left * left * left)
        active = left * tl.sigmoid(2.0 * inner)
    # Rounded between the two steps, as the plain form does.
    result = active.to(dtype).to(tl.float32) * right
    tl.store(out + row * SIZE + column, result.to(dtype), mask=is_in)
