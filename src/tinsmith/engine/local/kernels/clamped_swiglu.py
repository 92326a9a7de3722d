"""Triton kernels for the gate of gpt-oss's experts, and for the biases before it.

`model.experts.clamped_swiglu` has the formula, and does the same in plain torch. All arithmetic is
in float32, whatever the dtype in memory.

Shapes: S rows sorted by expert, I inner columns, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher

_BLOCK = 1024


def forward(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(S, I) of gate_up (S, 2 I): gates, then ups."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    grid = (num_rows, triton.cdiv(size, _BLOCK), 1)
    _FORWARD(grid, (gate_up, out, size, alpha, limit), (_BLOCK,), num_warps=4)
    return out


def backward(grad: Tensor, gate_up: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    """The gradient for gate_up (S, 2 I); and the output once more."""
    num_rows, size = grad.shape
    grad_in, out = torch.empty_like(gate_up), torch.empty_like(grad)
    grid = (num_rows, triton.cdiv(size, _BLOCK), 1)
    arguments = (grad, gate_up, grad_in, out, size, alpha, limit)
    _BACKWARD(grid, arguments, (_BLOCK,), num_warps=4)
    return grad_in, out


def add_biases(rows: Tensor, biases: Tensor, experts: Tensor) -> None:
    """Add to each row (S, n) the bias (E, n) of its expert (S,), in place."""
    num_rows, size = rows.shape
    grid = (num_rows, triton.cdiv(size, _BLOCK), 1)
    _ADD_BIASES(grid, (rows, biases, experts, size), (_BLOCK,), num_warps=4)


@triton.jit
def _gated(gate_up, row, columns, inside, size, alpha, limit):
    """Gate and up as they are in memory, then bounded; and the sigmoid of the gate. What is not a
    number stays so."""
    at = gate_up + row * 2 * size + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    low_gate = tl.where(gate > limit, limit, gate)
    low_up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    share = 1.0 / (1.0 + tl.exp(-alpha * low_gate))
    return gate, up, low_gate, low_up, share


@triton.jit
def _forward(gate_up, out, size, alpha, limit, BLOCK: tl.constexpr):
    # One program per row and BLOCK columns of I.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    _, _, gate, up, share = _gated(gate_up, row, columns, inside, size, alpha, limit)
    tl.store(out + row * size + columns, (up + 1.0) * gate * share, mask=inside)


@triton.jit
def _backward(grad, gate_up, grad_in, out, size, alpha, limit, BLOCK: tl.constexpr):
    # One program per row and BLOCK columns of I.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    whole_gate, whole_up, gate, up, share = _gated(
        gate_up, row, columns, inside, size, alpha, limit
    )
    upstream = tl.load(grad + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    # The output once more; and the gradients, none beyond a limit.
    active = gate * share
    tl.store(out + row * size + columns, (up + 1.0) * active, mask=inside)
    slope = share + alpha * active * (1.0 - share)
    grad_gate = tl.where(whole_gate > limit, 0.0, upstream * (up + 1.0) * slope)
    is_beyond = (whole_up > limit) | (whole_up < -limit)
    grad_up = tl.where(is_beyond, 0.0, upstream * active)
    to = grad_in + row * 2 * size + columns
    tl.store(to, grad_gate, mask=inside)
    tl.store(to + size, grad_up, mask=inside)


@triton.jit
def _add_biases(rows, biases, experts, size, BLOCK: tl.constexpr):
    # One program per row and BLOCK columns.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    expert = tl.load(experts + row).to(tl.int64)
    bias = tl.load(biases + expert * size + columns, mask=inside, other=0.0).to(tl.float32)
    to = rows + row * size + columns
    tl.store(to, tl.load(to, mask=inside, other=0.0).to(tl.float32) + bias, mask=inside)


_FORWARD, _BACKWARD = Launcher(_forward), Launcher(_backward)
_ADD_BIASES = Launcher(_add_biases)
