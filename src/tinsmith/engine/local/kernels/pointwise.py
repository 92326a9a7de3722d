"""RMS norm, RoPE and SwiGLU of a block, forward and backward, a row or a part of one at a time.

All arithmetic is in float32, whatever the dtype in memory.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher
from tinsmith.engine.local.model.rope import Rotation

_SWIGLU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of x (N, d), in x's dtype or in
    `dtype`."""
    y = torch.empty_like(x, dtype=dtype)
    num_rows, size = x.shape
    block, warps = _row_block(size)
    _RMS_NORM((num_rows, 1, 1), (x, x, weight, y, size, eps), (False, block), warps)
    return y


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Add y to x (N, d) in place, and return the RMS norm of the sum: the bits of two steps."""
    out = torch.empty_like(x, dtype=dtype)
    num_rows, size = x.shape
    block, warps = _row_block(size)
    _RMS_NORM((num_rows, 1, 1), (x, y, weight, out, size, eps), (True, block), warps)
    return out


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual_grad: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradient for x in `dtype`, with `residual_grad` added; and the norm's output once more,
    in the dtype of `grad`."""
    y, grad_x = torch.empty_like(x, dtype=grad.dtype), torch.empty_like(x, dtype=dtype)
    num_rows, size = x.shape
    block, warps = _row_block(size)
    has_residual = residual_grad is not None
    residual = residual_grad if residual_grad is not None else grad
    _RMS_NORM_BACKWARD(
        (num_rows, 1, 1),
        (grad, x, weight, residual, grad_x, y, size, eps),
        (has_residual, block),
        warps,
    )
    return grad_x, y


def apply_rope(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """Queries and keys (N, H + K, D) of qkv (N, (H + 2K) · D): normalized if asked, and rotated."""
    cos, sin, distance = rotation
    half = cos.shape[-1]
    heads = num_heads + num_kv_heads
    out = qkv.new_empty(len(qkv), heads, 2 * half)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _APPLY_ROPE(
        (len(qkv), 1, 1),
        (qkv, q_norm, k_norm, cos, sin, out, qkv.stride(0), num_heads, heads, half, distance, eps),
        (norms is not None, _power(heads), _power(half)),
        num_warps=8,
    )
    return out


def apply_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    rotation: Rotation,
    eps: float,
) -> Tensor:
    """The gradient for qkv (N, (H + 2K) · D), from those of q (N, H, D), k and v (N, K, D)."""
    grad_q, grad_k, _ = grads
    cos, sin, distance = rotation
    half = cos.shape[-1]
    num_heads, kv_heads = grad_q.shape[1], grad_k.shape[1]
    rotated, heads = num_heads + kv_heads, num_heads + 2 * kv_heads
    out = torch.empty_like(qkv)
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    strides = [stride for grad in grads for stride in grad.stride()[:2]]
    _APPLY_ROPE_BACKWARD(
        (len(qkv), 1, 1),
        (
            *grads,
            qkv,
            q_norm,
            k_norm,
            cos,
            sin,
            out,
            *strides,
            num_heads,
            rotated,
            heads,
            half,
            distance,
            eps,
        ),
        (norms is not None, _power(heads), _power(half)),
        num_warps=8,
    )
    return out


def swiglu(gate_up: Tensor, is_silu: bool) -> Tensor:
    """activation(left half) · right half of gate_up (N, 2I); with gelu this is GeGLU."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    grid = (num_rows, -(-size // _SWIGLU_BLOCK), 1)
    _SWIGLU(grid, (gate_up, out, size), (is_silu, _SWIGLU_BLOCK), num_warps=4)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor, is_silu: bool) -> tuple[Tensor, Tensor]:
    """The gradient for gate_up (N, 2I); and the output once more."""
    num_rows, size = grad.shape
    grad_in, out = torch.empty_like(gate_up), torch.empty_like(grad)
    grid = (num_rows, -(-size // _SWIGLU_BLOCK), 1)
    arguments = (grad, gate_up, grad_in, out, size)
    _SWIGLU_BACKWARD(grid, arguments, (is_silu, _SWIGLU_BLOCK), num_warps=4)
    return grad_in, out


@functools.cache
def _row_block(size: int) -> tuple[int, int]:
    """Columns and warps for a program that has a whole row."""
    block = _power(size)
    return block, 4 if block <= 2048 else 8


@functools.cache
def _power(size: int) -> int:
    return triton.next_power_of_2(size)


@triton.jit
def _rms_norm(x, added, weight, y, size, eps, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr):
    # One program per row of x (N, d).
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    # Load the row and the weight: (BLOCK,), zero beyond d.
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        # Rounded, as the sum in memory is.
        values += tl.load(added + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + row * size + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    # 1 / sqrt(mean(x²) + eps), a scalar.
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    # Normalize, scale, store: (d,).
    tl.store(y + row * size + columns, values * inverse * scale, mask=inside)


@triton.jit
def _rms_norm_backward(
    grad,
    x,
    weight,
    residual,
    grad_x,
    y,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row; all rows are (BLOCK,), zero beyond d.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = row * size + columns
    # Forward again: x̂ = x / rms(x), and the output x̂ · weight, which the caller wants too.
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    unit = values * inverse
    tl.store(y + at, unit * scale, mask=inside)
    # Backward: g = grad · weight; dx = (g - x̂ · mean(g · x̂)) / rms(x).
    scaled = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
    along = tl.sum(scaled * unit, axis=0) / size
    result = (scaled - unit * along) * inverse
    # The residual stream's own gradient joins here, which saves a pass over memory.
    if HAS_RESIDUAL:
        result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_x + at, result, mask=inside)


@triton.jit
def _pair(column, half, distance):
    """Where the two of a pair lie in a head: `distance` apart, and behind those what is plain."""
    is_rotated = column < distance
    return (
        column + tl.where(is_rotated, 0, distance),
        column + tl.where(is_rotated, distance, half),
    )


@triton.jit
def _apply_rope(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    out,
    row_stride,
    num_heads,
    heads,
    half,
    distance,
    eps,
    HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    # One program per token; its query and key heads, and of each the two of a pair: (HEADS, HALF).
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    at_left, at_right = _pair(column, half, distance)
    first = head * (2 * half)
    source = qkv + row * row_stride + first
    left = tl.load(source + at_left, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + at_right, mask=inside, other=0.0).to(tl.float32)
    # RMS norm of each head over D = 2 · half, with the weights of queries or of keys.
    if HAS_NORMS:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        inverse = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        is_q = (head < num_heads) & (column < half)
        is_k = (head >= num_heads) & (column < half)
        left_scale = tl.load(q_norm + at_left + head * 0, mask=is_q, other=0.0).to(tl.float32)
        left_scale += tl.load(k_norm + at_left + head * 0, mask=is_k, other=0.0).to(tl.float32)
        right_scale = tl.load(q_norm + at_right + head * 0, mask=is_q, other=0.0).to(tl.float32)
        right_scale += tl.load(k_norm + at_right + head * 0, mask=is_k, other=0.0).to(tl.float32)
        left = left * inverse * left_scale
        right = right * inverse * right_scale
    # RoPE: rotate each pair by the token's angle; cosines and sines are (1, HALF).
    c = tl.load(cos + row * half + column, mask=column < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + column, mask=column < half, other=0.0).to(tl.float32)
    to = out + row * heads * 2 * half + first
    tl.store(to + at_left, left * c - right * s, mask=inside)
    tl.store(to + at_right, right * c + left * s, mask=inside)


@triton.jit
def _apply_rope_backward(
    grad_q,
    grad_k,
    grad_v,
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    num_heads,
    rotated,
    heads,
    half,
    distance,
    eps,
    HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    # One program per token; heads in the order q, k, v, of each the two of a pair (HEADS, HALF).
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_column = column < half
    is_q = (head < num_heads) & is_column
    is_k = (head >= num_heads) & (head < rotated) & is_column
    is_v = (head >= rotated) & (head < heads) & is_column
    at_left, at_right = _pair(column, half, distance)
    from_q = grad_q + row * q_row + head * q_head
    from_k = grad_k + row * k_row + (head - num_heads) * k_head
    from_v = grad_v + row * v_row + (head - rotated) * v_head
    # Gather the gradients of q and k, which lie in tensors of their own.
    left = tl.load(from_q + at_left, mask=is_q, other=0.0).to(tl.float32)
    left += tl.load(from_k + at_left, mask=is_k, other=0.0).to(tl.float32)
    right = tl.load(from_q + at_right, mask=is_q, other=0.0).to(tl.float32)
    right += tl.load(from_k + at_right, mask=is_k, other=0.0).to(tl.float32)
    # RoPE backward: rotate by minus the angle.
    c = tl.load(cos + row * half + column, mask=is_column, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + column, mask=is_column, other=0.0).to(tl.float32)
    back_left = left * c + right * s
    back_right = right * c - left * s
    first = row * heads * 2 * half + head * (2 * half)
    # RMS norm backward, as in `_rms_norm_backward`, for each head; x̂ is computed again from qkv.
    if HAS_NORMS:
        is_rotated = is_q | is_k
        x_left = tl.load(qkv + first + at_left, mask=is_rotated, other=0.0).to(tl.float32)
        x_right = tl.load(qkv + first + at_right, mask=is_rotated, other=0.0).to(tl.float32)
        squares = tl.sum(x_left * x_left, axis=1) + tl.sum(x_right * x_right, axis=1)
        inverse = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        left_scale = tl.load(q_norm + at_left + head * 0, mask=is_q, other=0.0).to(tl.float32)
        left_scale += tl.load(k_norm + at_left + head * 0, mask=is_k, other=0.0).to(tl.float32)
        right_scale = tl.load(q_norm + at_right + head * 0, mask=is_q, other=0.0).to(tl.float32)
        right_scale += tl.load(k_norm + at_right + head * 0, mask=is_k, other=0.0).to(tl.float32)
        back_left = back_left * left_scale
        back_right = back_right * right_scale
        unit_left, unit_right = x_left * inverse, x_right * inverse
        along = tl.sum(back_left * unit_left, axis=1) + tl.sum(back_right * unit_right, axis=1)
        along = (along / (2 * half))[:, None]
        back_left = (back_left - unit_left * along) * inverse
        back_right = (back_right - unit_right * along) * inverse
    # v was only copied, so is its gradient. Then all heads go out: (H + 2K, D).
    back_left += tl.load(from_v + at_left, mask=is_v, other=0.0).to(tl.float32)
    back_right += tl.load(from_v + at_right, mask=is_v, other=0.0).to(tl.float32)
    is_any = is_q | is_k | is_v
    tl.store(out + first + at_left, back_left, mask=is_any)
    tl.store(out + first + at_right, back_right, mask=is_any)


@triton.jit
def activate(x, IS_SILU: tl.constexpr):
    """The activation and its derivative."""
    if IS_SILU:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    bend = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
    slope = 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1.0 + bend), 0.5 * (1.0 + bend) + 0.5 * x * (1.0 - bend * bend) * slope


@triton.jit
def _swiglu(gate_up, out, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    # One program per token and BLOCK columns of I; gate_up is (N, 2I): gate, then up.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    left = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0)
    active, _ = activate(left, IS_SILU)
    tl.store(out + row * size + columns, active * right.to(tl.float32), mask=inside)


@triton.jit
def _swiglu_backward(grad, gate_up, grad_in, out, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    # One program per token and BLOCK columns of I.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    at = row * 2 * size + columns
    left = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(gate_up + at + size, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    # d gate = grad · up · f'(gate); d up = grad · f(gate); and the output f(gate) · up once more.
    active, slope = activate(left, IS_SILU)
    tl.store(grad_in + at, upstream * right * slope, mask=inside)
    tl.store(grad_in + at + size, upstream * active, mask=inside)
    tl.store(out + row * size + columns, active * right, mask=inside)


_RMS_NORM, _RMS_NORM_BACKWARD = Launcher(_rms_norm), Launcher(_rms_norm_backward)
_APPLY_ROPE, _APPLY_ROPE_BACKWARD = Launcher(_apply_rope), Launcher(_apply_rope_backward)
_SWIGLU, _SWIGLU_BACKWARD = Launcher(_swiglu), Launcher(_swiglu_backward)
