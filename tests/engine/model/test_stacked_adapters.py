"""Adapters that are computed side by side give what each gives by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tinsmith.engine.local.model.adapted_linear import forward
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool, AdapterSegments, Run
from tinsmith.engine.local.model.stacked_adapters import AdapterStacks
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.types import AdamParams

KEYS = [(0, "qkv"), (1, "o"), (1, "gate_up"), (0, "down"), (None, "lm_head")]


def runs_of(*parts: tuple[Adapter | None, int]) -> list[Run]:
    runs: list[Run] = []
    for adapter, num_rows in parts:
        start = runs[-1][1] if runs else 0
        runs.append((start, start + num_rows, adapter))
    return runs


def stacked(runs: list[Run], stacks: AdapterStacks) -> AdapterSegments:
    """As after a few steps with the same runs."""
    segments = AdapterSegments(runs)
    for _ in range(4):
        segments.stacked = stacks.rows_of(runs)
    return segments


@pytest.fixture
def pool(tiny_decoder: Decoder) -> AdapterPool:
    return AdapterPool(tiny_decoder.config, tiny_decoder.device, tiny_decoder.dtype)


@pytest.fixture
def adapters(
    tiny_decoder: Decoder, pool: AdapterPool, new_adapter: Callable[..., Adapter]
) -> list[Adapter]:
    return [new_adapter(tiny_decoder, fill_seed=seed, pool=pool) for seed in range(5)]


def assert_alike(decoder: Decoder, found: AdapterSegments, expected: AdapterSegments) -> None:
    """Within 1e-5, which is rounding: B is random, and the adapters' part as large as the rest."""
    torch.manual_seed(0)
    for layer, name in KEYS:
        block = decoder.layers[layer or 0]
        linear = {"qkv": block.qkv, "o": block.o, "lm_head": decoder.head}.get(name)
        linear = linear or getattr(block.mlp, name)
        x = torch.randn(expected.num_rows, linear.shape[1])
        with torch.inference_mode():
            y, _ = forward(x, linear, found, (layer, name))
            wanted, _ = forward(x, linear, expected, (layer, name))
        torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-5)


def test_rows_find_their_own_adapter(tiny_decoder: Decoder, adapters: list[Adapter]) -> None:
    """As many rows of each, different numbers, beside the bare model, and beside a long run."""
    a, b, c, d, e = adapters
    for parts in (
        [(a, 2), (b, 2), (c, 2), (d, 2)],
        [(c, 1), (a, 3), (e, 2)],
        [(b, 2), (None, 3), (d, 2)],
        [(a, 1), (b, 30), (c, 2), (None, 1)],
    ):
        runs = runs_of(*parts)
        found = stacked(runs, AdapterStacks(1 << 30))
        assert found.stacked is not None
        assert b not in found.stacked.adapters or dict(parts)[b] < 30
        assert_alike(tiny_decoder, found, AdapterSegments(runs))


def test_some_of_the_rows_find_their_own_adapter(
    tiny_decoder: Decoder, adapters: list[Adapter]
) -> None:
    a, b, c, *_ = adapters
    runs = runs_of((a, 2), (None, 1), (b, 2), (c, 20))
    found = stacked(runs, AdapterStacks(1 << 30))
    for rows in ([1, 3, 4, 7], [2, 24], [3]):
        index = torch.tensor(rows)
        assert_alike(tiny_decoder, found.gather(index), AdapterSegments(runs).gather(index))


def test_adapters_that_train_other_parts_are_computed_by_themselves(
    tiny_decoder: Decoder,
    pool: AdapterPool,
    adapters: list[Adapter],
    new_adapter: Callable[..., Adapter],
) -> None:
    other = new_adapter(tiny_decoder, pool=pool, rank=2)
    narrow = new_adapter(tiny_decoder, pool=pool, train_mlp=False)
    a, b, *_ = adapters
    runs = runs_of((other, 2), (a, 2), (narrow, 1), (b, 2))
    found = stacked(runs, AdapterStacks(1 << 30))
    assert found.stacked is not None
    assert found.stacked.adapters == {a, b}
    assert_alike(tiny_decoder, found, AdapterSegments(runs))


def test_a_stack_serves_steps_with_fewer_of_its_adapters(
    tiny_decoder: Decoder, adapters: list[Adapter]
) -> None:
    stacks = AdapterStacks(1 << 30)
    stacked(runs_of(*((each, 2) for each in adapters)), stacks)
    a, b, c, *_ = adapters
    runs = runs_of((c, 2), (a, 1), (b, 1))
    segments = AdapterSegments(runs)
    segments.stacked = stacks.rows_of(runs)
    assert segments.stacked is not None
    assert_alike(tiny_decoder, segments, AdapterSegments(runs))
    # Not with so few that most would be computed in vain.
    assert stacks.rows_of(runs_of((a, 2), (b, 2))) is None


def test_weights_that_are_not_finite_stay_with_their_rows(
    tiny_decoder: Decoder, adapters: list[Adapter]
) -> None:
    a, b, *_ = adapters
    runs = runs_of((a, 2), (b, 1))
    a.flat.fill_(torch.inf)
    found = stacked(runs, AdapterStacks(1 << 30))
    x = torch.randn(3, tiny_decoder.config.hidden_size)
    with torch.inference_mode():
        y, _ = forward(x, tiny_decoder.layers[0].qkv, found, (0, "qkv"))
    assert not y[:2].isfinite().any()
    assert y[2].isfinite().all()


def test_a_stack_is_made_only_for_company_that_stays_and_fits(adapters: list[Adapter]) -> None:
    runs = runs_of(*((each, 2) for each in adapters))
    assert AdapterStacks(1 << 30).rows_of(runs) is None
    assert stacked(runs, AdapterStacks(adapters[0].flat.nbytes)).stacked is None
    assert stacked(runs_of((adapters[0], 4)), AdapterStacks(1 << 30)).stacked is None


def test_a_stack_leaves_when_adapters_need_its_room(adapters: list[Adapter]) -> None:
    runs = runs_of(*((each, 2) for each in adapters))
    free = [1 << 30]
    stacks = AdapterStacks(1 << 30, lambda: free[0])
    assert stacks.nbytes == 0
    assert stacked(runs, stacks).stacked is not None
    assert stacks.nbytes == sum(each.flat.nbytes for each in adapters)
    free[0] = -1
    assert stacks.rows_of(runs) is None
    assert stacks.nbytes == 0
    free[0] = adapters[0].flat.nbytes
    assert stacked(runs, stacks).stacked is None, "less is free than it takes"
    free[0] *= len(adapters)
    assert stacked(runs, stacks).stacked is not None


def test_adapters_that_were_changed_are_copied_anew(
    tiny_decoder: Decoder, adapters: list[Adapter]
) -> None:
    """By a write to the weights, and by the kernel of an optimizer step."""
    a, b, *_ = adapters
    runs = runs_of((a, 2), (b, 2))
    stacks = AdapterStacks(1 << 30)
    for change in (
        lambda: a.flat.mul_(2),
        lambda: adamw_step(b, AdamParams(learning_rate=0.1)),
    ):
        segments = stacked(runs, stacks)
        assert segments.stacked is not None
        b.grad = torch.randn_like(b.flat)
        change()
        segments.stacked = stacks.rows_of(runs)
        assert_alike(tiny_decoder, segments, AdapterSegments(runs))


def test_a_forgotten_adapter_is_copied_anew(tiny_decoder: Decoder, adapters: list[Adapter]) -> None:
    a, b, *_ = adapters
    runs = runs_of((a, 2), (b, 2))
    stacks = AdapterStacks(1 << 30)
    stacked(runs, stacks)
    stacks.forget(a)
    a.flat.mul_(2)
    assert_alike(tiny_decoder, stacked(runs, stacks), AdapterSegments(runs))
