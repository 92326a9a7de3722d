"""Low-rank factors of experts on CUDA: every run of a batch in the same few launches.

As in `grouped_linear`, adapters of one layout make a group; there is one (N, ranks) for each. Rows
of other groups hold nothing of meaning in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.kernels.experts import Matrices, Sorted
from tinsmith.engine.local.model.experts.factors import Factor, Key, Side
from tinsmith.engine.local.model.experts.routing import Routing
from tinsmith.engine.local.model.grouped_linear import Group, groups_of
from tinsmith.engine.local.model.lora import AdapterSegments


def factors(
    adapters: AdapterSegments,
    key: Key,
    shared: Side,
    routing: Routing,
    columns: tuple[slice, ...],
) -> tuple[Factor, Factor]:
    groups = groups_of(adapters, key)
    own: Side = "b" if shared == "a" else "a"
    return _Shared(groups, key, shared), _Own(groups, key, own, routing, columns)


class _Shared:
    def __init__(self, groups: list[Group], key: Key, side: Side) -> None:
        self._groups = groups
        self._key = key
        self._side = side
        self._low_rank = kernels.module("low_rank")

    def shrink(self, wide: Tensor) -> list[Tensor]:
        by = self._low_rank.shrink_by_a if self._side == "a" else self._low_rank.shrink_by_b
        wide = wide.contiguous()
        return [
            by(wide, group.weights, group.rows, group.columns(self._key), group.scale)
            for group in self._groups
        ]

    def expand(self, into: Tensor, narrow: Sequence[Tensor]) -> None:
        by = self._low_rank.expand_by_a if self._side == "a" else self._low_rank.expand_by_b
        for group, low in zip(self._groups, narrow, strict=True):
            by(low, group.weights, group.rows, group.columns(self._key), into)

    def add_gradients(self, wide: Tensor, narrow: Sequence[Tensor]) -> None:
        own = self._low_rank
        add = own.add_gradient_of_a if self._side == "a" else own.add_gradient_of_b
        wide = wide.contiguous()
        for group, low in zip(self._groups, narrow, strict=True):
            if group.has_gradients:
                add(low, wide, group.grads, group.rows, group.columns(self._key))


class _Own:
    def __init__(
        self,
        groups: list[Group],
        key: Key,
        side: Side,
        routing: Routing,
        columns: tuple[slice, ...],
    ) -> None:
        self._groups = groups
        self._key = key
        self._is_b = side == "b"
        self._routing = routing
        self._columns = columns if self._is_b else (slice(None),)
        self._kernels = kernels.module("experts")

    def shrink(self, wide: Tensor) -> list[Tensor]:
        found = []
        for group in self._groups:
            rank, rows = group.layout.rank, self._rows(group)
            narrow = wide.new_empty(len(wide), rank * len(self._columns))
            for module, columns in enumerate(self._columns):
                out = narrow[:, module * rank : (module + 1) * rank]
                matrices = self._matrices(group, module)
                self._kernels.shrink(wide[:, columns], matrices, rows, out, scales=True)
            found.append(narrow)
        return found

    def expand(self, into: Tensor, narrow: Sequence[Tensor]) -> None:
        for group, low in zip(self._groups, narrow, strict=True):
            rank, rows = group.layout.rank, self._rows(group)
            for module, columns in enumerate(self._columns):
                part = low[:, module * rank : (module + 1) * rank]
                matrices = self._matrices(group, module)
                self._kernels.expand(into[:, columns], part, matrices, rows, scales=False)

    def add_gradients(self, wide: Tensor, narrow: Sequence[Tensor]) -> None:
        for group, low in zip(self._groups, narrow, strict=True):
            if not group.has_gradients:
                continue
            rank, runs = group.layout.rank, group.runs_on_device
            firsts, stops = (self._routing.edges(points) for points in runs[:2])
            for module, columns in enumerate(self._columns):
                part = low[:, module * rank : (module + 1) * rank]
                offset, size = self._place(group, module)
                self._kernels.add_gradients(
                    wide[:, columns],
                    part,
                    group.grads,
                    offset,
                    size,
                    rank,
                    (firsts, stops, runs[2]),
                    self._is_b,
                )

    def _rows(self, group: Group) -> Sorted:
        return Sorted(self._routing, group.token_adapters)

    def _matrices(self, group: Group, module: int) -> Matrices:
        offset, size = self._place(group, module)
        rank, weights = group.layout.rank, group.weights
        is_aligned = weights.is_aligned and rank % 8 == size % 8 == offset % 8 == 0
        return Matrices(weights.addresses, offset, group.facts, size, self._is_b, rank, is_aligned)

    def _place(self, group: Group, module: int) -> tuple[int, int]:
        """Where the first expert's matrix begins in a vector, and its wide side."""
        place, rank = group.layout.places[self._key], group.layout.rank
        projection, start = place.projection, place.offset
        if not self._is_b:
            return start, projection.inputs
        start += rank * len(projection.modules) * projection.inputs
        num_experts = self._routing.num_experts
        start += num_experts * rank * sum(projection.outputs[:module])
        return start, projection.outputs[module]
