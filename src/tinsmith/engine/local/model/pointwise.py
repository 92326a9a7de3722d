"""What a block does between its products: RMS norm, RoPE and SwiGLU, forward and backward, by hand.

Left to autograd these would keep most of a block's activations. By hand they keep nothing: the
backward pass is given the inputs again, and hands back the output too, where the gradients of
adapters need it. On CUDA each function is one kernel, here is the same in plain torch.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.experts.clamped_swiglu import ClampedSwiglu
from tinsmith.engine.local.model.rope import Rotation

PlainActivation = Literal["silu", "gelu_tanh"]

Activation = PlainActivation | ClampedSwiglu

Norms = tuple[Tensor, Tensor]
"""Weights (D,) of the norms of queries and of keys; wide ones are (H · D,) and (K · D,)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in x's dtype or in `dtype`.

    A weight in another dtype than x, as Gemma's float32 beside half precision, widens the
    computation to it.
    """
    if x.ndim == 2 and kernels.are_usable(x):
        return kernels.module("pointwise").rms_norm(x, weight, eps, dtype)
    if dtype is not None and dtype != x.dtype:
        return rms_norm(x, weight.to(x.dtype), eps).to(dtype)
    if x.dtype != weight.dtype:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    if x.dtype != torch.float32 or x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    # On the CPU torch's own is made of many passes over memory.
    return (x * _inverse(x, eps)).mul_(weight)


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual_grad: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient for x, with `residual_grad` added; and the norm's output once more.

    Both are in the dtype of `grad`, or the gradient for x in `dtype`.
    """
    dtype = dtype or grad.dtype
    if x.ndim == 2 and kernels.are_usable(x):
        return kernels.module("pointwise").rms_norm_backward(
            grad.contiguous(), x, weight, eps, residual_grad, dtype
        )
    y_dtype = grad.dtype
    x, scaled = x.float(), grad.float() * weight
    inverse = _inverse(x, eps)
    unit = x * inverse
    along = torch.linalg.vecdot(scaled, unit).unsqueeze(-1).div_(x.shape[-1])
    grad_x = scaled.addcmul_(unit, along, value=-1).mul_(inverse)
    if residual_grad is not None:
        grad_x.add_(residual_grad)
    return grad_x.to(dtype), unit.mul_(weight).to(y_dtype)


def differentiable_rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """`rms_norm` of x (N, d) as autograd sees it; the weight is frozen."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _RmsNorm.apply(x, weight, eps, dtype)
    return rms_norm(x, weight, eps, dtype)


def apply_rope(
    qkv: Tensor, norms: Norms | None, rotation: Rotation, num_kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, H, D), k and v (N, K, D) from qkv (N, (H + 2K) · D).

    Queries and keys are normalized where the model has norms for them, and rotated.
    """
    head_dim = 2 * rotation.cos.shape[-1]
    by_head = qkv.view(len(qkv), -1, head_dim)
    num_heads = by_head.shape[1] - 2 * num_kv_heads
    q_and_k, v = by_head.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if kernels.are_usable(qkv):
        fused = kernels.module("pointwise")
        rotated = fused.apply_rope(qkv, norms, rotation, num_heads, num_kv_heads, eps)
        q, k = rotated.split((num_heads, num_kv_heads), dim=1)
        return q, k, v
    if norms is None:
        q, k = _rotate(q_and_k, rotation).split((num_heads, num_kv_heads), dim=1)
        return q, k, v
    q, k = q_and_k.split((num_heads, num_kv_heads), dim=1)
    return (
        _rotate(rms_norm(q, norms[0], eps), rotation),
        _rotate(rms_norm(k, norms[1], eps), rotation),
        v,
    )


def apply_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    norms: Norms | None,
    rotation: Rotation,
    eps: float,
) -> Tensor:
    """The gradient for qkv, from those for q, k and v; without norms `qkv` gives the shape only."""
    if kernels.are_usable(qkv):
        return kernels.module("pointwise").apply_rope_backward(grads, qkv, norms, rotation, eps)
    back = rotation.inverse
    grad = torch.empty_like(qkv).view(len(qkv), -1, 2 * rotation.cos.shape[-1])
    sizes = [part.shape[1] for part in grads]
    grad_q, grad_k, grad_v = grad.split(sizes, dim=1)
    _rotate(grads[0], back, grad_q)
    _rotate(grads[1], back, grad_k)
    grad_v.copy_(grads[2])
    if norms is not None:
        q, k, _ = qkv.view(grad.shape).split(sizes, dim=1)
        grad_q.copy_(rms_norm_backward(grad_q, q, norms[0], eps)[0])
        grad_k.copy_(rms_norm_backward(grad_k, k, norms[1], eps)[0])
    return grad.view(qkv.shape)


def wide_norm(qkv: Tensor, norms: Norms, eps: float) -> Tensor:
    """qkv (N, (H + 2K) · D) with its queries normed over all heads together, and so its keys."""
    q, k, v = _split_by(qkv, norms)
    normed = [
        rms_norm(x.contiguous(), weight, eps) for x, weight in zip((q, k), norms, strict=True)
    ]
    return torch.cat([*normed, v], dim=1)


def wide_norm_backward(grad: Tensor, qkv: Tensor, norms: Norms, eps: float) -> Tensor:
    """The gradient for qkv, from that of `wide_norm`."""
    grad_q, grad_k, grad_v = _split_by(grad, norms)
    q, k, _ = _split_by(qkv, norms)
    of_q, _ = rms_norm_backward(grad_q, q.contiguous(), norms[0], eps)
    of_k, _ = rms_norm_backward(grad_k, k.contiguous(), norms[1], eps)
    return torch.cat([of_q, of_k, grad_v], dim=1)


def swiglu(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(left half) · right half of gate_up (N, 2I); with gelu this is GeGLU."""
    if isinstance(activation, ClampedSwiglu):
        return activation.forward(gate_up)
    if kernels.are_usable(gate_up):
        return kernels.module("pointwise").swiglu(gate_up, activation == "silu")
    left, right = gate_up.chunk(2, dim=-1)
    return _activate(left, activation).mul_(right)


def swiglu_backward(grad: Tensor, gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The gradient for gate_up (N, 2I); and the output once more."""
    if isinstance(activation, ClampedSwiglu):
        return activation.backward(grad, gate_up)
    if kernels.are_usable(gate_up):
        return kernels.module("pointwise").swiglu_backward(grad, gate_up, activation == "silu")
    left, right = gate_up.chunk(2, dim=-1)
    active = _activate(left, activation)
    grad_in = torch.empty_like(gate_up)
    grad_left, grad_right = grad_in.chunk(2, dim=-1)
    torch.mul(active, grad, out=grad_right)
    torch.mul(grad, right, out=grad_left)
    _activate_backward_(grad_left, left, activation)
    return grad_in, active.mul_(right)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head of y (N, H · V), with a weight (V,), times silu(gate) (N, H · V)."""
    if kernels.are_usable(y):
        return kernels.module("gated_norm").gated_norm(y, gate, weight, eps)
    heads, gates = _heads_of(y, weight), _heads_of(gate, weight)
    return rms_norm(heads, weight.float(), eps).mul_(F.silu(gates)).to(gate.dtype).view(y.shape)


def gated_norm_backward(
    grad: Tensor, y: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for y and gate; and the output once more."""
    if kernels.are_usable(y):
        return kernels.module("gated_norm").gated_norm_backward(
            grad.contiguous(), y, gate, weight, eps
        )
    grads, heads, gates = (_heads_of(x, weight) for x in (grad, y, gate))
    active = F.silu(gates)
    grad_y, normed = rms_norm_backward(grads * active, heads, weight.float(), eps)
    grad_gate = torch.ops.aten.silu_backward(grads * normed, gates)
    grad_y, grad_gate, out = (
        x.to(y.dtype).view(y.shape) for x in (grad_y, grad_gate, normed * active)
    )
    return grad_y, grad_gate, out


def split_gate(qkv: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """qkv (N, (H + 2K) · D), and a view of the gate (N, H, D): they came by turns for each query
    head."""
    heads = qkv.unflatten(1, (-1, head_dim))
    queries, gate = heads[:, : 2 * num_heads].unflatten(1, (num_heads, 2)).unbind(dim=2)
    return torch.cat([queries, heads[:, 2 * num_heads :]], dim=1).flatten(1), gate


def join_gate(qkv: Tensor, gate: Tensor, head_dim: int) -> Tensor:
    """The inverse of `split_gate`, of a gate (N, H · D)."""
    size = gate.shape[1]
    queries = torch.stack([x.unflatten(1, (-1, head_dim)) for x in (qkv[:, :size], gate)], dim=2)
    return torch.cat([queries.flatten(1), qkv[:, size:]], dim=1)


def gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for x and gate of x · sigmoid(gate); and the product once more."""
    share = gate.sigmoid()
    out = x * share
    return grad * share, torch.ops.aten.sigmoid_backward(grad * x, share), out


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, x, weight, eps, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps, dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad_x, _ = rms_norm_backward(grad, x, weight, ctx.eps, dtype=x.dtype)
        return grad_x, None, None, None


def _heads_of(x: Tensor, weight: Tensor) -> Tensor:
    """(N · H, V) in float32."""
    return x.reshape(-1, len(weight)).float()


def _split_by(qkv: Tensor, norms: Norms) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, by the sizes of the first two's norms."""
    queries, keys = (len(weight) for weight in norms)
    q, k, v = qkv.split((queries, keys, keys), dim=1)
    return q, k, v


def _inverse(x: Tensor, eps: float) -> Tensor:
    squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
    return squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def _rotate(x: Tensor, rotation: Rotation, out: Tensor | None = None) -> Tensor:
    """Each pair of the last dimension of x (N, heads, D) rotated by its angle."""
    distance, size = rotation.distance, x.shape[-1]
    cos, sin = rotation.cos, rotation.sin
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if 2 * distance == size:
        left, right = x.chunk(2, dim=-1)
        to_left, to_right = out.chunk(2, dim=-1)
    else:
        cos, sin = cos[..., :distance], sin[..., :distance]
        sizes = (distance, distance, size - 2 * distance)
        left, right, plain = x.split(sizes, dim=-1)
        to_left, to_right, to_plain = out.split(sizes, dim=-1)
        to_plain.copy_(plain)
    torch.mul(left, cos, out=to_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=to_right).addcmul_(left, sin)
    return out


def _activate(x: Tensor, activation: PlainActivation) -> Tensor:
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def _activate_backward_(grad: Tensor, x: Tensor, activation: PlainActivation) -> None:
    """In place: the gradient for x from that of its activation."""
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)
    else:
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad)
