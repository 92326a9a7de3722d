"""The adapters' part of a linear layer on CUDA: every run of a batch in the same few launches.

Adapters of one layout make a group, in which each run of rows has a number. `kernels.low_rank`
computes with all of them at once without mixing rows of two, reads every adapter where it lies and
adds to its gradient there: with experts a copy of eight would be as large as a quarter of the base
model. `adapted_linear` does the same in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.local.kernels import low_rank
from tinsmith.engine.local.kernels.low_rank import Columns, Rows, Vectors
from tinsmith.engine.local.model.experts.routing import TokenAdapters
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments, GradientBuffer, Layout
from tinsmith.engine.local.model.transfers import to_device

_Key = tuple[int | None, str]


def add_forward(
    y: Tensor, x: Tensor, adapters: AdapterSegments, key: _Key, residual: Tensor | None
) -> list[Tensor]:
    """Add the adapters' part and `residual` to y, in place; scale · x Aᵀ for each group."""
    groups = groups_of(adapters, key)
    # One launch does both where its rows are all there are.
    is_joined = len(groups) == 1 and groups[0].num_rows == len(y)
    inners = inner_products(x, adapters, key)
    for group, inner in zip(groups, inners, strict=True):
        columns, joining = group.columns(key), residual if is_joined else None
        low_rank.expand_by_b(inner, group.weights, group.rows, columns, y, joining)
    if residual is not None and not is_joined:
        y.add_(residual)
    return inners


def inner_products(x: Tensor, adapters: AdapterSegments, key: _Key) -> list[Tensor]:
    """scale · x Aᵀ for each group; rows of other groups hold nothing of meaning."""
    return [
        low_rank.shrink_by_a(x, group.weights, group.rows, group.columns(key), group.scale)
        for group in groups_of(adapters, key)
    ]


def add_backward_input(
    grad: Tensor, grad_x: Tensor | None, adapters: AdapterSegments, key: _Key
) -> list[Tensor]:
    """Add the adapters' part to grad_x, where there is one; the gradients of x Aᵀ."""
    found = []
    for group in groups_of(adapters, key):
        columns = group.columns(key)
        inner_grad = low_rank.shrink_by_b(grad, group.weights, group.rows, columns, group.scale)
        if grad_x is not None:
            low_rank.expand_by_a(inner_grad, group.weights, group.rows, columns, grad_x)
        found.append(inner_grad)
    return found


def add_backward_adapters(
    grad: Tensor,
    x: Tensor,
    inners: Sequence[Tensor],
    inner_grads: Sequence[Tensor],
    adapters: AdapterSegments,
    key: _Key,
) -> None:
    """Add the gradients of A and B to the runs' buffers."""
    groups = groups_of(adapters, key)
    for group, inner, inner_grad in zip(groups, inners, inner_grads, strict=True):
        if group.has_gradients:
            columns = group.columns(key)
            low_rank.add_gradient_of_a(inner_grad, x, group.grads, group.rows, columns)
            low_rank.add_gradient_of_b(inner, grad, group.grads, group.rows, columns)


@dataclass(frozen=True)
class Members:
    """The adapters of one layout in a batch, and their buffers, each of one run alone."""

    layout: Layout
    scale: float
    device: torch.device
    weights: Vectors
    """In the base model's dtype."""
    grads: Vectors
    """Those of runs without a gradient have no address."""
    has_gradients: bool
    kept: tuple[Tensor | None, ...] = ()
    """What lies there, so that addresses stay good."""

    @classmethod
    def of(cls, adapters: Sequence[Adapter], buffers: Sequence[GradientBuffer | None]) -> Members:
        device = adapters[0].flat.device
        rounded = [adapter.rounded() for adapter in adapters]
        grads = [None if buffer is None else buffer.flat for buffer in buffers]
        return cls(
            adapters[0].layout,
            adapters[0].scale,
            device,
            low_rank.vectors_at(rounded, device),
            low_rank.vectors_at(grads, device),
            any(grad is not None for grad in grads),
            (*rounded, *grads),
        )

    @functools.cached_property
    def facts(self) -> Tensor:
        """(adapters, 2) float32: rank and scale."""
        facts = torch.tensor([[float(self.layout.rank), self.scale]] * len(self.weights.addresses))
        return facts.to(self.device)


class GivenRows(NamedTuple):
    """Which rows have which adapter, in tables that may say something else when they are read."""

    blocks: Rows
    runs: Tensor
    """(3, R) int64: first rows, rows behind the last, adapters' numbers."""
    of_tokens: Tensor
    """(N,) int64: the number of each row's adapter, negative for none."""


class Group:
    """The runs of some rows whose adapters have one layout."""

    def __init__(
        self,
        members: Members,
        runs: Sequence[tuple[int, int, int]],
        batch_rows: int,
        given: GivenRows | None = None,
    ) -> None:
        """`runs` are (start, stop, number of the adapter) of `batch_rows` rows. What is `given`
        says so in their place."""
        self._members = members
        self._given = given
        self._runs = tuple(runs)
        self._batch_rows = batch_rows
        self.num_rows = sum(stop - start for start, stop, _ in runs)
        self.layout: Layout = members.layout
        self.scale = members.scale
        self.has_gradients = members.has_gradients

    @property
    def weights(self) -> Vectors:
        return self._members.weights

    @property
    def grads(self) -> Vectors:
        return self._members.grads

    @property
    def facts(self) -> Tensor:
        """(adapters, 2) float32: rank and scale."""
        return self._members.facts

    @functools.cached_property
    def rows(self) -> Rows:
        if self._given is not None:
            return self._given.blocks
        may_split = not torch.are_deterministic_algorithms_enabled()
        return low_rank.divide_rows(self._runs, self._members.device, may_split)

    def columns(self, key: _Key) -> Columns:
        tables = self.layout.tables
        if key not in tables:
            place, device = self.layout.places[key], self._members.device
            rank, projection = self.layout.rank, place.projection
            inputs, outputs = projection.inputs, projection.outputs
            # Of experts the shared factor: where each has an A, B is behind the last of these.
            num_a = 1 if projection.experts is None else projection.experts.a
            offset = place.offset + (num_a - 1) * rank * len(outputs) * inputs
            tables[key] = low_rank.divide_columns(offset, rank, inputs, outputs, device)
        return tables[key]

    @functools.cached_property
    def runs_on_device(self) -> Tensor:
        """(3, R) int64: first rows, rows behind the last, adapters' numbers."""
        if self._given is not None:
            return self._given.runs
        return to_device(torch.tensor(self._runs).t().contiguous(), self._members.device)

    @functools.cached_property
    def token_adapters(self) -> TokenAdapters:
        """The number of each row's adapter, negative for none."""
        if self._given is not None:
            return TokenAdapters(self._given.of_tokens, 2 * self._given.runs.shape[1] + 1)
        numbers = torch.full((self._batch_rows,), -1)
        for start, stop, number in self._runs:
            numbers[start:stop] = number
        return TokenAdapters(to_device(numbers, self._members.device), 2 * len(self._runs) + 1)

    def on_rows(self, runs: Sequence[tuple[int, int, int]], batch_rows: int) -> Group:
        return Group(self._members, runs, batch_rows)


def groups_of(adapters: AdapterSegments, key: _Key) -> list[Group]:
    """The groups whose adapters change this projection; worked out once for a batch."""
    if adapters.groups is None:
        adapters.groups = _all_groups(adapters)
    return [group for group in adapters.groups if key in group.layout.places]


def _all_groups(adapters: AdapterSegments) -> list[Group]:
    root = adapters.root
    if adapters is not root and root.groups is None:
        root.groups = _all_groups(root)
    numbers: dict[int, tuple[Layout, int]] = {}
    members: dict[Layout, list[int]] = {}
    for index, (_, _, adapter) in enumerate(root.runs):
        if adapter is not None:
            same = members.setdefault(adapter.layout, [])
            numbers[index] = (adapter.layout, len(same))
            same.append(index)
    runs: dict[Layout, list[tuple[int, int, int]]] = {}
    for (start, stop, adapter), origin in zip(adapters.runs, adapters.origins, strict=True):
        if adapter is not None:
            layout, number = numbers[origin]
            runs.setdefault(layout, []).append((start, stop, number))
    if adapters is not root:
        of_root = {group.layout: group for group in root.groups or ()}
        return [of_root[layout].on_rows(own, adapters.num_rows) for layout, own in runs.items()]
    all_members = {
        layout: Members.of(
            [adapter for i in same if (adapter := root.runs[i][2]) is not None],
            [root.gradients[i] for i in same],
        )
        for layout, same in members.items()
    }
    return [Group(all_members[layout], own, adapters.num_rows) for layout, own in runs.items()]
