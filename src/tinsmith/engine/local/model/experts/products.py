"""The products of a layer of experts under adapters, forward and backward, by hand.

As in `adapted_linear`, autograd does not see adapters: their gradients are worked out here and
added to the runs' buffers. `Up` takes tokens to rows sorted by expert, `Down` rows back to tokens,
weighed by the router's shares.

Inner columns may be divided among some ranks: what each has a part of is then summed.

Shapes: T tokens, k experts of each, S = k · T rows, d hidden size, n modules of a projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.experts.factors import Key, factors
from tinsmith.engine.local.model.experts.routing import Routing
from tinsmith.engine.local.model.experts.weights import ExpertWeights
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.ranks.group import ALONE, Ranks


class Batch(NamedTuple):
    """What the products of one layer have in common."""

    routing: Routing
    adapters: AdapterSegments
    ranks: Ranks = ALONE


class Up:
    """x W + bias + scale · (x Aᵀ) Bᵀ, with the W and B of each row's expert and one A."""

    def __init__(self, x: Tensor, weights: ExpertWeights, batch: Batch, key: Key) -> None:
        self._weights = weights
        self._routing, adapters, self._ranks = batch
        columns = weights.columns
        self._a, self._b = factors(x, adapters, key, "a", self._routing, columns)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(S, outputs) of x (T, d); and scale · x Aᵀ, (T, n · rank) each."""
        routing = self._routing
        y = self._weights.product(routing.expanded(x), routing)
        self._weights.add_biases(y, routing)
        inners = self._a.shrink(x)
        self._b.expand(y, [routing.expanded(inner) for inner in inners])
        return y, inners

    def backward(self, grad: Tensor, x: Tensor, inners: list[Tensor]) -> Tensor:
        """The gradient for x, from that (S, outputs) of the rows."""
        routing = self._routing
        grad_x = routing.sums(self._weights.product(grad, routing, back=True))
        inner_grads = [routing.sums(rows) for rows in self._b.shrink(grad)]
        self._a.expand(grad_x, inner_grads)
        self._ranks.sum_(grad_x, *inner_grads)
        self._a.add_gradients(x, inner_grads)
        self._b.add_gradients(grad, [routing.expanded(inner) for inner in inners])
        return grad_x


class Down:
    """The sum by shares of x W + bias + scale · (x Aᵀ) Bᵀ, with each row's W and A and one B."""

    def __init__(self, x: Tensor, weights: ExpertWeights, batch: Batch, key: Key) -> None:
        self._weights = weights
        self._routing, adapters, self._ranks = batch
        columns = weights.columns
        self._b, self._a = factors(x, adapters, key, "b", self._routing, columns)

    def forward(
        self, x: Tensor, shares: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """(T, d) of rows x (S, inner) and shares (T, k), where asked in float32; and scale · x Aᵀ,
        summed by shares."""
        routing = self._routing
        rows = self._weights.product(x, routing)
        y = routing.weighed_sums(rows, shares, dtype)
        # Biases are added to sums, which are fewer than rows; of a sum over ranks, by one of them.
        if self._weights.bias is not None and self._ranks.index == 0:
            y.addmm_(routing.by_expert(shares).to(y.dtype), self._weights.bias.to(y.dtype))
        inners = [routing.weighed_sums(inner, shares) for inner in self._a.shrink(x)]
        self._b.expand(y, inners)
        self._ranks.sum_(y, *inners)
        return y, inners

    def backward(
        self, grad: Tensor, x: Tensor, shares: Tensor, inners: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The gradients for x and for the shares, the latter in float32."""
        routing = self._routing
        expanded = routing.expanded(grad)
        of_rows = routing.of_choices(shares).to(x.dtype)
        grad_x = self._weights.product(expanded, routing, back=True)
        inner_grads = self._b.shrink(grad)
        narrow = [routing.expanded(inner_grad) for inner_grad in inner_grads]
        self._a.expand(grad_x, narrow)
        # A share's gradient is the row's product with that of the sum: by the inner columns, which
        # are fewer, and which a rank may have a part of.
        along = _weigh(grad_x, x, of_rows)
        self._ranks.sum_(along)
        grad_shares = routing.restored(along)
        if self._weights.bias is not None:
            of_biases = grad @ self._weights.bias.t()
            grad_shares = grad_shares + of_biases.gather(1, routing.choices)
        self._a.add_gradients(x, [low * of_rows[:, None] for low in narrow])
        self._b.add_gradients(grad, inners)
        return grad_x, grad_shares


def _weigh(rows: Tensor, x: Tensor, shares: Tensor) -> Tensor:
    """Multiply rows (S, n) by shares (S,), in place; before that (S,) `_dots(rows, x)`."""
    if kernels.are_usable(rows):
        along: Tensor = kernels.module("routing").weigh(rows, x, shares)
        return along
    along = _dots(rows, x)
    rows *= shares[:, None]
    return along


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """(S,) float32: the product of each row of x with that of y."""
    return (x * y).sum(dim=1, dtype=torch.float32)
