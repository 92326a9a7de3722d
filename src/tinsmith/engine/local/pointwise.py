"""Norm and gate of a block, with backward passes that keep little.

Left to autograd, these two would keep half of a block's activations. By hand they keep their
inputs, most of which a neighbour keeps anyway, and compute the rest again.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in x's dtype.

    A weight in another dtype than x, as Gemma's float32 beside half precision, widens the
    computation to it.
    """
    if x.dtype != weight.dtype:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    is_training = torch.is_grad_enabled() and x.requires_grad
    if is_training and x.dtype == torch.float32 and not x.is_cuda:
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(left half) · right half of the last dimension."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _Gate.apply(gate_up, activation)
    left, right = gate_up.chunk(2, dim=-1)
    return _activate(left, activation).mul_(right)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def _activate_backward(grad: Tensor, x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


class _Gate(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, gate_up, activation):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        left, right = gate_up.chunk(2, dim=-1)
        return _activate(left, activation).mul_(right)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        left, right = gate_up.chunk(2, dim=-1)
        left_grad = _activate_backward(grad * right, left, ctx.activation)
        return torch.cat((left_grad, _activate(left, ctx.activation).mul_(grad)), dim=-1), None


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    """For the CPU, where torch's own is made of many passes over memory; float32, frozen weight."""

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
        inverse = (squares / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        scaled = grad * weight
        along = torch.linalg.vecdot(scaled, x).unsqueeze(-1) * inverse**3 / x.shape[-1]
        return scaled.mul_(inverse).addcmul_(x, along, value=-1), None, None
