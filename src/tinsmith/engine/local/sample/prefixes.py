"""Prompts worth remembering: what they left in the cache, found by the tokens they begin with.

Only within one realm, that is one adapter (or the bare model), since its weights went into the keys
and values, and one scope: nobody may learn from a hit, or from its speed, what another scope has
asked.

`Prefixes` remembers full blocks, each under a hash of its tokens and all before them, so that any
prompt finds what it has in common with earlier ones, a block at a time. A model with recurrent
layers can go on only where a state is known: `WholePrompts` remembers the ends of prompts.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.pages import Pages


class Realm(NamedTuple):
    """Within one, prompts may be shared."""

    scope: str
    adapter: Adapter | None


class Known(NamedTuple):
    """What the cache has of the beginning of a prompt."""

    blocks: Sequence[int] = ()
    num_tokens: int = 0
    state: int | None = None


NOTHING = Known()


class Readers(NamedTuple):
    """Who reads which blocks and states, counted for both at once."""

    blocks: Pages
    states: Pages

    def share(self, held: Known) -> None:
        for block in held.blocks:
            self.blocks.share(block)
        if held.state is not None:
            self.states.share(held.state)

    def leave(self, held: Known) -> None:
        # From the end, so that of a prompt the last block is the first to be forgotten.
        for block in reversed(held.blocks):
            self.blocks.leave(block)
        if held.state is not None:
            self.states.leave(held.state)


class Prefixes:
    """Full blocks of prompts. They are kept in `pages`, which also says which of them goes."""

    def __init__(self, pages: Pages, block_tokens: int) -> None:
        self._pages = pages
        self._block_tokens = block_tokens
        self._blocks: dict[Realm, dict[bytes, int]] = {}
        self._keys: dict[int, tuple[Realm, bytes]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, realm: Realm, tokens: np.ndarray) -> Known:
        """The blocks that `tokens` begins with."""
        known = self._blocks.get(realm)
        if not known:
            return NOTHING
        blocks: list[int] = []
        for key in self._keys_of(tokens):
            block = known.get(key)
            if block is None:
                break
            blocks.append(block)
        return Known(blocks, len(blocks) * self._block_tokens)

    def remember(self, realm: Realm, tokens: np.ndarray, held: Known) -> None:
        """Keep the full blocks of a prompt, as far as they are not known already."""
        known = self._blocks.setdefault(realm, {})
        for key, block in zip(self._keys_of(tokens), held.blocks, strict=False):
            if key not in known:
                known[key] = block
                self._keys[block] = (realm, key)
                self._pages.keep(block, realm.scope)
        if not known:
            del self._blocks[realm]

    def evict(self) -> bool:
        """Free a block that nobody reads; whether there was one."""
        block = self._pages.drop_oldest()
        if block is not None:
            self._remove(block)
        return block is not None

    def forget(self, adapter: Adapter | None) -> None:
        """Drop what belongs to an adapter; what is still read stays until it is not."""
        for block in [b for b, (realm, _) in self._keys.items() if realm.adapter is adapter]:
            self._remove(block)
            self._pages.drop(block)

    def _remove(self, block: int) -> None:
        realm, key = self._keys.pop(block)
        del self._blocks[realm][key]
        if not self._blocks[realm]:
            del self._blocks[realm]

    def _keys_of(self, tokens: np.ndarray) -> Sequence[bytes]:
        return block_keys(tokens, self._block_tokens)


def block_keys(tokens: np.ndarray, block_tokens: int) -> list[bytes]:
    """For each full block a hash of its tokens and of all before them."""
    keys, key = [], b""
    tokens = np.ascontiguousarray(tokens, dtype=np.int64)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[start : start + block_tokens].tobytes()
        key = hashlib.blake2b(key + block, digest_size=16).digest()
        keys.append(key)
    return keys


class WholePrompts:
    """Whole prompts: their blocks, the last of them partly filled, and the state at their end.

    A remembered prompt counts among the readers.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._prompts: dict[str, OrderedDict[tuple[Realm, bytes], Known]] = {}
        """For each scope its prompts, the one used last at the end."""
        self._lengths: dict[Realm, Counter[int]] = {}
        """How many prompts of each length a realm has."""

    def __len__(self) -> int:
        return sum(map(len, self._prompts.values()))

    def find(self, realm: Realm, tokens: np.ndarray) -> Known:
        """The longest prompt that `tokens` begins with."""
        for length in sorted(self._lengths.get(realm, ()), reverse=True):
            key = (realm, _prompt_key(tokens[:length]))
            found = self._prompts[realm.scope].get(key) if length <= len(tokens) else None
            if found is not None:
                self._prompts[realm.scope].move_to_end(key)
                return found
        return NOTHING

    def remember(self, realm: Realm, tokens: np.ndarray, held: Known) -> None:
        """Keep a prompt, unless it is known already or has no token."""
        key = (realm, _prompt_key(tokens))
        prompts = self._prompts.setdefault(realm.scope, OrderedDict())
        if held.num_tokens and key not in prompts:
            self._readers.share(held)
            prompts[key] = held
            self._lengths.setdefault(realm, Counter())[held.num_tokens] += 1
        if not prompts:
            del self._prompts[realm.scope]

    def evict(self) -> bool:
        """Forget the oldest prompt of the scope that has most; whether there was one."""
        if not self._prompts:
            return False
        most = max(self._prompts.values(), key=len)
        self._remove(next(iter(most)))
        return True

    def forget(self, adapter: Adapter | None) -> None:
        """Drop what belongs to an adapter."""
        keys = [key for prompts in self._prompts.values() for key in prompts]
        for realm, tokens in keys:
            if realm.adapter is adapter:
                self._remove((realm, tokens))

    def _remove(self, key: tuple[Realm, bytes]) -> None:
        realm, _ = key
        held = self._prompts[realm.scope].pop(key)
        if not self._prompts[realm.scope]:
            del self._prompts[realm.scope]
        self._lengths[realm][held.num_tokens] -= 1
        if not self._lengths[realm][held.num_tokens]:
            del self._lengths[realm][held.num_tokens]
        if not self._lengths[realm]:
            del self._lengths[realm]
        self._readers.leave(held)


def _prompt_key(tokens: np.ndarray) -> bytes:
    whole = np.ascontiguousarray(tokens, dtype=np.int64).tobytes()
    return hashlib.blake2b(whole, digest_size=16).digest()


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens two sequences have in common at the start."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
