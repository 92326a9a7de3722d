"""Low-rank factors of experts in plain torch, run after run, expert after expert.

An adapter has one factor on the hidden side that all experts share, and one on the other side for
each: gate and up share their A and have a B each, down has an A each and one B. The shared one
meets rows of tokens, before they are expanded or after they are summed, which is k times cheaper;
the others meet rows that are sorted by expert. On CUDA `kernel_factors` does the same.

Every factor does three things, `shrink` and `expand` being its product and the transposed one:

    shrink         (N, wide) to scale · (N, ranks), one for each run
    expand         adds to (N, wide) its product with (N, ranks)
    add_gradients  sums over rows, into the runs' buffers

Rows that are not a run's are zero in its (N, ranks). Shapes: N rows, of tokens or sorted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.experts.routing import Routing
from tinsmith.engine.local.model.linear import add_product
from tinsmith.engine.local.model.lora import ActiveRun, AdapterSegments, LowRank

Key = tuple[int | None, str]
Side = Literal["a", "b"]


class Factor(Protocol):
    def shrink(self, wide: Tensor) -> list[Tensor]: ...

    def expand(self, into: Tensor, narrow: Sequence[Tensor]) -> None: ...

    def add_gradients(self, wide: Tensor, narrow: Sequence[Tensor]) -> None: ...


def factors(
    x: Tensor,
    adapters: AdapterSegments,
    key: Key,
    shared: Side,
    routing: Routing,
    columns: tuple[slice, ...],
) -> tuple[Factor, Factor]:
    """The shared factor of a projection, and those of the experts; `columns` are its modules'."""
    if kernels.are_usable(x):
        from tinsmith.engine.local.model.experts import kernel_factors

        return kernel_factors.factors(adapters, key, shared, routing, columns)
    own: Side = "b" if shared == "a" else "a"
    return _Shared(adapters, key, shared), _Own(adapters, key, own, routing, columns)


class _Shared:
    def __init__(self, adapters: AdapterSegments, key: Key, side: Side) -> None:
        self._runs = adapters.active(*key)
        self._key = key
        self._side = side

    def shrink(self, wide: Tensor) -> list[Tensor]:
        found = []
        for start, stop, adapter, _ in self._runs:
            matrix = self._matrix(adapter.weights()[self._key])
            narrow = wide.new_zeros(len(wide), len(matrix))
            torch.mm(wide[start:stop], matrix.t(), out=narrow[start:stop]).mul_(adapter.scale)
            found.append(narrow)
        return found

    def expand(self, into: Tensor, narrow: Sequence[Tensor]) -> None:
        for (start, stop, adapter, _), low in zip(self._runs, narrow, strict=True):
            into[start:stop].addmm_(low[start:stop], self._matrix(adapter.weights()[self._key]))

    def add_gradients(self, wide: Tensor, narrow: Sequence[Tensor]) -> None:
        for (start, stop, _, buffer), low in zip(self._runs, narrow, strict=True):
            if buffer is None:
                continue
            into = buffer.views[self._key]
            if self._side == "a":
                add_product(into.a[0], low[start:stop].t(), wide[start:stop])
            else:
                add_product(into.b[0][0], wide[start:stop].t(), low[start:stop])

    def _matrix(self, low_rank: LowRank) -> Tensor:
        """(ranks, wide)."""
        return low_rank.a[0] if self._side == "a" else low_rank.b[0][0].t()


class _Own:
    def __init__(
        self,
        adapters: AdapterSegments,
        key: Key,
        side: Side,
        routing: Routing,
        columns: tuple[slice, ...],
    ) -> None:
        self._runs = adapters.active(*key)
        self._key = key
        self._side = side
        self._routing = routing
        self._columns = columns if side == "b" else (slice(None),)

    def shrink(self, wide: Tensor) -> list[Tensor]:
        found = []
        for run in self._runs:
            adapter = run[2]
            modules = list(self._modules(adapter.weights()[self._key]))
            narrow = wide.new_zeros(len(wide), adapter.rank * len(modules))
            for place, (columns, matrices) in zip(
                narrow.split(adapter.rank, dim=1), modules, strict=True
            ):
                part = wide[:, columns]
                for expert, rows in self._segments(run):
                    torch.mm(part[rows], matrices[expert].t(), out=place[rows])
            found.append(narrow.mul_(adapter.scale))
        return found

    def expand(self, into: Tensor, narrow: Sequence[Tensor]) -> None:
        for run, low in zip(self._runs, narrow, strict=True):
            adapter = run[2]
            parts = low.split(adapter.rank, dim=1)
            modules = self._modules(adapter.weights()[self._key])
            for part, (columns, matrices) in zip(parts, modules, strict=True):
                place = into[:, columns]
                for expert, rows in self._segments(run):
                    place[rows].addmm_(part[rows], matrices[expert])

    def add_gradients(self, wide: Tensor, narrow: Sequence[Tensor]) -> None:
        for run, low in zip(self._runs, narrow, strict=True):
            _, _, adapter, buffer = run
            if buffer is None:
                continue
            parts = low.split(adapter.rank, dim=1)
            modules = self._modules(buffer.views[self._key])
            for part, (columns, into) in zip(parts, modules, strict=True):
                of_module = wide[:, columns]
                for expert, rows in self._segments(run):
                    add_product(into[expert], part[rows].t(), of_module[rows])

    def _modules(self, low_rank: LowRank) -> Iterator[tuple[slice, Tensor]]:
        """Each module's columns, and its matrices (E, rank, wide)."""
        matrices = [low_rank.a] if self._side == "a" else [b.transpose(1, 2) for b in low_rank.b]
        return zip(self._columns, matrices, strict=True)

    def _segments(self, run: ActiveRun) -> list[tuple[int, slice]]:
        """The experts that have rows of this run, and which these are."""
        start, stop = run[:2]
        if (start, stop) not in self._found:
            edges = self._routing.host_edges((start, stop))
            self._found[start, stop] = [
                (expert, slice(*pair)) for expert, pair in enumerate(edges) if pair[1] > pair[0]
            ]
        return self._found[start, stop]

    @functools.cached_property
    def _found(self) -> dict[tuple[int, int], list[tuple[int, slice]]]:
        return {}
