"""The cache's bookkeeping: rows without holes, growth, the budget, remembered prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.recurrent.recurrence import StateShape
from tinsmith.engine.local.sample.kvcache import CacheShape, KVCache, Slot, Span
from tinsmith.engine.local.sample.prefixes import Prefixes, Realm, shared_prefix

SHAPE = CacheShape(2, 2, 4, 512, torch.device("cpu"), torch.float32)
TOKEN = SHAPE.bytes_per_token


BARE = Realm("", None)


def cache_of(num_tokens: int, prefixes: Prefixes | None = None) -> KVCache:
    """A cache with room for so many tokens."""

    def evict() -> bool:
        span = prefixes.evict() if prefixes is not None else None
        if span is not None:
            cache.drop_span(span)
        return span is not None

    cache = KVCache(SHAPE, num_tokens * TOKEN, evict)
    return cache


def write(slot: Slot, number: float, num_tokens: int) -> None:
    slot.slab.keys[:, slot.row, :, :num_tokens] = number
    slot.slab.values[:, slot.row, :, :num_tokens] = -number
    slot.num_tokens = num_tokens


def content(slot: Slot) -> set[float]:
    keys = slot.slab.keys[:, slot.row, :, : slot.num_tokens]
    values = slot.slab.values[:, slot.row, :, : slot.num_tokens]
    assert torch.equal(keys, -values)
    return set(keys.flatten().tolist())


def test_rows_stay_without_holes_and_keep_their_content() -> None:
    cache = cache_of(10_000)
    slots = [cache.new_slot(10) for _ in range(5)]
    for number, slot in enumerate(slots, 1):
        assert slot is not None
        write(slot, number, 10)
    first, second, third, fourth, fifth = (slot for slot in slots if slot)
    cache.free_slot(second)
    cache.free_slot(fifth if fifth.row == 3 else fourth)
    rest = [slot for slot in (first, third, fourth, fifth) if slot in slot.slab.slots]
    assert sorted(slot.row for slot in rest) == [0, 1, 2]
    for slot in rest:
        assert content(slot) == {slots.index(slot) + 1.0}


def test_a_full_slot_grows_into_a_larger_one_with_the_same_content() -> None:
    cache = cache_of(10_000)
    slot = cache.new_slot(0)
    assert slot is not None
    write(slot, 3.0, slot.slab.capacity)
    grown = cache.grow(slot)
    assert grown is not None
    assert grown.slab.capacity == 128
    assert content(grown) == {3.0}
    assert cache.grow(grown) is grown
    assert [slab.capacity for slab in cache.slabs] == [128]


def test_states_count_as_memory() -> None:
    """A span and the slots that follow it need one each, and so does every row of a slab."""
    state = StateShape(num_layers=3, taps=4, channels=6, num_heads=2, key_dim=4, value_dim=5)
    shape = replace(SHAPE, state=state)
    needed = (10 + 2 * 64) * TOKEN + 3 * state.nbytes
    for room, is_enough in ((needed, True), (needed - 1, False)):
        cache = KVCache(shape, room, lambda: False)
        span = cache.new_span(10, num_slots=2)
        assert (span is not None) == is_enough
    cache = KVCache(shape, needed, lambda: False)
    assert cache.new_span(10, num_slots=2) is not None
    slot = cache.new_slot(0)
    assert slot is not None
    slab = slot.slab
    held = slab.keys.nbytes + slab.values.nbytes + slab.states.nbytes
    assert cache.nbytes == 10 * TOKEN + state.nbytes + held
    assert held == cache.bytes_for_slot(0)
    assert cache.new_slot(0) is not None and cache.new_slot(0) is None


def test_no_slot_is_larger_than_the_context() -> None:
    assert CacheShape(1, 1, 1, 100, torch.device("cpu"), torch.float32).slot_capacity(90) == 100


def test_the_budget_is_kept_unless_forced() -> None:
    cache = cache_of(128)
    slot = cache.new_slot(0)
    assert slot is not None
    write(slot, 1.0, 64)
    assert cache.grow(slot) is None
    assert cache.new_slot(100) is None
    assert cache.new_span(65, num_slots=1) is None
    assert cache.nbytes <= cache.max_bytes
    grown = cache.grow(slot, force=True)
    assert grown is not None
    assert content(grown) == {1.0}


def test_unused_rows_are_given_up_when_memory_is_short() -> None:
    cache = cache_of(64 * 4)
    slots = [cache.new_slot(0) for _ in range(3)]  # rows double: room for four is taken
    assert cache.nbytes == 64 * 4 * TOKEN
    for slot in slots[:2]:
        assert slot is not None
        cache.free_slot(slot)
    assert cache.new_slot(100) is not None


def test_bytes_are_counted_back_to_zero() -> None:
    cache = cache_of(10_000)
    span = cache.new_span(100, num_slots=1)
    slots = [cache.new_slot(count) for count in (0, 70, 200)]
    assert span is not None
    cache.drop_span(span)
    for slot in slots:
        assert slot is not None
        cache.free_slot(slot)
    assert cache.nbytes == 0
    assert cache.slabs == []


def test_a_wiped_row_holds_nothing_of_its_past() -> None:
    cache = cache_of(1000)
    slots = [cache.new_slot(0), cache.new_slot(0)]
    broken, other = (slot for slot in slots if slot)
    write(broken, float("nan"), 64)
    write(other, 1.0, 5)
    slab = broken.slab
    cache.free_slot(broken, wipe=True)
    assert torch.isfinite(slab.keys).all()
    assert torch.isfinite(slab.values).all()


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([], [1], 0), ([5], [5], 1)],
)
def test_the_shared_prefix_is_counted(left: list[int], right: list[int], wanted: int) -> None:
    assert shared_prefix(np.array(left), np.array(right)) == wanted


def test_the_longest_match_of_the_same_adapter_is_found() -> None:
    prefixes, cache = Prefixes(), cache_of(10_000)
    spans = [cache.new_span(4, num_slots=1) for _ in range(3)]
    one, two, three = (span for span in spans if span)
    other = Realm("", cast(Adapter, object()))
    prefixes.remember(BARE, np.array([1, 2, 3, 4]), one)
    prefixes.remember(BARE, np.array([1, 2, 9, 9]), two)
    prefixes.remember(other, np.array([1, 2, 9, 8]), three)
    assert prefixes.find(BARE, np.array([1, 2, 9, 8])) == (two, 3)
    assert prefixes.find(other, np.array([1, 2, 9, 8])) == (three, 4)
    assert prefixes.find(BARE, np.array([7])) == (None, 0)


def test_a_prompt_of_another_scope_is_never_found() -> None:
    prefixes, cache = Prefixes(), cache_of(10_000)
    span = cache.new_span(4, num_slots=1)
    assert span is not None
    prefixes.remember(Realm("ann", None), np.array([1, 2, 3, 4]), span)
    assert prefixes.find(Realm("bob", None), np.array([1, 2, 3, 4])) == (None, 0)
    assert prefixes.find(Realm("ann", None), np.array([1, 2, 3, 4])) == (span, 4)


def test_the_scope_that_remembers_most_gives_way_first() -> None:
    prefixes = Prefixes()
    cache = cache_of(100_000, prefixes)
    spans = {}
    for scope, token in [("bob", 0), *[("ann", token) for token in range(1, 6)]]:
        spans[token] = cache.new_span(64, num_slots=1)
        spans[token].num_users = 0
        prefixes.remember(Realm(scope, None), np.full(64, token), spans[token])
    gone = [prefixes.evict() for _ in range(4)]
    assert gone == [spans[token] for token in (1, 2, 3, 4)], "bob's is the oldest, and stays"


def test_the_least_recently_used_idle_prompt_gives_way() -> None:
    prefixes = Prefixes()
    cache = cache_of(340, prefixes)
    spans = []
    for token in (1, 2, 3):
        span = cache.new_span(64, num_slots=1)
        assert span is not None
        prefixes.remember(BARE, np.full(64, token), span)
        spans.append(span)
    for span in (spans[0], spans[2]):
        span.num_users = 0
    prefixes.find(BARE, np.full(64, 1))
    assert cache.new_span(64, num_slots=1) is not None
    assert [span in prefixes for span in spans] == [True, True, False]


def test_a_prompt_that_contains_an_idle_one_replaces_it() -> None:
    prefixes, cache = Prefixes(), cache_of(10_000)
    short, long = cache.new_span(2, num_slots=1), cache.new_span(3, num_slots=1)
    assert short is not None
    assert long is not None
    prefixes.remember(BARE, np.array([1, 2]), short)
    short.num_users = 0
    assert prefixes.remember(BARE, np.array([1, 2, 3]), long) == [short]
    assert len(prefixes) == 1


def test_forgetting_an_adapter_leaves_spans_that_are_still_read() -> None:
    prefixes, cache = Prefixes(), cache_of(10_000)
    read, idle = cache.new_span(2, num_slots=1), cache.new_span(2, num_slots=1)
    assert read is not None
    assert idle is not None
    idle.num_users = 0
    prefixes.remember(BARE, np.array([1, 2]), read)
    prefixes.remember(BARE, np.array([3, 4]), idle)
    assert prefixes.forget(None) == [idle]
    assert len(prefixes) == 0


def test_whatever_was_remembered_the_longest_match_is_found_and_covered_prompts_go() -> None:
    """Against a look at every entry, over many short prompts of few tokens."""
    random = np.random.default_rng(0)
    for _ in range(50):
        prefixes = Prefixes()
        kept: list[tuple[np.ndarray, Span]] = []
        for _ in range(30):
            tokens, asked = (random.integers(0, 3, random.integers(1, 8)) for _ in range(2))
            span = Span(SHAPE, len(tokens))
            span.num_users = int(random.integers(0, 2))
            covered = [
                old
                for known, old in kept
                if not old.num_users and shared_prefix(known, tokens) == len(known)
            ]
            gone = prefixes.remember(BARE, tokens, span)
            assert {id(old) for old in gone} == {id(old) for old in covered}
            kept = [(known, old) for known, old in kept if old not in gone] + [(tokens, span)]
            _, num_shared = prefixes.find(BARE, asked)
            assert num_shared == max(shared_prefix(known, asked) for known, _ in kept)
            assert len(prefixes) == len(kept)
