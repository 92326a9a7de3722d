"""Recurrent layers over packed sequences: a short convolution, and a memory that tokens change.

Attention looks back at every token; these layers keep a *state* of fixed size for each sequence:
the last inputs of a causal convolution, and for each head a memory (a matrix from keys to values).
`delta_rule` and `mamba` differ in how a token changes the memory. Here is what they share: where
sequences begin and end (`Walk`), the convolution, and the recurrence itself, token by token for
decoding and chunk by chunk for everything longer. All of it is float32.

Shapes: N rows, S sequences, c tokens of a chunk, C channels, H heads, K key size, V value size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Most tokens whose effect on each other is computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What the recurrent layers of a model keep of one sequence."""

    num_layers: int
    taps: int
    """Of the convolution, this token's included; the inputs of the others are kept."""

    channels: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def size(self) -> int:
        """Numbers in one layer's state."""
        return self._num_inputs + self.num_heads * self.key_dim * self.value_dim

    @property
    def nbytes(self) -> int:
        """Of the whole state of one sequence, which is float32 whatever the model's dtype."""
        return 4 * self.num_layers * self.size

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Views of (S, size): past inputs (S, taps - 1, C), and memories (S, H, K, V)."""
        inputs, memory = states.tensor_split([self._num_inputs], dim=1)
        return (
            inputs.unflatten(1, (self.taps - 1, self.channels)),
            memory.unflatten(1, (self.num_heads, self.key_dim, self.value_dim)),
        )

    @property
    def _num_inputs(self) -> int:
        return (self.taps - 1) * self.channels


class SequenceStates(Protocol):
    """The sequences of a batch, and the states that recurrent layers find and leave."""

    @property
    def walk(self) -> Walk: ...

    def read(self, layer: int) -> Tensor | None:
        """(S, size): the state before each sequence's first row; None where all of them begin."""
        ...

    def write(self, layer: int, inputs: Tensor, memory: Tensor) -> None:
        """Take the state after each sequence's last row, in the form of `StateShape.split`."""
        ...


def state_before(
    states: SequenceStates, layer: int, shape: StateShape, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Past inputs, None where all sequences begin, and memories, as `StateShape.split` has them."""
    found = states.read(layer)
    if found is not None:
        return shape.split(found)
    size = (len(states.walk.lengths), shape.num_heads, shape.key_dim, shape.value_dim)
    return None, torch.zeros(size, device=device)


class FreshStates:
    """Whole sequences, as training has them: all begin here, and nothing is kept."""

    def __init__(self, lengths: Sequence[int], tables: ChunkTables | None = None) -> None:
        self.walk = Walk(lengths, tables)

    def read(self, layer: int) -> None:
        return None

    def write(self, layer: int, inputs: Tensor, memory: Tensor) -> None:
        pass


class _Places(NamedTuple):
    rows: Tensor
    """(N,): of the rows themselves."""

    past: Tensor
    """(S, num_past): of those put before."""

    kept: Tensor
    """(S, num_past): of each sequence's last ones."""


class _Chunks(NamedTuple):
    """The sequences cut into chunks: first the first chunk of each, then the second ones, …"""

    rows: Tensor
    """(chunks, c): which row; N where a chunk is filled up."""

    back: Tensor
    """(N,): where each row is among the chunks' places."""

    counts: list[int]
    """How many sequences have a first chunk, a second one, …: those at the head of `order`."""

    order: Tensor
    """(S,): the sequences, those with most chunks first."""


class ChunkTables(NamedTuple):
    """Where rows, chunks and sequences lie, for kernels: all int32."""

    rows: Tensor
    """(2, N): rows since the sequence began, and which sequence it is."""

    chunks: Tensor
    """(2, chunks): first row, and number of rows. A sequence's own stand together."""

    sequences: Tensor
    """(4, S), the longest first: first row, number of rows, which sequence it is, first chunk."""


def chunk_tables(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `ChunkTables` are made of; a sequence of no rows has no chunk."""
    sizes = np.array(lengths)
    starts = np.cumsum(sizes) - sizes
    # Rows and chunks: how far each is from its sequence's first one.
    sequence = np.repeat(np.arange(len(sizes)), sizes)
    since = np.arange(len(sequence)) - starts[sequence]
    num_chunks = -(-sizes // CHUNK)
    first_chunks = np.cumsum(num_chunks) - num_chunks
    owner = np.repeat(np.arange(len(sizes)), num_chunks)
    done = CHUNK * (np.arange(len(owner)) - first_chunks[owner])
    order = np.argsort(-sizes, kind="stable")
    return (
        np.stack([since, sequence]),
        np.stack([starts[owner] + done, np.minimum(sizes[owner] - done, CHUNK)]),
        np.stack([starts, sizes, np.arange(len(sizes)), first_chunks])[:, order],
    )


class Walk:
    """Where the sequences of a batch begin and end, and the tables that follow from it.

    The tables are made when first asked for, and serve all layers.
    """

    def __init__(self, lengths: Sequence[int], tables: ChunkTables | None = None) -> None:
        """`tables` that are given may say something else when kernels read them."""
        self.lengths = list(lengths)
        self._places: dict[int, _Places] = {}
        self._chunks: _Chunks | None = None
        self._parts: tuple[_Part, _Part] | None = None
        self._tables = tables

    @property
    def are_single(self) -> bool:
        """Whether every sequence has one row here, as in decoding."""
        return len(self.lengths) == sum(self.lengths)

    def places(self, num_past: int, device: torch.device) -> _Places:
        """Where rows are once each sequence has `num_past` rows put before it."""
        if num_past not in self._places:
            lengths = np.array(self.lengths)
            before = np.repeat(num_past * np.arange(1, len(lengths) + 1), lengths)
            rows = np.arange(len(before)) + before
            ends = np.cumsum(lengths + num_past)
            past = (ends - lengths)[:, None] - np.arange(num_past, 0, -1)
            kept = ends[:, None] - np.arange(num_past, 0, -1)
            self._places[num_past] = _Places(*(_on(device, each) for each in (rows, past, kept)))
        return self._places[num_past]

    def parts(self, device: torch.device) -> tuple[_Part, _Part]:
        """The sequences of one row, and the longer ones."""
        if self._parts is None:
            lengths = np.array(self.lengths)
            starts = np.cumsum(lengths) - lengths
            found = []
            for chosen in (np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)):
                rows = [np.arange(starts[i], starts[i] + lengths[i]) for i in chosen]
                found.append(
                    _Part(
                        Walk(lengths[chosen].tolist()),
                        _on(device, chosen),
                        _on(device, np.concatenate(rows)),
                    )
                )
            self._parts = found[0], found[1]
        return self._parts

    def chunks(self, device: torch.device) -> _Chunks:
        if self._chunks is None:
            self._chunks = self._cut(device)
        return self._chunks

    def tables(self, device: torch.device) -> ChunkTables:
        if self._tables is None:
            tables = chunk_tables(self.lengths)
            self._tables = ChunkTables(*(_on(device, table).int().contiguous() for table in tables))
        return self._tables

    def _cut(self, device: torch.device) -> _Chunks:
        lengths = np.array(self.lengths)
        size = min(CHUNK, 1 << math.ceil(math.log2(lengths.max())))
        num_chunks = -(-lengths // size)
        order = np.argsort(-num_chunks, kind="stable")
        starts = np.cumsum(lengths) - lengths
        counts = [int((num_chunks > step).sum()) for step in range(num_chunks.max())]
        rows = np.full((sum(counts), size), lengths.sum())
        back = np.empty(lengths.sum(), dtype=np.int64)
        chunk = 0
        for step, count in enumerate(counts):
            for sequence in order[:count]:
                first = starts[sequence] + step * size
                num_rows = min(size, starts[sequence] + lengths[sequence] - first)
                rows[chunk, :num_rows] = np.arange(first, first + num_rows)
                back[first : first + num_rows] = chunk * size + np.arange(num_rows)
                chunk += 1
        return _Chunks(_on(device, rows), _on(device, back), counts, _on(device, order))


class _Part(NamedTuple):
    """Some sequences of a batch."""

    walk: Walk
    sequences: Tensor
    rows: Tensor


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, walk: Walk, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel within each sequence: x (N, C), weight (C, taps).

    `past` (S, taps - 1, C) are the inputs before; the second answer those to be kept.
    """
    num_past = weight.shape[1] - 1
    places = walk.places(num_past, x.device)
    # Every sequence behind what came before it, zero where it begins: (N + S · (taps - 1), C).
    extended = x.new_zeros(len(x) + places.past.numel(), x.shape[1])
    extended = extended.index_copy(0, places.rows, x)
    if past is not None:
        extended = extended.index_copy(0, places.past.flatten(), past.flatten(0, 1))
    y = x * weight[:, num_past]
    for lag in range(1, num_past + 1):
        y = y + extended[places.rows - lag] * weight[:, num_past - lag]
    return (y if bias is None else y + bias), extended[places.kept]


Step = Callable[..., tuple[Tensor, Tensor]]
"""One token of each sequence: inputs (S, H, …) and the memories; outputs (S, H, V), memories."""


class Terms(NamedTuple):
    """What a rule makes of chunks, so that only the memory goes from one chunk to the next."""

    reads: Tensor
    """(chunks, H, c, K): queries, with the decay since the chunk's start."""

    within: Tensor
    """(chunks, H, c, c): how much each token takes of the chunk's own values."""

    values: Tensor
    """(chunks, H, c, V): what is to be added to the memory."""

    foreseen: Tensor | None
    """(chunks, H, c, K): keys to what the memory at the chunk's start says of `values` already."""

    writes: Tensor
    """(chunks, H, c, K): keys, with the decay until the chunk's end."""

    decay: Tensor
    """(chunks, H, 1, 1): of the memory, over the whole chunk."""


def recur(
    step: Step,
    terms: Callable[..., Terms],
    inputs: Sequence[Tensor],
    walk: Walk,
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run a rule over packed sequences, from the memories (S, H, K, V) before them.

    `inputs` are (N, H, …) each. Answers the outputs (N, H, V) and the memories after.
    """
    if walk.are_single:
        return step(*inputs, memory)
    if 1 not in walk.lengths:
        return _scan(terms, inputs, walk, memory)
    singles, longer = walk.parts(memory.device)
    outputs = []
    memories = []
    for part in (singles, longer):
        chosen = [x[part.rows] for x in inputs]
        y, after = recur(step, terms, chosen, part.walk, memory[part.sequences])
        outputs.append(y)
        memories.append(after)
    back = torch.argsort(torch.cat([singles.rows, longer.rows]))
    order = torch.argsort(torch.cat([singles.sequences, longer.sequences]))
    return torch.cat(outputs)[back], torch.cat(memories)[order]


def decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From log-decays (…, c): since the chunk's start, until its end, and from column to row."""
    # Differences of long sums are wanted to float32's precision. Apple's GPUs have no float64.
    total = (g.cpu() if g.device.type == "mps" else g).double().cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    since, until, between = (
        x.to(g.dtype).to(g.device) for x in (total, total[..., -1:] - total, between)
    )
    size = g.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    return since.exp(), until.exp(), between.masked_fill(later, float("-inf")).exp()


def _scan(
    terms: Callable[..., Terms], inputs: Sequence[Tensor], walk: Walk, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunks of all sequences at once, and the memory from each to its next."""
    chunks = walk.chunks(memory.device)
    # (N, H, …) to (chunks, H, c, …); a chunk is filled up with zeros, which change nothing.
    filled = [F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))[chunks.rows].transpose(1, 2) for x in inputs]
    made = [
        part.split(chunks.counts) if part is not None else itertools.repeat(None)
        for part in terms(*filled)
    ]
    state = memory[chunks.order]
    outputs: list[Tensor] = []
    ended: list[Tensor] = []
    for reads, within, values, foreseen, writes, decay in zip(*made, strict=False):
        if len(reads) < len(state):
            ended.append(state[len(reads) :])
            state = state[: len(reads)]
        news = values if foreseen is None else values - foreseen @ state
        outputs.append(reads @ state + within @ news)
        state = state * decay + writes.transpose(2, 3) @ news
    ended.append(state)
    # (chunks, H, c, V) back to (N, H, V); the sequences that ended last stand first.
    rows = torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.back]
    return rows, torch.cat(ended[::-1])[torch.argsort(chunks.order)]


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)
