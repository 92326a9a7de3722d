"""Norm, heads and gate by hand: the gradients of autograd on the formulas written out.

In float64 autograd, float32 ours; relative tolerance 1e-5.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model import pointwise
from tinsmith.engine.local.model.pointwise import Activation

EPS = 1e-5


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


def plain_gate(x: Tensor, activation: Activation) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    active = F.silu(left) if activation == "silu" else F.gelu(left, approximate="tanh")
    return active * right


def plain_heads(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Three query heads, one key and one value head, of eight numbers each."""
    q, k, v = qkv.view(len(qkv), 5, 8).split((3, 1, 1), dim=1)
    if norms is not None:
        q, k = plain_norm(q, norms[0]), plain_norm(k, norms[1])

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    return rotated(q), rotated(k), v


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_residual", [False, True])
def test_the_norm_has_the_gradient_of_autograd(has_residual: bool) -> None:
    torch.manual_seed(0)
    x, grad, residual, weight = torch.randn(6, 12), torch.randn(6, 12), torch.randn(6, 12), None
    weight = torch.randn(12)
    leaf = x.double().requires_grad_()
    expected = plain_norm(leaf, weight.double())
    expected.backward(grad.double())
    assert leaf.grad is not None
    grad_x, y = pointwise.rms_norm_backward(
        grad, x, weight, EPS, residual if has_residual else None
    )
    assert_close(pointwise.rms_norm(x, weight, EPS), expected.detach())
    assert_close(y, expected.detach())
    assert_close(grad_x, leaf.grad + (residual if has_residual else 0))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_has_the_gradient_of_autograd(activation: Activation) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(6, 24), torch.randn(6, 12)
    leaf = x.double().requires_grad_()
    expected = plain_gate(leaf, activation)
    expected.backward(grad.double())
    assert leaf.grad is not None
    grad_x, y = pointwise.swiglu_backward(grad, x, activation)
    assert_close(pointwise.swiglu(x, activation), expected.detach())
    assert_close(y, expected.detach())
    assert_close(grad_x, leaf.grad)


@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_have_the_gradient_of_autograd(has_norms: bool) -> None:
    torch.manual_seed(0)
    qkv, angles = torch.randn(6, 40), torch.randn(6, 1, 4)
    rotation = (angles.cos(), angles.sin())
    norms = (torch.randn(8), torch.randn(8)) if has_norms else None
    grads = (torch.randn(6, 3, 8), torch.randn(6, 1, 8), torch.randn(6, 1, 8))
    leaf = qkv.double().requires_grad_()
    wide_norms = None if norms is None else (norms[0].double(), norms[1].double())
    expected = plain_heads(leaf, wide_norms, *(part.double() for part in rotation))
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert leaf.grad is not None
    for part, wanted in zip(
        pointwise.apply_rope(qkv, norms, rotation, 1, EPS), expected, strict=True
    ):
        assert_close(part, wanted.detach())
    assert_close(pointwise.apply_rope_backward(grads, qkv, norms, rotation, EPS), leaf.grad)
