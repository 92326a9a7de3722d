"""What a decoding step on a GPU is told about its rows, as numbers in buffers that never move.

Everything that differs between steps is written into one pinned buffer and copied over at once:
tokens, positions, which blocks hold keys and values, which rows an adapter has, how tokens are
drawn. Kernels and captured graphs read it where it always lies.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from tinsmith.engine.local.kernels.decode_attention import RowBlocks
from tinsmith.engine.local.kernels.decode_lora import (
    NO_ADAPTER,
    NUM_ADDRESSES,
    NUM_TILE_FIELDS,
    TILE_ROWS,
)
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.lora import Adapter, LowRank
from tinsmith.engine.local.sample.cached_choices import CachedChoices, places_of_rows
from tinsmith.engine.local.sample.choosing import uniforms
from tinsmith.engine.local.sample.kvcache import BlockTable, KVCache
from tinsmith.engine.local.sample.sequences import Sequence

_SMALLEST_RANK = 16
"""The matrix units take no smaller products."""


_NUM_FIELDS = 9
"""Of a row: token, position, temperature, number drawn, seat, length, where its blocks begin, the
number of its adapter, and its state."""


class StepTable:
    """The buffers of steps with up to `max_rows` rows."""

    def __init__(self, max_rows: int, cache: KVCache) -> None:
        device = cache.shape.device
        self._size = (_NUM_FIELDS + NUM_TILE_FIELDS, max_rows)
        self._num_fixed = self._size[0] * max_rows
        # Numbers of 64 bits for the fields, then of 32 for the blocks of all rows, each as many as
        # the longest sequence has, rounded up to a power of two.
        max_width = _power_of_two(cache.shape.max_blocks)
        num_numbers = self._num_fixed + max_rows * max_width // 2 + 1
        self._device = torch.zeros(num_numbers, dtype=torch.int64, device=device)
        self.cache = cache
        # A field per row of the buffer, a sequence per column; floats are stored by their bits.
        fields = self._device[: self._num_fixed].view(self._size)
        self.tokens, self.positions = fields[:2]
        self.temperatures, self.uniforms = fields[2:4].view(torch.float64)
        self.seats, self._lengths, self._firsts, self.adapters, self.states = fields[4:9]
        self.tiles = fields[_NUM_FIELDS:]
        self._on_device = self._device[self._num_fixed :].view(torch.int32)
        self._blocks = np.zeros((max_rows, 1), dtype=np.int32)
        self._written: list[tuple[BlockTable, int] | None] = [None] * max_rows
        """Which table each row of `_blocks` has, and how many of its blocks."""

    def rows(self, count: int) -> RowBlocks:
        """Where attention finds the first so many rows."""
        keys, values = self.cache.keys, self.cache.values
        lengths, firsts = self._lengths[:count], self._firsts[:count]
        return RowBlocks(keys, values, lengths, firsts, self._on_device)

    def choices(self, count: int) -> CachedChoices | None:
        """What notes the experts of the first so many rows, where the cache keeps them."""
        cached, routed = self.cache.choices, self.cache.shape.routed
        if cached is None or routed is None:
            return None
        lengths, firsts = self._lengths[:count], self._firsts[:count]
        places = places_of_rows(lengths, firsts, self._on_device, cached)
        return CachedChoices(cached, routed.layers, places)

    def fill(
        self,
        rows: SequenceOf[Sequence],
        tiles: SequenceOf[tuple[int, int, int]],
        seats: SequenceOf[int],
    ) -> None:
        """Describe the next step: a sequence and a seat for each row, the tiles of adapters' rows.

        The step before may not have begun yet: each has a host buffer of its own, which is not
        used again before it has been copied.
        """
        count = len(rows)
        blocks = self._blocks_of(rows)
        used = self._num_fixed + blocks.size // 2 + 1
        host = torch.zeros(used, dtype=torch.int64, pin_memory=self._device.is_cuda)
        numbers = host[: self._num_fixed].view(self._size).numpy()
        # The token to read, unless it is in the seat, and its position.
        numbers[0, :count] = [-1 if s.num_ahead else s.last_token for s in rows]
        numbers[1, :count] = [sequence.position for sequence in rows]
        # How the next token is drawn.
        drawn = numbers[2:4].view(np.float64)
        drawn[0, :count] = [sequence.request.job.params.temperature for sequence in rows]
        drawn[1, :count] = uniforms(
            np.array([sequence.request.seed for sequence in rows], dtype=np.uint64),
            np.array([sequence.index for sequence in rows]),
            np.array([len(sequence.tokens) + sequence.num_ahead for sequence in rows]),
        )
        numbers[4, :count] = seats
        # Which blocks of the KV cache it reads, the new token's included.
        numbers[5, :count] = [sequence.num_past + 1 for sequence in rows]
        numbers[6, :count] = np.arange(count) * blocks.shape[1]
        host[self._num_fixed :].view(torch.int32).numpy()[: blocks.size] = blocks.ravel()
        # Whose rows they are: of no adapter, or those of its tiles.
        numbers[7] = NO_ADAPTER
        for first, num_rows, number in tiles:
            numbers[7, first : first + num_rows] = number
        if tiles:
            numbers[_NUM_FIELDS:, : len(tiles)] = np.array(tiles, dtype=np.int64).T
        # Its state in the cache, of models that have some; none where a row is padding.
        numbers[8] = -1
        numbers[8, :count] = [_state_of(sequence) for sequence in rows]
        self._device[:used].copy_(host, non_blocking=True)

    def _blocks_of(self, rows: SequenceOf[Sequence]) -> np.ndarray:
        """(B, width): the rows' blocks, kept from step to step, since few of them change."""
        tables = [sequence.table for sequence in rows]
        width = _power_of_two(max(len(table.blocks) for table in tables if table is not None))
        if width != self._blocks.shape[1]:
            self._blocks = np.zeros((len(self._written), width), dtype=np.int32)
            self._written = [None] * len(self._written)
        for row, table in enumerate(tables):
            assert table is not None
            written, count = self._written[row], len(table.blocks)
            if written is None or written[0] is not table or written[1] != count:
                self._blocks[row, :count] = table.blocks
                self._written[row] = (table, count)
        return self._blocks[: len(rows)]


def _state_of(sequence: Sequence) -> int:
    table = sequence.table
    return -1 if table is None or table.state is None else table.state


def _power_of_two(number: int) -> int:
    """The smallest that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """How the adapters of a step are to be computed."""

    tiles: list[tuple[int, int, int]]
    """(first row, rows, number of the adapter or -1) until each row is in one; none when no row
    has an adapter."""

    max_rank: int
    """Rounded up to what kernels are made for."""

    is_aligned: bool


@dataclass(frozen=True, slots=True)
class _Resident:
    number: int
    weights: dict[tuple[int | None, str], LowRank]
    """Kept, so that what the table points to is not freed."""

    is_aligned: bool


class AdapterTable:
    """Where the matrices of the adapters in use lie."""

    def __init__(self, config: DecoderConfig, max_rows: int, device: torch.device) -> None:
        self._projections = config.projections
        self._resident: dict[Adapter, _Resident] = {}
        self._max_adapters = max_rows
        shape = (max_rows, len(config.projections), NUM_ADDRESSES)
        self.addresses = torch.zeros(shape, dtype=torch.int64, device=device)
        self.facts = torch.zeros(max_rows, 2, device=device)

    def tiles(self, rows: SequenceOf[Sequence]) -> AdapterTiles:
        """Tiles for rows of which those of one adapter lie together."""
        adapters = [sequence.request.adapter for sequence in rows]
        used = {adapter for adapter in adapters if adapter is not None}
        if not used:
            return AdapterTiles([], 0, True)
        residents = {adapter: self._resident_of(adapter, used) for adapter in used}
        tiles: list[tuple[int, int, int]] = []
        # Cut each adapter's run of rows into tiles.
        start = 0
        for row in range(1, len(rows) + 1):
            if row < len(rows) and adapters[row] is adapters[start]:
                continue
            adapter = adapters[start]
            number = NO_ADAPTER if adapter is None else residents[adapter].number
            for first in range(start, row, TILE_ROWS):
                tiles.append((first, min(TILE_ROWS, row - first), number))
            start = row
        largest = max(adapter.rank for adapter in used)
        max_rank = max(_SMALLEST_RANK, _power_of_two(largest))
        is_aligned = all(resident.is_aligned for resident in residents.values())
        return AdapterTiles(tiles, max_rank, is_aligned)

    def forget(self, adapter: Adapter) -> None:
        self._resident.pop(adapter, None)

    def _resident_of(self, adapter: Adapter, used: set[Adapter]) -> _Resident:
        known = self._resident.get(adapter)
        weights = adapter.weights()
        if known is not None and known.weights is weights:
            return known
        number = self._free_number(used) if known is None else known.number
        addresses = np.zeros((len(self._projections), NUM_ADDRESSES), dtype=np.int64)
        for index, projection in enumerate(self._projections):
            low_rank = weights.get((projection.layer, projection.name))
            if low_rank is not None:
                pointers = [low_rank.a.data_ptr(), *(b.data_ptr() for b in low_rank.b)]
                addresses[index, : len(pointers)] = pointers
        self.addresses[number] = torch.from_numpy(addresses).to(self.addresses.device)
        facts = torch.tensor([float(adapter.rank), adapter.scale])
        self.facts[number] = facts.to(self.facts.device)
        is_aligned = adapter.rank % 8 == 0 and not (addresses % 16).any()
        self._resident[adapter] = _Resident(number, weights, bool(is_aligned))
        return self._resident[adapter]

    def _free_number(self, used: set[Adapter]) -> int:
        """A number that nobody has, or that of an adapter which this step does not need."""
        if len(self._resident) >= self._max_adapters:
            idle = next(adapter for adapter in self._resident if adapter not in used)
            self.forget(idle)
        taken = {resident.number for resident in self._resident.values()}
        return next(number for number in range(self._max_adapters) if number not in taken)
