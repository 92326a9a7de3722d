"""What a decoding step on a GPU is told about its rows, as numbers in buffers that never move.

Everything that differs between steps is written into one pinned buffer and copied over at once:
tokens, positions, where keys and values lie, which rows an adapter has, how tokens are drawn.
Kernels and captured graphs read it where it always lies.

Shapes: L layers, R slots of a slab, K key/value heads, C capacity in tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.local.kernels.decode_attention import NUM_PLACE_FIELDS
from tinsmith.engine.local.kernels.decode_lora import NUM_ADDRESSES, NUM_TILE_FIELDS, TILE_ROWS
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.lora import Adapter, LowRank
from tinsmith.engine.local.sample.choosing import uniforms
from tinsmith.engine.local.sample.kvcache import Slab, Span
from tinsmith.engine.local.sample.sequences import Sequence

_SMALLEST_RANK = 16
"""The matrix units take no smaller products."""


class StepTable:
    """The buffers of steps with up to `max_rows` rows."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        num_fields = 5 + NUM_PLACE_FIELDS + NUM_TILE_FIELDS
        self._device = torch.zeros(num_fields, max_rows, dtype=torch.int64, device=device)
        # A field per row of the buffer, a sequence per column; floats are stored by their bits.
        self.tokens, self.positions = self._device[:2]
        self.temperatures, self.uniforms = self._device[2:4].view(torch.float64)
        self.seats = self._device[4]
        self.places = self._device[5 : 5 + NUM_PLACE_FIELDS]
        self.tiles = self._device[5 + NUM_PLACE_FIELDS :]

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
        host = torch.zeros(self._device.shape, dtype=torch.int64, pin_memory=self._device.is_cuda)
        numbers = host.numpy()
        count = len(rows)
        places = _Places()
        own = np.array([places.of(sequence) for sequence in rows], dtype=np.int64).T
        shared = np.array([places.of_prompt(sequence) for sequence in rows], dtype=np.int64).T
        # The token to read, unless it is in the seat, and its position: behind the shared prompt
        # and the slot's tokens.
        numbers[0, :count] = [-1 if s.num_ahead else s.tokens[-1] for s in rows]
        numbers[1, :count] = own[4] + shared[4]
        # How the next token is drawn.
        drawn = numbers[2:4].view(np.float64)
        drawn[0, :count] = [sequence.request.job.params.temperature for sequence in rows]
        drawn[1, :count] = uniforms(
            np.array([sequence.request.seed for sequence in rows], dtype=np.uint64),
            np.array([sequence.index for sequence in rows]),
            np.array([len(sequence.tokens) + sequence.num_ahead for sequence in rows]),
        )
        numbers[4, :count] = seats
        # Where the KV cache lies: the sequence's slot, then the prompt it shares.
        numbers[5:10, :count] = own
        numbers[10:15, :count] = shared
        if tiles:
            numbers[15:, : len(tiles)] = np.array(tiles, dtype=np.int64).T
        self._device.copy_(host, non_blocking=True)


class _Places:
    """Where sequences' keys and values lie; slabs and spans are asked once."""

    def __init__(self) -> None:
        self._slabs: dict[Slab, tuple[int, int, int, int, int]] = {}
        self._spans: dict[Span, tuple[int, int, int, int, int]] = {}

    def of(self, sequence: Sequence) -> tuple[int, int, int, int, int]:
        """Addresses of keys and values, strides of layers and heads, and tokens in the slot."""
        slot = sequence.slot
        assert slot is not None
        slab = slot.slab
        if slab not in self._slabs:
            keys, values = slab.keys, slab.values
            # Keys of a slab: (L, R, K, C, D).
            layer, row, head = keys.stride()[:3]
            first = (keys.data_ptr(), values.data_ptr(), row * keys.element_size())
            self._slabs[slab] = (*first, layer, head)
        key, value, row, layer, head = self._slabs[slab]
        return key + slot.row * row, value + slot.row * row, layer, head, slot.num_tokens

    def of_prompt(self, sequence: Sequence) -> tuple[int, int, int, int, int]:
        """The same for the prompt it shares with others; zeros where it shares none."""
        span = sequence.prompt_span
        if span is None:
            return 0, 0, 0, 0, 0
        if span not in self._spans:
            # Keys of a span: (L, K, C, D).
            layer, head = span.keys.stride()[:2]
            addresses = (span.keys.data_ptr(), span.values.data_ptr())
            self._spans[span] = (*addresses, layer, head, span.num_tokens)
        return self._spans[span]


def prompt_places(parts: SequenceOf[tuple[Span, int, int]], device: torch.device) -> Tensor:
    """(4, N) int64 for `decode_attention.write`: tokens start to stop of each span in turn."""
    columns = []
    for span, start, stop in parts:
        layer, head, token = span.keys.stride()[:3]
        step = token * span.keys.element_size()
        offsets = np.arange(start, stop, dtype=np.int64) * step
        block = np.empty((4, stop - start), dtype=np.int64)
        block[0] = span.keys.data_ptr() + offsets
        block[1] = span.values.data_ptr() + offsets
        block[2], block[3] = layer, head
        columns.append(block)
    return torch.from_numpy(np.concatenate(columns, axis=1)).to(device)


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """How the adapters of a step are to be computed."""

    tiles: list[tuple[int, int, int]]
    max_rank: int
    """Rounded up to what kernels are made for; zero when no row has an adapter."""

    is_aligned: bool


@dataclass(frozen=True, slots=True)
class _Resident:
    slot: int
    weights: dict[tuple[int | None, str], LowRank]
    """Kept, so that what the table points to is not freed."""

    is_aligned: bool


class AdapterTable:
    """Where the matrices of the adapters in use lie."""

    def __init__(self, config: DecoderConfig, max_rows: int, device: torch.device) -> None:
        self._projections = config.projections
        self._resident: dict[Adapter, _Resident] = {}
        self._num_slots = max_rows
        shape = (max_rows, len(config.projections), NUM_ADDRESSES)
        self.addresses = torch.zeros(shape, dtype=torch.int64, device=device)
        self.facts = torch.zeros(max_rows, 2, device=device)

    def tiles(self, rows: SequenceOf[Sequence]) -> AdapterTiles:
        """Tiles for rows of which those of one adapter lie together."""
        adapters = [sequence.request.adapter for sequence in rows]
        used = {adapter for adapter in adapters if adapter is not None}
        residents = {adapter: self._resident_of(adapter, used) for adapter in used}
        tiles: list[tuple[int, int, int]] = []
        # Cut each adapter's run of rows into tiles: (first row, rows, adapter's slot).
        start = 0
        for row in range(1, len(rows) + 1):
            if row < len(rows) and adapters[row] is adapters[start]:
                continue
            adapter = adapters[start]
            if adapter is not None:
                slot = residents[adapter].slot
                for first in range(start, row, TILE_ROWS):
                    tiles.append((first, min(TILE_ROWS, row - first), slot))
            start = row
        largest = max((adapter.rank for adapter in used), default=0)
        max_rank = _SMALLEST_RANK if largest else 0
        while max_rank < largest:
            max_rank *= 2
        is_aligned = all(resident.is_aligned for resident in residents.values())
        return AdapterTiles(tiles, max_rank, is_aligned)

    def forget(self, adapter: Adapter) -> None:
        self._resident.pop(adapter, None)

    def _resident_of(self, adapter: Adapter, used: set[Adapter]) -> _Resident:
        known = self._resident.get(adapter)
        weights = adapter.weights()
        if known is not None and known.weights is weights:
            return known
        slot = self._free_slot(used) if known is None else known.slot
        addresses = np.zeros((len(self._projections), NUM_ADDRESSES), dtype=np.int64)
        for index, projection in enumerate(self._projections):
            low_rank = weights.get((projection.layer, projection.name))
            if low_rank is not None:
                pointers = [low_rank.a.data_ptr(), *(b.data_ptr() for b in low_rank.b)]
                addresses[index, : len(pointers)] = pointers
        self.addresses[slot] = torch.from_numpy(addresses).to(self.addresses.device)
        facts = torch.tensor([float(adapter.rank), adapter.scale])
        self.facts[slot] = facts.to(self.facts.device)
        is_aligned = adapter.rank % 8 == 0 and not (addresses % 16).any()
        self._resident[adapter] = _Resident(slot, weights, bool(is_aligned))
        return self._resident[adapter]

    def _free_slot(self, used: set[Adapter]) -> int:
        """A slot that nobody has, or that of an adapter which this step does not need."""
        if len(self._resident) >= self._num_slots:
            idle = next(adapter for adapter in self._resident if adapter not in used)
            self.forget(idle)
        taken = {resident.slot for resident in self._resident.values()}
        return next(slot for slot in range(self._num_slots) if slot not in taken)
