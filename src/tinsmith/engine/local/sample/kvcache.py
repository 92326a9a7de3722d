"""The memory that sampling keeps of tokens already seen, under one byte budget.

That is keys and values of every token, and for models with recurrent layers a state of fixed size,
which stands for all tokens up to where it is.

Two kinds of room, because prompts and continuations live differently. A *span* holds one prompt: it
is filled once, never changes, may be read by many sequences at a time, and is kept for later
prompts that begin alike (`prefixes`). A *slot* holds what one running sequence adds, or all of it
when its prompt is not shared: it grows. Slots of one capacity are rows of one tensor, a *slab*,
those that run without holes, so that attention over all of them is one batched product. A
sequence that outgrows its slot moves to one of twice the capacity, which bounds both the padding
and the copying.

This module hands out room and counts bytes; who gives way when there is none is the generator's
affair, which may also `force` its way past the budget for a sequence that runs alone.

Shapes: L layers that attend, R rows of a slab, K key/value heads, C capacity in tokens, D head
size, P recurrent layers, n numbers in the state of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.recurrent.recurrence import StateShape

_SMALLEST_SLOT = 64


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a token and a state cost, and where they are kept."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_context_length: int
    device: torch.device
    dtype: torch.dtype
    state: StateShape | None = None

    @classmethod
    def of(cls, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> CacheShape:
        return cls(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            config.max_context_length,
            device,
            dtype,
            config.state,
        )

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """What a span or a slot takes beside its tokens."""
        return 0 if self.state is None else self.state.nbytes

    def slot_capacity(self, num_tokens: int) -> int:
        """The smallest slot that holds so many tokens."""
        capacity = _SMALLEST_SLOT
        while capacity < num_tokens:
            capacity *= 2
        return min(capacity, max(self.max_context_length, num_tokens))

    def zeros(self, *rows_and_capacity: int) -> Tensor:
        """Room in which nothing is NaN: padding is read, though with weight zero."""
        *rows, capacity = rows_and_capacity
        size = (self.num_layers, *rows, self.num_kv_heads, capacity, self.head_dim)
        return torch.zeros(size, device=self.device, dtype=self.dtype)

    def zero_states(self, num_rows: int) -> Tensor:
        """(P, rows, n): states in which sequences begin."""
        layers, size = (0, 0) if self.state is None else (self.state.num_layers, self.state.size)
        return torch.zeros(layers, num_rows, size, device=self.device)


class Span:
    """The keys and values (L, K, C, D) of one prompt, and the state (P, 1, n) at its end."""

    def __init__(self, shape: CacheShape, num_tokens: int) -> None:
        self.keys = shape.zeros(num_tokens)
        self.values = shape.zeros(num_tokens)
        self.states = shape.zero_states(1)
        self.num_tokens = num_tokens
        self.num_users = 0
        """Sequences and prefills that read or fill it; the cache of prefixes is none of them."""

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.states.nbytes

    def copy_prefix(self, other: Span, num_tokens: int) -> None:
        """Take over the first tokens of another span; with states, all of its tokens."""
        assert not len(self.states) or num_tokens == other.num_tokens, "states are at the end only"
        self.states.copy_(other.states)
        self.keys[:, :, :num_tokens] = other.keys[:, :, :num_tokens]
        self.values[:, :, :num_tokens] = other.values[:, :, :num_tokens]


class Slot:
    """A running sequence's row of a slab. `row` changes when the slab closes a hole."""

    def __init__(self, slab: Slab, row: int) -> None:
        self.slab = slab
        self.row = row
        self.num_tokens = 0
        """How many tokens it holds; whoever writes to the slab counts."""

    @property
    def is_full(self) -> bool:
        return self.num_tokens >= self.slab.capacity


class Slab:
    """Slots of one capacity: keys and values (L, R, K, C, D), and states (P, R, n).

    The first rows are those of running sequences, without holes; behind them are the paused ones.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[Slot] = []
        self._num_running = 0
        self._shape = shape
        self.keys = shape.zeros(0, capacity)
        self.values = shape.zeros(0, capacity)
        self.states = shape.zero_states(0)

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    @property
    def bytes_per_row(self) -> int:
        return self.capacity * self._shape.bytes_per_token + self._shape.state_bytes

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.bytes_per_row

    def resize(self, num_rows: int) -> None:
        used = len(self.slots)
        keys = self._shape.zeros(num_rows, self.capacity)
        values = self._shape.zeros(num_rows, self.capacity)
        keys[:, :used] = self.keys[:, :used]
        values[:, :used] = self.values[:, :used]
        states = self._shape.zero_states(num_rows)
        states[:, :used] = self.states[:, :used]
        self.keys, self.values, self.states = keys, values, states

    def take(self) -> Slot:
        """A slot among the running ones."""
        slot = Slot(self, len(self.slots))
        self.slots.append(slot)
        self.resume(slot)
        return slot

    def pause(self, slot: Slot) -> None:
        """Move a slot behind the running ones."""
        self._num_running -= 1
        self._swap(slot.row, self._num_running)

    def resume(self, slot: Slot) -> None:
        """Move a paused slot to the end of the running ones."""
        self._swap(slot.row, self._num_running)
        self._num_running += 1

    def give_back(self, slot: Slot) -> None:
        """Free a row; no hole is left among the running ones, nor behind them."""
        slot.num_tokens = 0
        if slot.row < self._num_running:
            self.pause(slot)
        self._swap(slot.row, len(self.slots) - 1)
        self.slots.pop()

    def _swap(self, one: int, other: int) -> None:
        """Exchange two rows and what they hold."""
        if one == other:
            return
        left, right = self.slots[one], self.slots[other]
        for tensor in (self.keys, self.values):
            kept = tensor[:, one, :, : left.num_tokens].clone()
            moved = slice(0, right.num_tokens)
            tensor[:, one, :, moved] = tensor[:, other, :, moved]
            tensor[:, other, :, : left.num_tokens] = kept
        self.states[:, [one, other]] = self.states[:, [other, one]]
        left.row, right.row = other, one
        self.slots[one], self.slots[other] = right, left


class KVCache:
    """Spans and slots under a budget.

    `evict` is asked for memory when there is none left: it drops a span that nobody uses and says
    whether it found one.
    """

    def __init__(self, shape: CacheShape, max_bytes: int, evict: Callable[[], bool]) -> None:
        self.shape = shape
        self.max_bytes = max_bytes
        self._evict = evict
        self._span_bytes = 0
        self._slabs: dict[int, Slab] = {}

    @property
    def nbytes(self) -> int:
        return self._span_bytes + sum(slab.nbytes for slab in self._slabs.values())

    @property
    def slabs(self) -> list[Slab]:
        return list(self._slabs.values())

    def new_span(self, num_tokens: int, *, num_slots: int, force: bool = False) -> Span | None:
        """An empty span with one user, or None when there is no room for it and what follows.

        What follows is one slot with the span's content, or `num_slots` that share it.
        """
        if not self._make_room(self.bytes_for_span(num_tokens, num_slots)) and not force:
            return None
        span = Span(self.shape, num_tokens)
        span.num_users = 1
        self._span_bytes += span.nbytes
        return span

    def bytes_for_span(self, num_tokens: int, num_slots: int) -> int:
        """What a span and the slots that follow it take."""
        follow = self.shape.slot_capacity(num_tokens + 1 if num_slots == 1 else 1) * num_slots
        states = (1 + num_slots) * self.shape.state_bytes
        return (num_tokens + follow) * self.shape.bytes_per_token + states

    def bytes_for_slot(self, num_tokens: int) -> int:
        capacity = self.shape.slot_capacity(num_tokens + 1)
        return capacity * self.shape.bytes_per_token + self.shape.state_bytes

    def drop_span(self, span: Span) -> None:
        self._span_bytes -= span.nbytes

    def new_slot(self, num_tokens: int, *, force: bool = False) -> Slot | None:
        """A slot that can hold so many tokens and one more, or None when there is no room."""
        capacity = self.shape.slot_capacity(num_tokens + 1)
        slab = self._slabs.get(capacity) or Slab(self.shape, capacity)
        used = len(slab.slots)
        if used == slab.num_rows and not self._widen(slab, force):
            return None
        self._slabs[capacity] = slab
        return slab.take()

    def fill_slot(self, slot: Slot, span: Span, num_tokens: int) -> None:
        """Copy the first tokens of a span into a slot, and the state at the span's end."""
        slot.slab.states[:, slot.row] = span.states[:, 0]
        slab, row = slot.slab, slot.row
        slab.keys[:, row, :, :num_tokens] = span.keys[:, :, :num_tokens]
        slab.values[:, row, :, :num_tokens] = span.values[:, :, :num_tokens]
        slot.num_tokens = num_tokens

    def grow(self, slot: Slot, *, force: bool = False) -> Slot | None:
        """A slot with room for one more token: this one, or a larger one with the same content."""
        if not slot.is_full:
            return slot
        larger = self.new_slot(slot.num_tokens, force=force)
        if larger is None:
            return None
        used = slot.num_tokens
        for name in ("keys", "values"):
            source, target = getattr(slot.slab, name), getattr(larger.slab, name)
            target[:, larger.row, :, :used] = source[:, slot.row, :, :used]
        larger.slab.states[:, larger.row] = slot.slab.states[:, slot.row]
        larger.num_tokens = used
        self.free_slot(slot)
        return larger

    def free_slot(self, slot: Slot, *, wipe: bool = False) -> None:
        """Give a slot back; `wipe` one that may hold numbers that are not finite."""
        slab = slot.slab
        if wipe:
            slab.keys[:, slot.row] = 0
            slab.values[:, slot.row] = 0
        slab.give_back(slot)
        if not slab.slots:
            del self._slabs[slab.capacity]

    def _widen(self, slab: Slab, force: bool) -> bool:
        """Twice the rows if there is room for them, else one more."""
        used = len(slab.slots)
        for num_rows in (2 * used, used + 1):
            if num_rows > used and self._make_room((num_rows - used) * slab.bytes_per_row):
                slab.resize(num_rows)
                return True
        if force:
            slab.resize(used + 1)
        return force

    def _make_room(self, num_bytes: int) -> bool:
        while self.nbytes + num_bytes > self.max_bytes:
            if not self._evict() and not self._trim():
                return False
        return True

    def _trim(self) -> bool:
        """Give up rows that no sequence uses; whether there were any."""
        loose = [slab for slab in self._slabs.values() if slab.num_rows > len(slab.slots)]
        for slab in loose:
            slab.resize(len(slab.slots))
        return bool(loose)
