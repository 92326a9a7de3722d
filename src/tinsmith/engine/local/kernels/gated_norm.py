"""The norm and gate of what a delta-rule layer gives, forward and backward, some heads at a time.

All arithmetic is in float32, whatever the dtype in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher

_NUMBERS = 1024
"""Of heads that a program has at once."""


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head of y (N, H · V), with a weight (V,), times silu(gate) (N, H · V)."""
    out = gate.new_empty(y.shape)
    num_heads, constants, grid = _division(y, weight)
    arguments = (y.contiguous(), gate.contiguous(), weight, out, num_heads, len(weight), eps)
    _GATED_NORM(grid, arguments, constants, num_warps=4)
    return out


def gated_norm_backward(
    grad: Tensor, y: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for y and gate; and the output once more."""
    y, gate = y.contiguous(), gate.contiguous()
    grad_y, grad_gate, out = y.new_empty(y.shape), gate.new_empty(y.shape), gate.new_empty(y.shape)
    num_heads, constants, grid = _division(y, weight)
    arguments = (grad, y, gate, weight, grad_y, grad_gate, out, num_heads, len(weight), eps)
    _GATED_NORM_BACKWARD(grid, arguments, constants, num_warps=4)
    return grad_y, grad_gate, out


def _division(y: Tensor, weight: Tensor) -> tuple[int, tuple[int, int], tuple[int, int, int]]:
    """How many heads there are in all rows, how a program divides them, and the programs."""
    num_heads = y.numel() // len(weight)
    block = triton.next_power_of_2(len(weight))
    heads = max(1, _NUMBERS // block)
    return num_heads, (heads, block), (triton.cdiv(num_heads, heads), 1, 1)


@triton.jit
def _gated_norm(
    y, gate, weight, out, num_heads, size, eps, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    # One program per HEADS heads of V numbers, whichever rows they are of: (HEADS, BLOCK).
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (column < size)
    at = head.to(tl.int64) * size + column
    values = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    # x / sqrt(mean(x²) + eps) · weight · silu(gate).
    inverse = tl.rsqrt(tl.sum(values * values, axis=1) / size + eps)[:, None]
    active = gates / (1.0 + tl.exp(-gates))
    tl.store(out + at, values * inverse * scale * active, mask=inside)


@triton.jit
def _gated_norm_backward(
    grad,
    y,
    gate,
    weight,
    grad_y,
    grad_gate,
    out,
    num_heads,
    size,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # As in `_gated_norm`, whose numbers are computed again.
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (column < size)
    at = head.to(tl.int64) * size + column
    values = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=1) / size + eps)[:, None]
    sigmoid = 1.0 / (1.0 + tl.exp(-gates))
    active = gates * sigmoid
    unit = values * inverse
    normed = unit * scale
    tl.store(out + at, normed * active, mask=inside)
    # d gate = grad · normed · silu'(gate).
    upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    slope = sigmoid * (1.0 + gates * (1.0 - sigmoid))
    tl.store(grad_gate + at, upstream * normed * slope, mask=inside)
    # g = grad · silu(gate) · weight; dy = (g - ŷ · mean(g · ŷ)) / rms(y).
    scaled = upstream * active * scale
    along = (tl.sum(scaled * unit, axis=1) / size)[:, None]
    tl.store(grad_y + at, (scaled - unit * along) * inverse, mask=inside)


_GATED_NORM, _GATED_NORM_BACKWARD = Launcher(_gated_norm), Launcher(_gated_norm_backward)
