"""The cache: blocks that never move, who reads them, the budget, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.recurrent.recurrence import StateShape
from tinsmith.engine.local.sample.kvcache import BlockTable, CacheShape, KVCache
from tinsmith.engine.local.sample.prefixes import NOTHING, Realm, shared_prefix
from tinsmith.errors import EngineError

SHAPE = CacheShape(2, 2, 4, 512, torch.device("cpu"), torch.float32)
SIZE = SHAPE.block_tokens
STATE = StateShape(num_layers=3, taps=4, channels=6, num_heads=2, key_dim=4, value_dim=5)
WITH_STATES = replace(SHAPE, state=STATE)
BARE = Realm("", None)


def cache_of(num_blocks: int, shape: CacheShape = SHAPE) -> KVCache:
    """A cache with room for so many blocks, and half as much again in states if it has any."""
    share = 2 if shape.state_bytes else 1
    return KVCache(shape, share * num_blocks * shape.block_bytes)


def table_of(cache: KVCache, num_tokens: int) -> BlockTable:
    """A prompt of so many tokens that has been read."""
    table = cache.new_table(num_tokens, NOTHING, num_samples=1, force=True)
    assert table is not None
    table.num_tokens = num_tokens
    return table


def write(cache: KVCache, table: BlockTable, number: float) -> None:
    cache.keys[:, table.blocks] = number
    cache.values[:, table.blocks] = -number


def content(cache: KVCache, table: BlockTable) -> set[float]:
    assert torch.equal(cache.keys[:, table.blocks], -cache.values[:, table.blocks])
    return set(cache.keys[:, table.blocks].flatten().tolist())


def prompt(token: int, num_blocks: int) -> np.ndarray:
    return np.full(num_blocks * SIZE, token)


def remember(cache: KVCache, realm: Realm, tokens: np.ndarray) -> BlockTable:
    table = table_of(cache, len(tokens))
    cache.remember(realm, tokens, table)
    return table


# Blocks


def test_a_sequence_grows_by_a_block_at_a_time_and_nothing_moves() -> None:
    cache = cache_of(10)
    table = table_of(cache, SIZE)
    write(cache, table, 3.0)
    before, address = list(table.blocks), cache.keys.data_ptr()
    for num_tokens in range(SIZE, 3 * SIZE):
        table.num_tokens = num_tokens
        assert cache.extend(table, num_tokens + 1)
    assert len(table.blocks) == 3
    assert (table.blocks[:1], cache.keys.data_ptr()) == (before, address)
    assert set(cache.keys[:, before].flatten().tolist()) == {3.0}


def test_samples_share_full_blocks_and_copy_the_last_when_they_write_to_it() -> None:
    cache = cache_of(10)
    table = table_of(cache, 2 * SIZE + 5)
    write(cache, table, 7.0)
    samples = [cache.fork(table) for _ in range(3)]
    cache.free(table)
    assert cache.nbytes == 3 * SHAPE.block_bytes, "all of it is shared"
    for sample in samples:
        assert cache.extend(sample, sample.num_tokens + 1)
        assert content(cache, sample) == {7.0}
    assert len({tuple(sample.blocks[:2]) for sample in samples}) == 1
    assert len({sample.blocks[2] for sample in samples}) == 3
    assert cache.nbytes == 5 * SHAPE.block_bytes, "the last who reads a block needs no copy"
    for sample in samples:
        cache.free(sample)
    assert cache.nbytes == 0


def test_states_are_copied_when_they_are_changed_and_count_as_memory() -> None:
    cache = cache_of(10, WITH_STATES)
    table = table_of(cache, 5)
    assert table.state is not None
    cache.states[:, table.state] = 1.0
    sample = cache.fork(table)
    assert cache.nbytes == SHAPE.block_bytes + STATE.nbytes
    assert cache.extend(sample, 6)
    assert sample.state is not None
    assert sample.state != table.state
    cache.states[:, sample.state] = 2.0
    assert (cache.states[:, table.state] == 1.0).all()
    assert cache.nbytes == 2 * (SHAPE.block_bytes + STATE.nbytes)
    cache.free(sample)
    cache.free(table)
    assert cache.nbytes == 0
    fresh = table_of(cache, 5)
    assert not cache.states[:, fresh.state].any(), "a sequence begins in a state of zeros"


def test_the_budget_is_kept_unless_forced() -> None:
    cache = cache_of(4)
    table = table_of(cache, 3 * SIZE)
    assert cache.new_table(SIZE, NOTHING, num_samples=1) is None, "nor the token that follows"
    assert cache.extend(table, 3 * SIZE + 1)
    assert not cache.extend(table, 4 * SIZE + 1)
    assert cache.nbytes == cache.max_bytes
    assert cache.extend(table, 4 * SIZE + 1, force=True)


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    """Where memory is taken as a whole, nobody goes beyond it."""
    shape = replace(SHAPE, device=torch.device("meta"))
    cache = KVCache(shape, 4 * shape.block_bytes, has_padding=False)
    table = cache.new_table(3 * SIZE, NOTHING, num_samples=1, force=True)
    assert table is not None
    table.num_tokens = 4 * SIZE
    with pytest.raises(EngineError, match=rf"{4 * SIZE + 1} tokens .*{cache.max_bytes:,}.*raise"):
        cache.extend(table, 4 * SIZE + 1, force=True)
    cache.free(table)
    with pytest.raises(EngineError, match="raise kv_cache_bytes"):
        cache.new_table(4 * SIZE, NOTHING, num_samples=1, force=True)
    assert cache.nbytes == 0, "what failed holds nothing"


def test_a_block_that_is_used_again_holds_nothing_of_its_past() -> None:
    cache = cache_of(2)
    broken = table_of(cache, SIZE)
    write(cache, broken, float("nan"))
    cache.free(broken)
    for _ in range(2):
        assert content(cache, table_of(cache, 1)) == {0.0}


# Remembered prompts


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([], [1], 0), ([5], [5], 1)],
)
def test_the_shared_prefix_is_counted(left: list[int], right: list[int], wanted: int) -> None:
    assert shared_prefix(np.array(left), np.array(right)) == wanted


def test_the_blocks_that_a_prompt_begins_with_are_found_under_the_same_adapter() -> None:
    cache = cache_of(100)
    other = Realm("", cast(Adapter, object()))
    one = remember(cache, BARE, np.concatenate([prompt(1, 2), prompt(2, 1)]))
    two = remember(cache, other, prompt(1, 3))
    assert cache.known(BARE, prompt(1, 4)).blocks == one.blocks[:2]
    assert cache.known(other, prompt(1, 4)).blocks == two.blocks
    assert cache.known(BARE, prompt(1, 2)[:-1]).num_tokens == SIZE, "full blocks only"
    assert cache.known(BARE, np.concatenate([prompt(2, 1), prompt(1, 1)])) == ([], 0, None)


def test_a_prompt_of_another_scope_is_never_found() -> None:
    cache = cache_of(100)
    table = remember(cache, Realm("ann", None), prompt(1, 2))
    assert cache.known(Realm("bob", None), prompt(1, 2)) == NOTHING
    assert cache.known(Realm("ann", None), prompt(1, 2)).blocks == table.blocks


def test_a_prompt_takes_what_is_known_and_needs_room_for_the_rest() -> None:
    cache = cache_of(6)
    first = remember(cache, BARE, prompt(1, 3))
    known = cache.known(BARE, prompt(1, 3))
    table = cache.new_table(5 * SIZE, known, num_samples=1)
    assert table is not None
    assert table.blocks[:3] == first.blocks
    assert (table.num_tokens, cache.nbytes) == (3 * SIZE, 5 * SHAPE.block_bytes)


def test_the_scope_that_keeps_most_gives_way_first_with_what_it_used_least_recently() -> None:
    cache = cache_of(7)
    for scope, token in [("bob", 0), *[("ann", token) for token in range(1, 6)]]:
        cache.free(remember(cache, Realm(scope, None), prompt(token, 1)))
    read = cache.new_table(SIZE, cache.known(Realm("ann", None), prompt(1, 1)), num_samples=0)
    assert read is not None
    cache.free(read)
    assert cache.new_table(3 * SIZE, NOTHING, num_samples=1) is not None
    kept = [token for token in range(1, 6) if cache.known(Realm("ann", None), prompt(token, 1))[1]]
    assert kept == [1, 5], "2, 3 and 4 were used before 5, and 1 after"
    assert cache.known(Realm("bob", None), prompt(0, 1)).num_tokens, "the oldest, and bob's only"


def test_what_is_read_is_not_forgotten_and_of_a_prompt_the_end_goes_first() -> None:
    cache = cache_of(5)
    read = remember(cache, BARE, prompt(1, 2))
    cache.free(remember(cache, BARE, prompt(2, 3)))
    assert cache.new_table(SIZE, NOTHING, num_samples=0) is not None
    assert cache.known(BARE, prompt(2, 3)).num_tokens == 2 * SIZE
    assert cache.new_table(3 * SIZE, NOTHING, num_samples=0) is None
    assert cache.known(BARE, prompt(1, 2)).blocks == read.blocks


def test_forgetting_an_adapter_leaves_blocks_that_are_still_read() -> None:
    cache = cache_of(10)
    read = remember(cache, BARE, prompt(1, 2))
    cache.free(remember(cache, BARE, prompt(2, 2)))
    cache.forget(None)
    assert cache.nbytes == 2 * SHAPE.block_bytes
    assert cache.known(BARE, prompt(1, 2)) == NOTHING
    cache.free(read)
    assert cache.nbytes == 0


def test_with_states_the_longest_whole_prompt_is_found_and_may_be_continued() -> None:
    cache = cache_of(20, WITH_STATES)
    short, long = np.arange(SIZE + 3), np.arange(2 * SIZE + 3)
    for tokens in (short, long):
        table = remember(cache, BARE, tokens)
        cache.states[:, table.state] = float(len(tokens))
        cache.free(table)
    known = cache.known(BARE, np.arange(2 * SIZE))
    assert known.num_tokens == len(short)
    longer = cache.new_table(2 * SIZE, known, num_samples=1)
    assert longer is not None
    assert (cache.states[:, longer.state] == len(short)).all()
    assert (longer.state, longer.blocks[1]) != (known.state, known.blocks[1]), "its own to change"
    assert longer.blocks[0] == known.blocks[0]
    assert cache.known(BARE, short[:-1]) == NOTHING
    cache.free(longer)
    cache.forget(None)
    assert cache.nbytes == 0


def test_with_states_the_oldest_prompt_of_the_scope_with_most_gives_way() -> None:
    cache = cache_of(4, WITH_STATES)
    ann, bob = Realm("ann", None), Realm("bob", None)
    for realm, token in ((bob, 0), (ann, 1), (ann, 2), (ann, 3)):
        table = cache.new_table(SIZE, NOTHING, num_samples=1)
        assert table is not None
        table.num_tokens = SIZE
        cache.remember(realm, prompt(token, 1), table)
        cache.free(table)
    assert [bool(cache.known(ann, prompt(token, 1)).num_tokens) for token in (1, 2, 3)] == [
        False,
        True,
        True,
    ]
    assert cache.known(bob, prompt(0, 1)).num_tokens, "the oldest, and bob's only one"


def test_whatever_was_remembered_the_longest_beginning_is_found() -> None:
    """Against a look at every prompt, over many prompts of few tokens."""
    random = np.random.default_rng(0)
    cache = cache_of(10_000)
    kept: list[np.ndarray] = []
    for _ in range(200):
        tokens, asked = (
            np.repeat(random.integers(0, 2, random.integers(1, 6)), SIZE // 2) for _ in range(2)
        )
        cache.free(remember(cache, BARE, tokens))
        kept.append(tokens)
        longest = max(shared_prefix(known[: len(known) // SIZE * SIZE], asked) for known in kept)
        assert cache.known(BARE, asked).num_tokens == longest // SIZE * SIZE
    distinct = {block.tobytes() for t in kept for block in ends_of_blocks(t)}
    assert cache.nbytes == len(distinct) * SHAPE.block_bytes, "each block is kept once"


def ends_of_blocks(tokens: np.ndarray) -> list[np.ndarray]:
    return [tokens[:stop] for stop in range(SIZE, len(tokens) + 1, SIZE)]
