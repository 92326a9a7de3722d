"""One product of a layer of experts: each row by its expert's weight, under its adapter.

A router gives each token to k of E experts. The rows that this makes are sorted by expert; the
sort is stable, so that within an expert the rows of one adapter lie together. As in
`adapted_linear`, autograd does not see adapters: their gradients are worked out by hand and added
to the runs' buffers.

Shapes: T tokens, k experts of each, S = k · T rows, E experts, n modules of a projection.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.adapted_linear import add_product
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments, GradientBuffer
from tinsmith.engine.local.ranks.group import ALONE, Ranks

_Key = tuple[int | None, str]

Stops = list[int]
"""For each expert, the row behind its last."""


class Routing:
    """Which rows go to which expert: every choice of every token, sorted by expert."""

    def __init__(self, choices: Tensor, num_experts: int) -> None:
        """`choices` (T, k) are the experts of each token."""
        num_tokens, per_token = choices.shape
        chosen, self.order = choices.flatten().sort(stable=True)
        self.experts = chosen
        """(S,) The expert of each row."""

        self.tokens = self.order // per_token
        """(S,) The token of each row."""

        self._num_tokens = num_tokens
        self._num_experts = num_experts
        # Rows are in the order of expert and then token, so this rises.
        self._places = (chosen * num_tokens + self.tokens).cpu().numpy()
        self.stops: Stops = self._first_rows(num_tokens).tolist()

    def restored(self, rows: Tensor) -> Tensor:
        """(S, …) in the order of tokens and their choices."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        return rows.index_select(0, inverse)

    def rows_of(self, start: int, stop: int) -> tuple[Tensor | None, Stops]:
        """The rows of tokens `start` to `stop`, None where these are all; and where each expert's
        end among them."""
        if (start, stop) == (0, self._num_tokens):
            return None, self.stops
        firsts, ends = self._first_rows(start), self._first_rows(stop)
        parts = [np.arange(*pair) for pair in zip(firsts, ends, strict=True)]
        rows = torch.from_numpy(np.concatenate(parts)).to(self.order.device)
        return rows, np.cumsum(ends - firsts).tolist()

    def _first_rows(self, token: int) -> np.ndarray:
        """(E,) For each expert, its first row of this token or a later one."""
        experts = np.arange(self._num_experts)
        return np.searchsorted(self._places, experts * self._num_tokens + token)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The frozen weights of one projection of all experts."""

    weight: Tensor
    """(E, inputs, outputs of all modules): as it is multiplied."""

    bias: Tensor | None
    """(E, outputs)."""

    columns: tuple[slice, ...]
    """Which outputs are each module's."""


def expert_linear(
    x: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    adapters: AdapterSegments,
    key: _Key,
    *,
    input_ranks: Ranks = ALONE,
    output_ranks: Ranks = ALONE,
) -> Tensor:
    """x W + bias + scale · (x Aᵀ) Bᵀ of x (S, inputs), with the W, A and B of each row's expert.

    Inputs may be divided among some ranks, or outputs: what each has a part of is then summed, the
    product or the gradient for x.
    """
    product = _Product(weights, routing, adapters, key, input_ranks, output_ranks)
    if not torch.is_grad_enabled():
        return product.forward(x)[0]
    # Empty, and only there to make autograd call `backward` when x needs no gradient itself.
    has_gradients = any(buffer is not None for buffer in adapters.gradients)
    anchor = x.new_empty(0).requires_grad_(has_gradients)
    return _ExpertLinear.apply(x, anchor, product)


class _ExpertLinear(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, x, anchor, product):  # type: ignore[no-untyped-def]
        y, inners = product.forward(x)
        ctx.save_for_backward(x, *inners)
        ctx.product = product
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, *inners = ctx.saved_tensors
        return ctx.product.backward(grad, x, inners), None, None


@dataclass(frozen=True, slots=True)
class _Run:
    """The rows of one adapter."""

    adapter: Adapter
    buffer: GradientBuffer | None
    rows: Tensor | None
    """None for all of them."""

    stops: Stops

    def take(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x.index_select(0, self.rows)


class _Product:
    """The product of one batch: its rows, and the adapters that they are under."""

    def __init__(
        self,
        weights: ExpertWeights,
        routing: Routing,
        adapters: AdapterSegments,
        key: _Key,
        input_ranks: Ranks,
        output_ranks: Ranks,
    ) -> None:
        self._input_ranks = input_ranks
        self._output_ranks = output_ranks
        self._weights = weights
        self._routing = routing
        self._key = key
        self._runs = [
            _Run(adapter, buffer, *routing.rows_of(start, stop))
            for start, stop, adapter, buffer in adapters.active(*key)
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The product (S, outputs), and scale · x Aᵀ of each run."""
        y = _grouped(x, self._weights.weight, self._routing.stops)
        # Of a sum over ranks, the bias is added by one of them.
        if self._weights.bias is not None and self._input_ranks.index == 0:
            y += self._weights.bias.index_select(0, self._routing.experts)
        inners = []
        for run in self._runs:
            a, b = run.adapter.weights()[self._key]
            inner = _grouped(run.take(x), a.transpose(1, 2), run.stops).mul_(run.adapter.scale)
            parts = [
                _grouped(inner_of, b_of.transpose(1, 2), run.stops)
                for inner_of, b_of in zip(inner.chunk(len(b), dim=1), b, strict=True)
            ]
            _add_rows(y, run.rows, self._joined(parts))
            inners.append(inner)
        self._input_ranks.sum_(y, *inners)
        return y, inners

    def backward(self, grad: Tensor, x: Tensor, inners: Sequence[Tensor]) -> Tensor:
        """The gradient for x (S, inputs); those of A and B go to the runs' buffers."""
        grad_x = _grouped(grad, self._weights.weight.transpose(1, 2), self._routing.stops)
        inner_grads = []
        for run in self._runs:
            a, b = run.adapter.weights()[self._key]
            grads = [run.take(grad[:, columns]) for columns in self._weights.columns]
            inner_grad = torch.cat(
                [_grouped(g, b_of, run.stops) for g, b_of in zip(grads, b, strict=True)], dim=1
            ).mul_(run.adapter.scale)
            _add_rows(grad_x, run.rows, _grouped(inner_grad, a, run.stops))
            inner_grads.append(inner_grad)
        self._output_ranks.sum_(grad_x, *inner_grads)
        for run, inner, inner_grad in zip(self._runs, inners, inner_grads, strict=True):
            if run.buffer is None:
                continue
            into = run.buffer.views[self._key]
            _add_outer(into.a, inner_grad, run.take(x), run.stops)
            parts = zip(into.b, self._weights.columns, inner.chunk(len(into.b), dim=1), strict=True)
            for into_b, columns, inner_of in parts:
                _add_outer(into_b, run.take(grad[:, columns]), inner_of, run.stops)
        return grad_x

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """The modules' outputs beside each other, as the weight has them."""
        if len(parts) == 1:
            return parts[0]
        y = parts[0].new_empty(len(parts[0]), sum(part.shape[1] for part in parts))
        for columns, part in zip(self._weights.columns, parts, strict=True):
            y[:, columns] = part
        return y


def _grouped(x: Tensor, weight: Tensor, stops: Stops) -> Tensor:
    """Rows x (S, inputs) by the matrix of their expert in (E, inputs, outputs); of one, by it."""
    if len(weight) == 1:
        return x @ weight[0]
    x = x.contiguous()
    if _can_group(x, weight):
        return F.grouped_mm(x, weight, offs=torch.tensor(stops, dtype=torch.int32, device=x.device))
    y = x.new_empty(len(x), weight.shape[2])
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *stops])):
        if stop > start:
            torch.mm(x[start:stop], weight[expert], out=y[start:stop])
    return y


def _can_group(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has one call for it: new ones do, where every row begins at 16 bytes."""
    sizes = (x.data_ptr(), weight.data_ptr(), *(n * x.itemsize for n in weight.shape[1:]))
    return hasattr(F, "grouped_mm") and len(x) > 0 and all(size % 16 == 0 for size in sizes)


def _add_rows(y: Tensor, rows: Tensor | None, part: Tensor) -> None:
    if rows is None:
        y += part
    else:
        y.index_add_(0, rows, part)


def _add_outer(into: Tensor, left: Tensor, right: Tensor, stops: Stops) -> None:
    """into (1 or E, p, q) += leftᵀ right of each expert's rows of (S, p) and (S, q)."""
    if len(into) == 1:
        add_product(into[0], left.t(), right)
        return
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *stops])):
        if stop > start:
            add_product(into[expert], left[start:stop].t(), right[start:stop])
