"""Linear layers under adapters: the product of a packed batch, and its gradients.

Autograd never sees adapter weights. The backward pass works out their gradients by hand and
adds them to the float32 buffers that the caller put beside each run of rows, so that there
is no graph over adapters, no copy of their gradients, and nothing kept but the layer's input and
its product with A. It comes in two steps, because the input need not have been kept either: the
caller may compute it again between them.

On CUDA `grouped_linear` computes the adapters' part of all runs together. Elsewhere runs are
computed one after another, but for short ones while sampling (`stacked_adapters`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.cpu import tiles
from tinsmith.engine.local.model.linear import Linear, add_product, plain_product, put_product
from tinsmith.engine.local.model.lora import ActiveRun, AdapterSegments, LowRank
from tinsmith.engine.local.ranks.group import ALONE, Ranks

_Key = tuple[int | None, str]

Inner = list[Tensor]
"""scale · x Aᵀ for some runs each, or its gradient: (rows, modules · rank)."""


def forward(
    x: Tensor,
    linear: Linear,
    adapters: AdapterSegments,
    key: _Key,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Inner]:
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ + residual, each run of rows with its own A and B.

    x is (N, inputs); the answer (N, sum of the modules' outputs), and what the backward pass
    needs of the adapters. Adapters that do not train this projection leave their rows as the
    frozen weights make them. It is in the dtype of the residual or in `dtype`: where that is
    float32 beside half precision, which takes kernels, nothing is rounded on the way.
    """
    y = linear.product(x, dtype if residual is None else residual.dtype)
    if kernels.are_usable(x):
        return y, _grouped().add_forward(y, x, adapters, key, residual)
    if residual is not None:
        y.add_(residual)
    runs = adapters.active(*key)
    if (stacked := adapters.stacked) is not None:
        stacked.add_products(y, x, key)
        runs = [run for run in runs if run[2] not in stacked.adapters]
    return y, _add_forward(y, x, runs, key, linear.is_invariant)


def backward_input(
    grad: Tensor, linear: Linear, adapters: AdapterSegments, key: _Key, needs_input: bool = True
) -> tuple[Tensor | None, Inner]:
    """The gradient for x, where it is needed; and those of x Aᵀ, for `backward_adapters`."""
    grad_x = linear.product_back(grad) if needs_input else None
    if kernels.are_usable(grad):
        return grad_x, _grouped().add_backward_input(grad.contiguous(), grad_x, adapters, key)
    return grad_x, _add_backward_input(grad, grad_x, adapters.active(*key), key)


def backward_adapters(
    grad: Tensor,
    x: Tensor,
    inners: Inner,
    inner_grads: Inner,
    adapters: AdapterSegments,
    key: _Key,
) -> None:
    """Add the gradients of A and B to the runs' buffers."""
    if kernels.are_usable(grad):
        grad = grad.contiguous()
        _grouped().add_backward_adapters(grad, x, inners, inner_grads, adapters, key)
        return
    runs = adapters.active(*key)
    for (start, stop, _, buffer), inner, inner_grad in zip(runs, inners, inner_grads, strict=True):
        if buffer is not None:
            _add_gradients(buffer.views[key], x[start:stop], inner, grad[start:stop], inner_grad)


def lora_linear(
    x: Tensor,
    linear: Linear,
    adapters: AdapterSegments,
    layer: int | None,
    name: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`forward` as autograd sees it: an operation on x alone."""
    key = (layer, name)
    if not torch.is_grad_enabled():
        return forward(x, linear, adapters, key, dtype=dtype)[0]
    # Empty, and only there to make autograd call `backward` when x needs no gradient itself.
    has_gradients = any(buffer is not None for buffer in adapters.gradients)
    anchor = x.new_empty(0).requires_grad_(has_gradients)
    return _LoraLinear.apply(x, anchor, linear, adapters, key, dtype)


def lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    linear: Linear,
    adapters: AdapterSegments,
    layer: int | None,
    name: str,
    ranks: Ranks = ALONE,
) -> Tensor:
    """The gradient of `lora_linear` for x, by hand; those of A and B go to the runs' buffers.

    `ranks` are those among which the outputs are divided.

    x Aᵀ is computed again rather than kept: that costs rank / outputs of the product.
    """
    key = (layer, name)
    grad_x, inner_grads = backward_input(grad, linear, adapters, key)
    assert grad_x is not None, "the gradient for x is always asked for here"
    ranks.sum_(grad_x, *inner_grads)
    if kernels.are_usable(x):
        inners = _grouped().inner_products(x, adapters, key)
    else:
        is_invariant = linear.is_invariant
        inners = [_inner(run, x, key, is_invariant) for run in adapters.active(*key)]
    backward_adapters(grad, x, inners, inner_grads, adapters, key)
    return grad_x


class _LoraLinear(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, x, anchor, linear, adapters, key, dtype):  # type: ignore[no-untyped-def]
        y, inners = forward(x, linear, adapters, key, dtype=dtype)
        ctx.save_for_backward(x, *inners)
        ctx.linear, ctx.adapters, ctx.key = linear, adapters, key
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, *inners = ctx.saved_tensors
        grad = grad.to(x.dtype)
        needs_input = ctx.needs_input_grad[0]
        grad_x, inner_grads = backward_input(grad, ctx.linear, ctx.adapters, ctx.key, needs_input)
        backward_adapters(grad, x, inners, inner_grads, ctx.adapters, ctx.key)
        return grad_x, None, None, None, None, None


@functools.cache
def _grouped() -> ModuleType:
    """The same with kernels; not to be imported where there is no Triton."""
    return importlib.import_module("tinsmith.engine.local.model.grouped_linear")


def _add_forward(
    y: Tensor, x: Tensor, runs: Sequence[ActiveRun], key: _Key, is_invariant: bool
) -> Inner:
    """Add the adapters' part to y, in place; the products with A."""
    inners = []
    for run in runs:
        start, stop, adapter, _ = run
        inner = _inner(run, x, key, is_invariant)
        left = 0
        b = adapter.weights()[key].b
        for inner_of, b_of in zip(inner.split(adapter.rank, dim=1), b, strict=True):
            right = left + len(b_of)
            if is_invariant:
                y[start:stop, left:right] += tiles.product(inner_of, b_of)
            else:
                add_product(y[start:stop, left:right], inner_of, b_of.t())
            left = right
        inners.append(inner)
    return inners


def _inner(run: ActiveRun, x: Tensor, key: _Key, is_invariant: bool) -> Tensor:
    start, stop, adapter, _ = run
    a = adapter.weights()[key].a
    multiply = tiles.product if is_invariant else plain_product
    inner = multiply(x[start:stop], a)
    return inner.mul_(adapter.scale)


def _add_backward_input(
    grad: Tensor, grad_x: Tensor | None, runs: Sequence[ActiveRun], key: _Key
) -> Inner:
    """Add the adapters' part to grad_x, where wanted; the gradients of the products with A."""
    found = []
    for start, stop, adapter, _ in runs:
        a, b = adapter.weights()[key]
        grads = grad[start:stop].split([len(b_of) for b_of in b], dim=1)
        inner_grad = grads[0].new_empty(len(grads[0]), len(a))
        places = inner_grad.split(adapter.rank, dim=1)
        for place, g, b_of in zip(places, grads, b, strict=True):
            put_product(place, g, b_of)
        inner_grad.mul_(adapter.scale)
        if grad_x is not None:
            add_product(grad_x[start:stop], inner_grad, a)
        found.append(inner_grad)
    return found


def _add_gradients(
    into: LowRank, x: Tensor, inner: Tensor, grad: Tensor, inner_grad: Tensor
) -> None:
    """dA += (grad of x Aᵀ)ᵀ x and, module by module, dB += gradᵀ (scale · x Aᵀ)."""
    add_product(into.a, inner_grad.t(), x)
    grads = grad.split([len(b_of) for b_of in into.b], dim=1)
    inners = inner.chunk(len(into.b), dim=1)
    for into_b, g, inner_of in zip(into.b, grads, inners, strict=True):
        add_product(into_b, g.t(), inner_of)
