"""What a captured pass reads of its batch: tables on the device that never move.

They have room for a shape's most tokens, sequences and runs. Behind what a batch fills in there is
padding: tokens that make a sequence of their own and have no adapter, sequences and parts of rows
without tokens, and adapters at address zero, which no row has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.kernels import low_rank
from tinsmith.engine.local.model.batch import Bounds
from tinsmith.engine.local.model.grouped_linear import GivenRows, Group, Members
from tinsmith.engine.local.model.lora import ALPHA, AdapterSegments, GradientBuffer, Layout
from tinsmith.engine.local.model.recurrent.recurrence import CHUNK, ChunkTables, chunk_tables
from tinsmith.engine.local.model.transfers import to_device

_SEQUENCES = (8, 64, 256)
_RUNS = (1, 8, 32)
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
        self._num_parts = shape.num_tokens // low_rank.CHUNK_ROWS + shape.num_runs
        self._num_chunks = shape.num_tokens // CHUNK + shape.num_sequences
        (
            self._longs,
            (
                self.tokens,
                self.positions,
                self._of_tokens,
                self._runs,
                self._weights,
                self._grads,
            ),
        ) = _tables(
            torch.int64,
            device,
            *[(shape.num_tokens,)] * 3,
            (3, shape.num_runs),
            *[(shape.num_runs,)] * 2,
        )
        (
            self._ints,
            (
                self._blocks,
                self._parts,
                starts,
                rows,
                chunks,
                sequences,
            ),
        ) = _tables(
            torch.int32,
            device,
            (self._num_blocks, 3),
            (self._num_parts, 3),
            (shape.num_sequences + 1,),
            (2, shape.num_tokens),
            (2, self._num_chunks),
            (4, shape.num_sequences),
        )
        self._members = Members(
            shape.layout,
            ALPHA / shape.layout.rank,
            device,
            low_rank.Vectors(self._weights, is_aligned=True),
            low_rank.Vectors(self._grads, is_aligned=True),
            shape.has_gradients,
        )
        self.bounds = Bounds(starts, shape.longest)
        self.chunks = ChunkTables(rows, chunks, sequences)

    def segments(self, gradient: GradientBuffer | None) -> AdapterSegments:
        """Rows and their adapters as the tables say. `gradient` is any, where there are some."""
        shape = self._shape
        rows = low_rank.Rows(
            low_rank.Table(self._blocks, self._num_blocks, is_aligned=False),
            self._block_rows,
            low_rank.Table(self._parts, self._num_parts, is_aligned=False),
            shape.is_split,
        )
        segments = AdapterSegments([(0, shape.num_tokens, None)], [gradient])
        whole = [(0, shape.num_tokens, 0)]
        given = GivenRows(rows, self._runs, self._of_tokens)
        segments.groups = [Group(self._members, whole, shape.num_tokens, given)]
        return segments

    def fill(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        lengths: Sequence[int],
        adapters: AdapterSegments,
    ) -> None:
        """Describe a batch. Its adapters and gradients stay where they are until it is through."""
        shape, num_padding = self._shape, self._shape.num_tokens - len(tokens)
        # Runs of rows: those there are, and others without rows.
        runs = np.zeros((3, shape.num_runs), dtype=np.int64)
        runs[2] = np.arange(shape.num_runs)
        weights, grads = np.zeros((2, shape.num_runs), dtype=np.int64)
        of_tokens = np.full(shape.num_tokens, -1)
        for number, (start, stop, adapter) in enumerate(adapters.runs):
            assert adapter is not None, "shapes are of rows with adapters"
            runs[:2, number] = start, stop
            of_tokens[start:stop] = number
            weights[number] = adapter.rounded().data_ptr()
            gradient = adapters.gradients[number]
            grads[number] = 0 if gradient is None else gradient.flat.data_ptr()
        padded = (np.pad(each, (0, num_padding)) for each in (tokens, positions))
        _copy(self._longs, *padded, of_tokens, runs, weights, grads)
        # Sequences: those there are, the padding, and others without rows.
        sizes = np.zeros(shape.num_sequences, dtype=np.int64)
        sizes[: len(lengths)] = lengths
        sizes[len(lengths)] = num_padding
        chunk_rows, chunks, sequences = chunk_tables(sizes.tolist())
        own = [(start, stop, number) for number, (start, stop, _) in enumerate(adapters.runs)]
        part_rows = low_rank.CHUNK_ROWS if shape.is_split else shape.num_tokens
        _copy(
            self._ints,
            _filled(low_rank.divided(own, self._block_rows), self._num_blocks),
            _filled(low_rank.divided(own, part_rows), self._num_parts),
            np.cumsum([0, *sizes]),
            chunk_rows,
            np.pad(chunks, ((0, 0), (0, self._num_chunks - chunks.shape[1]))),
            sequences,
        )

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Inside, a backward pass leaves the gradients of adapters as they are."""
        grads = self._grads.clone()
        self._grads.zero_()
        try:
            yield
        finally:  # whoever tries again must find them
            self._grads.copy_(grads)


def _tables(
    dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """One tensor, and tables of these shapes one after another in it."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return whole, [part.view(s) for part, s in zip(whole.split(sizes), shapes, strict=True)]


def _copy(whole: Tensor, *parts: np.ndarray) -> None:
    """Put numbers of the host's into the tables that lie in `whole`."""
    numbers = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    whole.copy_(to_device(numbers.to(whole.dtype), whole.device))


def _filled(entries: Sequence[tuple[int, int, int]], count: int) -> np.ndarray:
    """(count, 3): behind the entries such without rows."""
    return np.array([*entries, *[(0, 0, 0)] * (count - len(entries))])
