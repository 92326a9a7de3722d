"""The adapters' part of a linear layer on CUDA: every run of a batch in the same few launches.

Adapters of one layout make a group. Their vectors are stacked once for a batch, each run of rows
has a number in the stack, and `kernels.low_rank` computes with all of them at once without mixing
rows of two. `adapted_linear` does the same in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.engine.local.kernels import low_rank
from tinsmith.engine.local.kernels.low_rank import Columns, Rows
from tinsmith.engine.local.model.experts.routing import TokenAdapters
from tinsmith.engine.local.model.lora import Adapter, AdapterSegments, GradientBuffer, Layout

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
        low_rank.expand_by_b(inner, group.stack, group.rows, columns, y, joining)
    if residual is not None and not is_joined:
        y.add_(residual)
    return inners


def inner_products(x: Tensor, adapters: AdapterSegments, key: _Key) -> list[Tensor]:
    """scale · x Aᵀ for each group; rows of other groups hold nothing of meaning."""
    return [
        low_rank.shrink_by_a(x, group.stack, group.rows, group.columns(key), group.scale)
        for group in groups_of(adapters, key)
    ]


def add_backward_input(
    grad: Tensor, grad_x: Tensor | None, adapters: AdapterSegments, key: _Key
) -> list[Tensor]:
    """Add the adapters' part to grad_x, where there is one; the gradients of x Aᵀ."""
    found = []
    for group in groups_of(adapters, key):
        columns = group.columns(key)
        inner_grad = low_rank.shrink_by_b(grad, group.stack, group.rows, columns, group.scale)
        if grad_x is not None:
            low_rank.expand_by_a(inner_grad, group.stack, group.rows, columns, grad_x)
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
    """Add the gradients of A and B to the groups' own, or for a run alone to its buffer."""
    groups = groups_of(adapters, key)
    for group, inner, inner_grad in zip(groups, inners, inner_grads, strict=True):
        if group.has_gradients:
            columns = group.columns(key)
            low_rank.add_gradient_of_a(inner_grad, x, group.grads, group.rows, columns)
            low_rank.add_gradient_of_b(inner, grad, group.grads, group.rows, columns)


def finish_gradients(adapters: AdapterSegments) -> None:
    """Pass on the groups' gradients to the runs' buffers."""
    for group in adapters.root.groups or ():
        group.finish_gradients()


class _Stack:
    """The adapters of one layout in a batch: their vectors, and where gradients are gathered."""

    def __init__(
        self, adapters: Sequence[Adapter], buffers: Sequence[GradientBuffer | None]
    ) -> None:
        self._adapters = tuple(adapters)
        self._buffers = tuple(buffers)
        self.layout = adapters[0].layout
        self.scale = adapters[0].scale
        self.has_gradients = any(buffer is not None for buffer in buffers)

    @functools.cached_property
    def weights(self) -> Tensor:
        """(adapters, P) in the base model's dtype."""
        if len(self._adapters) == 1:
            return self._adapters[0].rounded().unsqueeze(0)
        return torch.stack([adapter.rounded() for adapter in self._adapters])

    @functools.cached_property
    def grads(self) -> Tensor:
        """(adapters, P) float32; for a run alone, its buffer itself."""
        (first, *others) = self._buffers
        if first is not None and not others:
            return first.flat.unsqueeze(0)
        flat = self._adapters[0].flat
        return flat.new_zeros(len(self._buffers), len(flat))

    def finish_gradients(self) -> None:
        if len(self._buffers) > 1 and "grads" in self.__dict__:
            for buffer, grad in zip(self._buffers, self.grads, strict=True):
                if buffer is not None:
                    buffer.flat.add_(grad)
            del self.grads


class Group:
    """The runs of some rows whose adapters are in one stack."""

    def __init__(
        self, stack: _Stack, runs: Sequence[tuple[int, int, int]], batch_rows: int
    ) -> None:
        """`runs` are (start, stop, number of the adapter) of `batch_rows` rows."""
        self._stack = stack
        self._runs = tuple(runs)
        self._batch_rows = batch_rows
        self.num_rows = sum(stop - start for start, stop, _ in runs)
        self.layout: Layout = stack.layout
        self.scale = stack.scale
        self.has_gradients = stack.has_gradients
        self.finish_gradients = stack.finish_gradients

    @property
    def stack(self) -> Tensor:
        return self._stack.weights

    @property
    def grads(self) -> Tensor:
        return self._stack.grads

    @functools.cached_property
    def rows(self) -> Rows:
        may_split = not torch.are_deterministic_algorithms_enabled()
        return low_rank.divide_rows(self._runs, self.stack.device, may_split)

    def columns(self, key: _Key) -> Columns:
        tables = self.layout.tables
        if key not in tables:
            place, device = self.layout.places[key], self.stack.device
            rank, projection = self.layout.rank, place.projection
            inputs, outputs = projection.inputs, projection.outputs
            # Of experts the shared factor: where each has an A, B is behind the last of these.
            num_a = 1 if projection.experts is None else projection.experts.a
            offset = place.offset + (num_a - 1) * rank * len(outputs) * inputs
            tables[key] = low_rank.divide_columns(offset, rank, inputs, outputs, device)
        return tables[key]

    @functools.cached_property
    def addresses(self) -> Tensor:
        """(adapters,) int64: where each adapter's vector lies."""
        numbers = torch.arange(len(self.stack), device=self.stack.device)
        return numbers * (self.stack.stride(0) * self.stack.itemsize) + self.stack.data_ptr()

    @functools.cached_property
    def facts(self) -> Tensor:
        """(adapters, 2) float32: rank and scale."""
        facts = torch.empty(len(self.stack), 2, device=self.stack.device)
        facts[:, 0] = self.layout.rank
        facts[:, 1] = self.scale
        return facts

    @functools.cached_property
    def runs_on_device(self) -> Tensor:
        """(3, R) int64: first rows, rows behind the last, adapters' numbers."""
        return torch.tensor(self._runs).t().contiguous().to(self.stack.device)

    @functools.cached_property
    def token_adapters(self) -> TokenAdapters:
        """The number of each row's adapter, negative for none."""
        numbers = torch.full((self._batch_rows,), -1)
        for start, stop, number in self._runs:
            numbers[start:stop] = number
        return TokenAdapters(numbers.to(self.stack.device), 2 * len(self._runs) + 1)

    def on_rows(self, runs: Sequence[tuple[int, int, int]], batch_rows: int) -> Group:
        return Group(self._stack, runs, batch_rows)


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
    stacks = {
        layout: _Stack(
            [adapter for i in same if (adapter := root.runs[i][2]) is not None],
            [root.gradients[i] for i in same],
        )
        for layout, same in members.items()
    }
    return [Group(stacks[layout], own, adapters.num_rows) for layout, own in runs.items()]
