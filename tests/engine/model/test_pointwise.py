"""Norm, heads and gate by hand: the gradients of autograd on the formulas written out.

In float64 autograd, float32 ours; relative tolerance 1e-5.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model import pointwise
from tinsmith.engine.local.model.experts.clamped_swiglu import ClampedSwiglu
from tinsmith.engine.local.model.pointwise import Activation
from tinsmith.engine.local.model.rope import Rotation

EPS = 1e-5


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


def plain_gate(x: Tensor, activation: Activation) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiglu):
        left = left.clamp(max=activation.limit)
        right = right.clamp(-activation.limit, activation.limit)
        return (right + 1) * left * torch.sigmoid(activation.alpha * left)
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


def test_the_norm_of_a_float32_stream_is_what_products_in_half_precision_read() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 12), torch.randn(12).bfloat16()
    grad, residual = torch.randn(2, 6, 12).bfloat16()
    arguments = (grad, x, weight, EPS, residual)
    expected = pointwise.rms_norm(x, weight.float(), EPS)
    wanted, _ = pointwise.rms_norm_backward(grad.float(), x, weight.float(), EPS, residual.float())
    grad_x, y = pointwise.rms_norm_backward(*arguments)
    assert torch.equal(pointwise.rms_norm(x, weight, EPS, torch.bfloat16), expected.bfloat16())
    assert torch.equal(y, expected.bfloat16())
    assert torch.equal(grad_x, wanted.bfloat16())
    grad_x, _ = pointwise.rms_norm_backward(*arguments, torch.float32)
    assert_close(grad_x, wanted)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiglu(1.702, 0.7)])
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


def test_a_gated_norm_has_the_gradient_of_autograd() -> None:
    torch.manual_seed(0)
    y, gate, grad = torch.randn(3, 5, 24)
    weight = torch.randn(8)
    leaves = [x.double().requires_grad_() for x in (y, gate)]
    heads, gates = (x.view(5, 3, 8) for x in leaves)
    normed = F.rms_norm(heads, (8,), weight.double(), EPS)
    expected = (normed * F.silu(gates)).flatten(1)
    expected.backward(grad.double())
    grad_y, grad_gate, out = pointwise.gated_norm_backward(grad, y, gate, weight, EPS)
    assert_close(pointwise.gated_norm(y, gate, weight, EPS), expected.detach())
    assert_close(out, expected.detach())
    for found, leaf in zip((grad_y, grad_gate), leaves, strict=True):
        assert leaf.grad is not None
        assert_close(found, leaf.grad)


def test_the_gate_of_attention_has_the_gradient_of_autograd() -> None:
    """And its numbers, which come by turns with each query head's, are taken out and put back."""
    torch.manual_seed(0)
    x, gate, grad = torch.randn(3, 5, 24)
    leaves = [part.double().requires_grad_() for part in (x, gate)]
    expected = leaves[0] * leaves[1].sigmoid()
    expected.backward(grad.double())
    *found, out = pointwise.gate_backward(grad, x, gate)
    assert_close(out, expected.detach())
    for part, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        assert_close(part, leaf.grad)
    whole = torch.randn(5, 3 * 2 * 8 + 16)
    qkv, gates = pointwise.split_gate(whole, 3, 8)
    assert torch.equal(qkv[:, 8:16], whole[:, 16:24])
    assert torch.equal(gates[:, 1], whole[:, 24:32])
    assert torch.equal(pointwise.join_gate(qkv, gates.flatten(1), 8), whole)


@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_have_the_gradient_of_autograd(has_norms: bool) -> None:
    torch.manual_seed(0)
    qkv, angles = torch.randn(6, 40), torch.randn(6, 1, 4)
    rotation = Rotation(angles.cos(), angles.sin(), 4)
    norms = (torch.randn(8), torch.randn(8)) if has_norms else None
    grads = (torch.randn(6, 3, 8), torch.randn(6, 1, 8), torch.randn(6, 1, 8))
    leaf = qkv.double().requires_grad_()
    wide_norms = None if norms is None else (norms[0].double(), norms[1].double())
    expected = plain_heads(leaf, wide_norms, rotation.cos.double(), rotation.sin.double())
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert leaf.grad is not None
    for part, wanted in zip(
        pointwise.apply_rope(qkv, norms, rotation, 1, EPS), expected, strict=True
    ):
        assert_close(part, wanted.detach())
    assert_close(pointwise.apply_rope_backward(grads, qkv, norms, rotation, EPS), leaf.grad)
