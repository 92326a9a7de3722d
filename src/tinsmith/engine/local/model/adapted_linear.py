"""Linear layers under adapters: the product of a packed batch, and its gradients.

Autograd never sees adapter weights. The backward pass works out their gradients by hand and
adds them to the float32 buffers that the caller put beside each run of rows, so that there
is no graph over adapters, no copy of their gradients, and nothing kept but the layer's input and
its product with A. It comes in two steps, because the input need not have been kept either: the
caller may compute it again between them.

On CUDA `grouped_linear` computes the adapters' part. Elsewhere runs are computed one after
another. Where there is CUDA without Triton that would be bound by the number of small
products, so neighbouring runs are computed as one: their A side by side, a mask that leaves to
each row the columns of its own adapter, and their B side by side.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import ActiveRun, AdapterSegments, LowRank

_MAX_BUNDLED_RANK = 512
"""Ranks added up beyond which the columns that the mask throws away cost more than launches."""

_Key = tuple[int | None, str]

Inner = list[Tensor]
"""scale · x Aᵀ for some runs each, or its gradient: (rows, modules · rank)."""


def forward(
    x: Tensor,
    linear: Linear,
    adapters: AdapterSegments,
    key: _Key,
    residual: Tensor | None = None,
) -> tuple[Tensor, Inner]:
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ + residual, each run of rows with its own A and B.

    x is (N, inputs); the answer (N, sum of the modules' outputs), and what the backward pass
    needs of the adapters. Adapters that do not train this projection leave their rows as the
    frozen weights make them.
    """
    y = linear.product(x)
    if kernels.are_usable(x):
        return y, _grouped().add_forward(y, x, adapters, key, residual)
    if residual is not None:
        y.add_(residual)
    return y, _add_forward(y, x, _bundles(adapters, key), key)


def backward_input(
    grad: Tensor, linear: Linear, adapters: AdapterSegments, key: _Key, needs_input: bool = True
) -> tuple[Tensor | None, Inner]:
    """The gradient for x, where it is needed; and those of x Aᵀ, for `backward_adapters`."""
    grad_x = linear.product_back(grad) if needs_input else None
    if kernels.are_usable(grad):
        return grad_x, _grouped().add_backward_input(grad.contiguous(), grad_x, adapters, key)
    return grad_x, _add_backward_input(grad, grad_x, _bundles(adapters, key), key)


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
    bundles = _bundles(adapters, key)
    for bundle, inner, inner_grad in zip(bundles, inners, inner_grads, strict=True):
        if bundle.has_gradients:
            _add_gradients(bundle, key, x[bundle.rows], inner, grad[bundle.rows], inner_grad)


def lora_linear(
    x: Tensor, linear: Linear, adapters: AdapterSegments, layer: int | None, name: str
) -> Tensor:
    """`forward` as autograd sees it: an operation on x alone."""
    key = (layer, name)
    if not torch.is_grad_enabled():
        return forward(x, linear, adapters, key)[0]
    # Empty, and only there to make autograd call `backward` when x needs no gradient itself.
    has_gradients = any(buffer is not None for buffer in adapters.gradients)
    anchor = x.new_empty(0).requires_grad_(has_gradients)
    return _LoraLinear.apply(x, anchor, linear, adapters, key)


def lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    linear: Linear,
    adapters: AdapterSegments,
    layer: int | None,
    name: str,
) -> Tensor:
    """The gradient of `lora_linear` for x, by hand; those of A and B go to the runs' buffers.

    x Aᵀ is computed again rather than kept: that costs rank / outputs of the product.
    """
    key = (layer, name)
    grad_x, inner_grads = backward_input(grad, linear, adapters, key)
    assert grad_x is not None, "it was asked for"
    if kernels.are_usable(x):
        inners = _grouped().inner_products(x, adapters, key)
    else:
        bundles = _bundles(adapters, key)
        inners = [_inner(bundle, x, bundle.matrices(key)) for bundle in bundles]
    backward_adapters(grad, x, inners, inner_grads, adapters, key)
    return grad_x


class _LoraLinear(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, x, anchor, linear, adapters, key):  # type: ignore[no-untyped-def]
        y, inners = forward(x, linear, adapters, key)
        ctx.save_for_backward(x, *inners)
        ctx.linear, ctx.adapters, ctx.key = linear, adapters, key
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, *inners = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[0]
        grad_x, inner_grads = backward_input(grad, ctx.linear, ctx.adapters, ctx.key, needs_input)
        backward_adapters(grad, x, inners, inner_grads, ctx.adapters, ctx.key)
        return grad_x, None, None, None, None


def finish_gradients(adapters: AdapterSegments) -> None:
    """Pass on what was gathered for several runs to their buffers; due after a backward pass."""
    if adapters.groups is not None:
        _grouped().finish_gradients(adapters)
    for bundles in adapters.bundles.values():
        for bundle in bundles:
            bundle.finish_gradients()


@functools.cache
def _grouped() -> ModuleType:
    """The same with kernels; not to be imported where there is no Triton."""
    return importlib.import_module("tinsmith.engine.local.model.grouped_linear")


class _Bundle:
    """Neighbouring runs that are computed together; on the CPU just one.

    Where adapters have one layout, as they mostly do, their vectors are stacked once and all
    projections read the stack and gather their gradients in another: (runs, P).
    """

    def __init__(self, runs: Sequence[ActiveRun]) -> None:
        self.runs = tuple(runs)
        self.rows = slice(runs[0][0], runs[-1][1])
        self.rank = sum(adapter.rank for _, _, adapter, _ in runs)
        self.has_gradients = any(buffer is not None for *_, buffer in runs)
        self._adapters = [adapter for _, _, adapter, _ in runs]
        self._scale = _scale(runs)
        self._stack: Tensor | None = None
        self._grads: Tensor | None = None
        self._matrices: dict[_Key, LowRank] = {}

    def is_stackable(self, key: _Key) -> bool:
        """Within blocks only: the unembedding is visited in parts, each with new bundles."""
        first = self._adapters[0].layout
        is_alike = all(adapter.layout is first for adapter in self._adapters)
        return len(self.runs) > 1 and key[0] is not None and is_alike

    def matrices(self, key: _Key) -> LowRank:
        """A of all runs below one another, module by module; and for each module B of all runs."""
        if len(self.runs) == 1:
            return self._adapters[0].weights()[key]
        if key not in self._matrices:
            self._matrices[key] = self._gather(key)
        return self._matrices[key]

    def _gather(self, key: _Key) -> LowRank:
        if self.is_stackable(key):
            if self._stack is None:
                self._stack = torch.stack([adapter.rounded() for adapter in self._adapters])
            a, b = self._stacked(key, self._stack)
            return LowRank(
                a.transpose(0, 1).flatten(0, 2),
                tuple(b_of.transpose(0, 1).flatten(1) for b_of in b),
            )
        parts = [adapter.weights()[key] for adapter in self._adapters]
        modules = range(len(parts[0].b))
        split = [part.a.chunk(len(modules)) for part in parts]
        a = torch.cat([blocks[module] for module in modules for blocks in split])
        return LowRank(a, tuple(torch.cat([p.b[m] for p in parts], dim=1) for m in modules))

    def apply_scale(self, inner: Tensor) -> Tensor:
        """`inner` (rows, modules · ranks) scaled in place, others' columns zero."""
        if isinstance(self._scale, float):
            return inner.mul_(self._scale)
        inner.view(len(inner), -1, self.rank).mul_(self._scale)
        return inner

    def add_gradients(self, key: _Key, grad_a: Tensor, grad_b: Sequence[Tensor]) -> None:
        """Gradients of what `matrices` gave, in its order, to where they belong."""
        if self.is_stackable(key):
            if self._grads is None:
                size = self._adapters[0].layout.size
                self._grads = grad_a.new_zeros(len(self.runs), size)
            a, b = self._stacked(key, self._grads)
            num_runs, modules, rank, _ = a.shape
            a.add_(grad_a.view(modules, num_runs, rank, -1).transpose(0, 1))
            for b_of, grad_of in zip(b, grad_b, strict=True):
                b_of.add_(grad_of.view(-1, num_runs, rank).transpose(0, 1))
            return
        column = 0
        by_module = grad_a.view(len(grad_b), self.rank, -1)
        for _, _, adapter, buffer in self.runs:
            own = slice(column, column + adapter.rank)
            column += adapter.rank
            if buffer is not None:
                into = buffer.views[key]
                into.a.view(len(grad_b), adapter.rank, -1).add_(by_module[:, own])
                for into_b, grad_of in zip(into.b, grad_b, strict=True):
                    into_b.add_(grad_of[:, own])

    def finish_gradients(self) -> None:
        if self._grads is not None:
            for (*_, buffer), grad in zip(self.runs, self._grads, strict=True):
                if buffer is not None:
                    buffer.flat.add_(grad)
            self._grads = None

    def _stacked(self, key: _Key, stack: Tensor) -> LowRank:
        """Views of (runs, P): A (runs, modules, rank, inputs), each B (runs, outputs, rank)."""
        layout = self._adapters[0].layout
        place, rank = layout.places[key], layout.rank
        modules, inputs = len(place.projection.modules), place.projection.inputs
        stop = place.offset + modules * rank * inputs
        a = stack[:, place.offset : stop].view(len(stack), modules, rank, inputs)
        b = []
        for outputs in place.projection.outputs:
            start, stop = stop, stop + outputs * rank
            b.append(stack[:, start:stop].view(len(stack), outputs, rank))
        return LowRank(a, tuple(b))


def _bundles(adapters: AdapterSegments, key: _Key) -> list[_Bundle]:
    """Bundles of the runs whose adapter changes this projection; worked out once per batch."""
    if key in adapters.bundles:
        return adapters.bundles[key]
    active = adapters.active(*key)
    # Projections that the same runs change share their bundles.
    pattern = tuple(start for start, *_ in active)
    if pattern not in adapters.bundles:
        groups: list[list[ActiveRun]] = []
        for run in active:
            if groups and adapters.may_bundle and _may_join(groups[-1], run):
                groups[-1].append(run)
            else:
                groups.append([run])
        adapters.bundles[pattern] = [_Bundle(group) for group in groups]
    adapters.bundles[key] = adapters.bundles[pattern]
    return adapters.bundles[key]


def _may_join(group: Sequence[ActiveRun], run: ActiveRun) -> bool:
    """Zero times infinity is not zero: an adapter that is not finite is kept apart."""
    ranks = sum(adapter.rank for _, _, adapter, _ in group) + run[2].rank
    return ranks <= _MAX_BUNDLED_RANK and group[-1][2].is_finite() and run[2].is_finite()


def _scale(runs: Sequence[ActiveRun]) -> float | Tensor:
    """What x Aᵀ is multiplied by: a number, or (rows, 1, ranks) with zero in others' columns."""
    if len(runs) == 1:
        return runs[0][2].scale
    first, last = runs[0][0], runs[-1][1]
    device = runs[0][2].flat.device
    # float32, because 32 / rank is not a half-precision number for every rank.
    scale = torch.zeros(last - first, 1, sum(run[2].rank for run in runs), device=device)
    column = 0
    for start, stop, adapter, _ in runs:
        scale[start - first : stop - first, :, column : column + adapter.rank] = adapter.scale
        column += adapter.rank
    return scale


def _add_forward(y: Tensor, x: Tensor, bundles: Sequence[_Bundle], key: _Key) -> Inner:
    """Add the adapters' part to y, in place; the products with A."""
    inners = []
    for bundle in bundles:
        matrices = bundle.matrices(key)
        inner = _inner(bundle, x, matrices)
        left = 0
        for inner_of, b_of in zip(inner.split(bundle.rank, dim=1), matrices.b, strict=True):
            right = left + len(b_of)
            y[bundle.rows, left:right].addmm_(inner_of, b_of.t())
            left = right
        inners.append(inner)
    return inners


def _inner(bundle: _Bundle, x: Tensor, matrices: LowRank) -> Tensor:
    return bundle.apply_scale(x[bundle.rows] @ matrices.a.t())


def _add_backward_input(
    grad: Tensor, grad_x: Tensor | None, bundles: Sequence[_Bundle], key: _Key
) -> Inner:
    """Add the adapters' part to grad_x, where wanted; the gradients of the products with A."""
    found = []
    for bundle in bundles:
        a, b = bundle.matrices(key)
        grads = grad[bundle.rows].split([len(b_of) for b_of in b], dim=1)
        inner_grad = grads[0].new_empty(len(grads[0]), len(a))
        places = inner_grad.split(bundle.rank, dim=1)
        for place, g, b_of in zip(places, grads, b, strict=True):
            torch.mm(g, b_of, out=place)
        bundle.apply_scale(inner_grad)
        if grad_x is not None:
            grad_x[bundle.rows].addmm_(inner_grad, a)
        found.append(inner_grad)
    return found


def _add_gradients(
    bundle: _Bundle,
    key: _Key,
    x: Tensor,
    inner: Tensor,
    grad: Tensor,
    inner_grad: Tensor,
) -> None:
    grads = grad.split([len(b_of) for b_of in bundle.matrices(key).b], dim=1)
    inners = inner.split(bundle.rank, dim=1)
    if len(bundle.runs) > 1:
        grad_b = [_product(g.t(), inner_of) for g, inner_of in zip(grads, inners, strict=True)]
        bundle.add_gradients(key, _product(inner_grad.t(), x), grad_b)
        return
    (*_, buffer) = bundle.runs[0]
    assert buffer is not None, "the caller asked"
    into = buffer.views[key]
    _add_product(into.a, inner_grad.t(), x)
    for into_b, g, inner_of in zip(into.b, grads, inners, strict=True):
        _add_product(into_b, g.t(), inner_of)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32, whatever the dtype of the two."""
    if left.dtype != torch.float32 and left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == torch.float32:
        into.addmm_(left, right)
    else:
        into.add_(_product(left, right))
