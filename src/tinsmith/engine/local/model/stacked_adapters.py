"""Adapters side by side in memory: one batched product for all that are sampled together.

With a row or two of each, the products of eight adapters one after another are too small to be
divided among cores. Batched they take both, but a batch is one tensor, so the weights are copied
into one, and kept there while the same adapters go on. Two cores of an AMD EPYC, a decoding step of
SmolLM2-135M, 16 rows, rank 32, milliseconds:

    one adapter  49    eight, one after another  86    eight, batched  65

For the CPU in float32; on CUDA kernels do the same without a copy.

Shapes: N rows of a step, S adapters of the stack, m most rows of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.model.lora import Adapter, Layout, Run

_MAX_ROWS = 8
"""Of an adapter with more, a product by itself is quick."""

_STEPS_BEFORE = 3
"""Steps that need a stack before it is made: the copy takes longer than it saves in so many."""


class AdapterStacks:
    """Makes a stack when it is worth it, and keeps the last one while there is room for it."""

    def __init__(self, max_bytes: int, free_bytes: Callable[[], int] | None = None) -> None:
        """`free_bytes` says what adapters and stacks leave of the memory that is planned for them:
        less than nothing where it is too small for them."""
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes or (lambda: max_bytes)
        self._stack: _Stack | None = None
        self._num_missed = 0
        """Steps in a row that needed another stack."""

    @property
    def nbytes(self) -> int:
        """Memory that the stack takes at the moment."""
        return 0 if self._stack is None else self._stack.nbytes

    def rows_of(self, runs: Sequence[Run]) -> StackedRows | None:
        """The rows of a step, each adapter in one run, that are computed with a stack."""
        wanted = _largest_group(runs)
        if len(wanted) < 2:
            return None
        if self._stack is not None and self._free_bytes() < 0:
            self.drop()  # adapters need its room
        if self._stack is None or not self._stack.serves(wanted):
            self._num_missed += 1
            if self._num_missed < _STEPS_BEFORE:
                return None
            self.drop()  # its memory is free before the next is made
            if _stacked_bytes(wanted) > min(self._max_bytes, self._free_bytes()):
                return None
            self._stack = _Stack(wanted)
        self._num_missed = 0
        return StackedRows(self._stack, runs)

    def forget(self, adapter: Adapter) -> None:
        """Drop a copy of weights that go away or change."""
        if self._stack is not None and adapter in self._stack.numbers:
            self.drop()

    def drop(self) -> None:
        """Give the memory of the stack back; it is made again when there is room."""
        self._stack = None


class StackedRows:
    """Which rows of a batch go to which adapter of a stack."""

    def __init__(self, stack: _Stack, runs: Sequence[Run]) -> None:
        self._stack = stack
        num_rows = runs[-1][1]
        own = [run for run in _short(runs) if run[2] in stack.numbers]
        self.adapters = {adapter for _, _, adapter in own}
        self._count = max(stop - start for start, stop, _ in own)
        # (S, m): which row of the batch is there. Places without one have any, for nothing.
        row_of_place = np.zeros((len(stack.numbers), self._count), dtype=np.int64)
        rows, places = [], []
        for start, stop, adapter in own:
            number, size = stack.numbers[adapter], stop - start
            row_of_place[number, :size] = np.arange(start, stop)
            rows.append(np.arange(start, stop))
            places.append(number * self._count + np.arange(size))
        self._row_of_place = torch.from_numpy(row_of_place.ravel())
        self._rows = torch.from_numpy(np.concatenate(rows))
        self._places = torch.from_numpy(np.concatenate(places))
        self._is_whole = num_rows == row_of_place.size and np.array_equal(
            row_of_place.ravel(), np.arange(num_rows)
        )

    def on(self, runs: Sequence[Run]) -> StackedRows | None:
        """The same for a smaller batch, made of some of the rows."""
        has_own = any(adapter in self._stack.numbers for _, _, adapter in _short(runs))
        return StackedRows(self._stack, runs) if has_own else None

    def add_products(self, y: Tensor, x: Tensor, key: tuple[int | None, str]) -> None:
        """Add scale · (x Aᵀ) Bᵀ of these rows of x (N, inputs) to y (N, outputs), in place."""
        if key not in self._stack.matrices:
            return
        a, b = self._stack.matrices[key]
        by_adapter = (-1, self._count)
        rows = x if self._is_whole else x[self._row_of_place]
        # (S, inputs, m) to (S, modules · rank, m): with few rows quicker than x Aᵀ.
        inner = torch.bmm(a, rows.unflatten(0, by_adapter).transpose(1, 2)).mul_(self._stack.scale)
        found = y if self._is_whole else y[self._row_of_place]
        parts = found.unflatten(0, by_adapter).split([b_of.shape[2] for b_of in b], dim=2)
        for part, inner_of, b_of in zip(parts, inner.chunk(len(b), dim=1), b, strict=True):
            part.baddbmm_(inner_of.transpose(1, 2), b_of)
        if not self._is_whole:
            y[self._rows] = found[self._places]


class _Stack:
    """Copies of the weights of adapters of one layout."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.numbers = {adapter: number for number, adapter in enumerate(adapters)}
        self._versions = {adapter: adapter.flat._version for adapter in adapters}
        self.scale = adapters[0].scale
        weights = [adapter.weights() for adapter in adapters]
        self.matrices = {
            key: (
                torch.stack([each[key].a for each in weights]),
                tuple(
                    torch.stack([each[key].b[module].t() for each in weights])
                    for module in range(len(place.projection.modules))
                ),
            )
            for key, place in adapters[0].layout.places.items()
            if place.projection.experts is None
        }
        """(S, modules · rank, inputs) and, for each module, (S, rank, outputs)."""
        self.nbytes = _stacked_bytes(adapters)

    def serves(self, adapters: Sequence[Adapter]) -> bool:
        """Whether these are in it as they are now, and not so few that most is computed in vain."""
        are_in = all(self._versions.get(each) == each.flat._version for each in adapters)
        return are_in and 2 * len(adapters) >= len(self.numbers)


def _stacked_bytes(adapters: Iterable[Adapter]) -> int:
    """At most, since experts are left out."""
    return sum(adapter.flat.nbytes for adapter in adapters)


def _short(runs: Iterable[Run]) -> list[tuple[int, int, Adapter]]:
    """Those with an adapter and few rows."""
    return [
        (start, stop, adapter)
        for start, stop, adapter in runs
        if adapter is not None and stop - start <= _MAX_ROWS
    ]


def _largest_group(runs: Iterable[Run]) -> list[Adapter]:
    """The adapters of short runs, of the commonest layout."""
    groups: dict[Layout, list[Adapter]] = {}
    for _, _, adapter in _short(runs):
        groups.setdefault(adapter.layout, []).append(adapter)
    return max(groups.values(), key=len, default=[])
