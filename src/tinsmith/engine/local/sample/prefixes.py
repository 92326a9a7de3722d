"""Prompts worth remembering: spans of finished prefills, found again by the tokens they begin with.

Entries belong to an adapter (or the bare model), since its weights went into the keys and values,
and to a scope: nobody may learn from a hit, or from its speed, what another scope has asked. They
are kept in the order of their tokens, where the one that shares most with a prompt is its
neighbour. The scope whose entries take the most memory gives way first, with its least recently
used entry that no sequence reads.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.kvcache import Span

_MAX_ENTRIES = 4096
"""More would cost memory for tokens and order without being found again."""


class Realm(NamedTuple):
    """Within one, prompts may be shared."""

    scope: str
    adapter: Adapter | None


@dataclass(frozen=True, slots=True)
class _Entry:
    realm: Realm
    tokens: np.ndarray
    span: Span


class Prefixes:
    """Remembered prompts. Whoever removes one frees its memory: see `evict` and `forget`."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._recent: dict[str, OrderedDict[int, None]] = {}
        """For each scope its entries, the one used last at the end."""
        self._bytes: Counter[str] = Counter()
        """What each scope's entries take."""
        self._order: dict[Realm, list[tuple[bytes, int]]] = {}
        """For each realm the entries' tokens and ids, sorted."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, span: Span) -> bool:
        return id(span) in self._entries

    def find(
        self, realm: Realm, tokens: np.ndarray, *, only_whole: bool = False
    ) -> tuple[Span | None, int]:
        """An entry that shares the longest beginning with `tokens`, and how much of it.

        With `only_whole` it is one that `tokens` begins with.
        """
        best, longest = self._whole(realm, tokens) if only_whole else self._nearest(realm, tokens)
        if best is None:
            return None, 0
        self._recent[realm.scope].move_to_end(id(best.span))
        return best.span, longest

    def _whole(self, realm: Realm, tokens: np.ndarray) -> tuple[_Entry | None, int]:
        found = self._prefixes_of(realm, tokens)
        return (found[0], len(found[0].tokens)) if found else (None, 0)

    def _nearest(self, realm: Realm, tokens: np.ndarray) -> tuple[_Entry | None, int]:
        order = self._order.get(realm, [])
        place = bisect.bisect_left(order, (_sort_key(tokens), 0))
        best: _Entry | None = None
        longest = 0
        for _, name in order[max(0, place - 1) : place + 1]:
            entry = self._entries[name]
            shared = shared_prefix(entry.tokens, tokens)
            if shared > longest:
                best, longest = entry, shared
        return best, longest

    def remember(
        self, realm: Realm, tokens: np.ndarray, span: Span, *, only_whole: bool = False
    ) -> list[Span]:
        """Keep a prompt; the answer lists unused spans that this makes superfluous.

        Those are what `tokens` begins with; with `only_whole`, the same prompt.
        """
        entries = self._prefixes_of(realm, tokens)
        if only_whole:
            entries = [entry for entry in entries if len(entry.tokens) == len(tokens)]
        covered = [entry.span for entry in entries if not entry.span.num_users]
        for old in covered:
            self._remove(old)
        self._entries[id(span)] = _Entry(realm, tokens, span)
        self._recent.setdefault(realm.scope, OrderedDict())[id(span)] = None
        self._bytes[realm.scope] += span.nbytes
        bisect.insort(self._order.setdefault(realm, []), (_sort_key(tokens), id(span)))
        if len(self._entries) > _MAX_ENTRIES:
            oldest = self.evict()
            covered += [oldest] if oldest is not None else []
        return covered

    def _prefixes_of(self, realm: Realm, tokens: np.ndarray) -> list[_Entry]:
        """The entries whose tokens `tokens` begins with, the longest first."""
        order, key = self._order.get(realm, []), _sort_key(tokens)
        found = []
        place = _last_up_to(order, key)
        while place >= 0:
            entry = self._entries[order[place][1]]
            shared = shared_prefix(entry.tokens, tokens)
            if not shared:
                break
            if shared == len(entry.tokens):
                found.append(entry)
                place -= 1
            else:
                # Whatever `tokens` begins with is no longer than this and stands before it.
                place = _last_up_to(order, key[: shared * _KEY_BYTES])
        return found

    def _remove(self, span: Span) -> _Entry:
        entry = self._entries.pop(id(span))
        scope, order = entry.realm.scope, self._order[entry.realm]
        del order[bisect.bisect_left(order, (_sort_key(entry.tokens), id(span)))]
        if not order:
            del self._order[entry.realm]
        del self._recent[scope][id(span)]
        self._bytes[scope] -= span.nbytes
        if not self._recent[scope]:
            del self._recent[scope], self._bytes[scope]
        return entry

    def evict(self) -> Span | None:
        """Remove an entry that nobody reads; see the module's notes on which."""
        for scope, _ in self._bytes.most_common():
            for name in self._recent[scope]:
                if not self._entries[name].span.num_users:
                    return self._remove(self._entries[name].span).span
        return None

    def forget(self, adapter: Adapter | None) -> list[Span]:
        """Remove all entries of an adapter; the answer lists those that nobody reads."""
        spans = [e.span for e in self._entries.values() if e.realm.adapter is adapter]
        for span in spans:
            self._remove(span)
        return [span for span in spans if not span.num_users]


_KEY_BYTES = 4


def _sort_key(tokens: np.ndarray) -> bytes:
    """Bytes that sort as the tokens do."""
    return tokens.astype(">u4").tobytes()


def _last_up_to(order: list[tuple[bytes, int]], key: bytes) -> int:
    """The place of the last entry not beyond `key`, or -1."""
    return bisect.bisect_right(order, key, key=lambda item: item[0]) - 1


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens two sequences have in common at the start."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
