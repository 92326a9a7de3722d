"""Prompts worth remembering: spans of finished prefills, found again by the tokens they begin with.

Entries belong to an adapter (or the bare model), since its weights went into the keys and values.
The least recently used entry that no sequence reads gives way first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from tinsmith.engine.local.kvcache import Span
from tinsmith.engine.local.lora import Adapter

_MAX_ENTRIES = 1024
"""More would make the search, which looks at every entry of an adapter, noticeable."""


@dataclass(frozen=True, slots=True)
class _Entry:
    adapter: Adapter | None
    tokens: np.ndarray
    span: Span


class Prefixes:
    """Remembered prompts. Whoever removes one frees its memory: see `evict` and `forget`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, span: Span) -> bool:
        return id(span) in self._entries

    def find(self, adapter: Adapter | None, tokens: np.ndarray) -> tuple[Span | None, int]:
        """The entry that shares the longest beginning with `tokens`, and how much of it."""
        best: _Entry | None = None
        longest = 0
        for entry in self._entries.values():
            if entry.adapter is adapter:
                shared = shared_prefix(entry.tokens, tokens)
                if shared > longest:
                    best, longest = entry, shared
        if best is None:
            return None, 0
        self._entries.move_to_end(id(best.span))
        return best.span, longest

    def remember(self, adapter: Adapter | None, tokens: np.ndarray, span: Span) -> list[Span]:
        """Keep a prompt; the answer lists unused spans that this makes superfluous."""
        covered = [
            entry.span
            for entry in self._entries.values()
            if entry.adapter is adapter
            and not entry.span.num_users
            and shared_prefix(entry.tokens, tokens) == len(entry.tokens)
        ]
        for old in covered:
            del self._entries[id(old)]
        self._entries[id(span)] = _Entry(adapter, tokens, span)
        if len(self._entries) > _MAX_ENTRIES:
            oldest = self.evict()
            covered += [oldest] if oldest is not None else []
        return covered

    def evict(self) -> Span | None:
        """Remove the least recently used entry that nobody reads."""
        for entry in self._entries.values():
            if not entry.span.num_users:
                return self._entries.pop(id(entry.span)).span
        return None

    def forget(self, adapter: Adapter | None) -> list[Span]:
        """Remove all entries of an adapter; the answer lists those that nobody reads."""
        spans = [entry.span for entry in self._entries.values() if entry.adapter is adapter]
        for span in spans:
            del self._entries[id(span)]
        return [span for span in spans if not span.num_users]


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens two sequences have in common at the start."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
