"""What a captured pass reads of its batch: tables on the device that never move.

They have room for a shape's most tokens, sequences and runs. Behind what a batch fills in there is
padding: tokens that make a sequence of their own and have no adapter, sequences and parts of rows
without tokens, and adapters at address zero, which no row has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from tinsmith.engine.local.kernels import low_rank
from tinsmith.engine.local.model.batch import Bounds
from tinsmith.engine.local.model.grouped_linear import Group, Members
from tinsmith.engine.local.model.lora import ALPHA, AdapterSegments, GradientBuffer, Layout
from tinsmith.engine.local.model.transfers import to_device

_SEQUENCES = (8, 64, 512)
_RUNS = (8, 32)
_SHORT = 512
"""Tokens of the longest sequence where all are short."""


class PassShape(NamedTuple):
    """What a captured pass depends on."""

    num_tokens: int
    num_sequences: int
    """The padding's included."""
    longest: int
    num_runs: int
    """Runs of rows, each with an adapter."""
    is_split: bool
    """Whether some run's gradient comes from several chunks of its rows."""
    has_gradients: bool
    layout: Layout
    """Of all adapters."""


def shape_of(lengths: Sequence[int], adapters: AdapterSegments) -> PassShape | None:
    """The smallest shape for such a batch; None where there is none."""
    layouts = {None if adapter is None else adapter.layout for _, _, adapter in adapters.runs}
    layout = layouts.pop()
    num_tokens = _padded(sum(lengths))
    num_sequences = _at_least(len(lengths) + 1, _SEQUENCES)
    num_runs = _at_least(len(adapters.runs), _RUNS)
    if layout is None or layouts or num_sequences is None or num_runs is None:
        return None
    return PassShape(
        num_tokens,
        num_sequences,
        longest=_SHORT if max(lengths) <= _SHORT else num_tokens,
        num_runs=num_runs,
        is_split=any(stop - start > low_rank.CHUNK_ROWS for start, stop, _ in adapters.runs),
        has_gradients=any(buffer is not None for buffer in adapters.gradients),
        layout=layout,
    )


def _padded(num_tokens: int) -> int:
    """At most 63 or a quarter more, and fewer more than a short sequence has."""
    step = 64
    while step < min(_SHORT, num_tokens // 8):
        step *= 2
    return -(-num_tokens // step) * step


def _at_least(count: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= count), None)


class PassTables:
    """The tables of one shape."""

    def __init__(self, shape: PassShape, device: torch.device) -> None:
        self._shape = shape
        self._block_rows = low_rank.rows_of_block(shape.num_tokens)
        self._num_blocks = shape.num_tokens // self._block_rows + shape.num_runs
        self._num_chunks = shape.num_tokens // low_rank.CHUNK_ROWS + shape.num_runs
        sizes = [shape.num_tokens, shape.num_tokens, shape.num_runs, shape.num_runs]
        self._longs = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.tokens, self.positions, self._weights, self._grads = self._longs.split(sizes)
        sizes = [3 * self._num_blocks, 3 * self._num_chunks, shape.num_sequences + 1]
        self._ints = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._blocks, self._chunks, self._starts = self._ints.split(sizes)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self._starts, self._shape.longest)

    def segments(self, gradient: GradientBuffer | None) -> AdapterSegments:
        """Rows and their adapters as the tables say. `gradient` is any, where there are some."""
        shape = self._shape
        rows = low_rank.Rows(
            low_rank.Table(self._blocks, self._num_blocks, is_aligned=False),
            self._block_rows,
            low_rank.Table(self._chunks, self._num_chunks, is_aligned=False),
            shape.is_split,
        )
        members = Members(
            shape.layout,
            ALPHA / shape.layout.rank,
            self._longs.device,
            low_rank.Vectors(self._weights, is_aligned=True),
            low_rank.Vectors(self._grads, is_aligned=True),
            shape.has_gradients,
        )
        segments = AdapterSegments([(0, shape.num_tokens, None)], [gradient])
        whole = [(0, shape.num_tokens, 0)]
        segments.groups = [Group(members, whole, shape.num_tokens, rows)]
        return segments

    def fill(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        lengths: Sequence[int],
        adapters: AdapterSegments,
    ) -> None:
        """Describe a batch. Its adapters and gradients stay where they are until it is through."""
        shape, num_tokens = self._shape, len(tokens)
        longs = torch.zeros(len(self._longs), dtype=torch.int64)
        longs[:num_tokens] = torch.from_numpy(tokens)
        longs[shape.num_tokens : shape.num_tokens + num_tokens] = torch.from_numpy(positions)
        runs = []
        for number, (start, stop, adapter) in enumerate(adapters.runs):
            assert adapter is not None, "shapes are of rows with adapters"
            runs.append((start, stop, number))
            gradient = adapters.gradients[number]
            place = 2 * shape.num_tokens + number
            longs[place] = adapter.rounded().data_ptr()
            longs[place + shape.num_runs] = 0 if gradient is None else gradient.flat.data_ptr()
        self._longs.copy_(to_device(longs, self._longs.device))
        blocks = low_rank.divided(runs, self._block_rows)
        chunk_rows = low_rank.CHUNK_ROWS if shape.is_split else 1 << 30
        chunks = low_rank.divided(runs, chunk_rows)
        starts = [0, *itertools.accumulate(lengths)]
        if num_tokens < shape.num_tokens:
            starts.append(shape.num_tokens)
        starts += [shape.num_tokens] * (shape.num_sequences + 1 - len(starts))
        empty = (0, 0, 0)
        blocks += [empty] * (self._num_blocks - len(blocks))
        chunks += [empty] * (self._num_chunks - len(chunks))
        ints = [*itertools.chain(*blocks), *itertools.chain(*chunks), *starts]
        self._ints.copy_(to_device(torch.tensor(ints, dtype=torch.int32), self._ints.device))

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Inside, a backward pass leaves the gradients of adapters as they are."""
        grads = self._grads.clone()
        self._grads.zero_()
        yield
        self._grads.copy_(grads)
