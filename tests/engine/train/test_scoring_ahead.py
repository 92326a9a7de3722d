"""A device scores the next rows of a micro-batch while the host works out losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.train.training_reference import CPU, make_datum, policy_datum
from tinsmith.engine.base import Failure, Pass
from tinsmith.engine.local import device_memory
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.unembedding import TargetLogprobs
from tinsmith.engine.local.train import scoring
from tinsmith.engine.local.train.batch_limits import BatchLimits
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.types import ForwardBackwardOutput

LENGTHS = (9, 30, 1, 17, 40, 22, 5, 30)


def passes_of(lengths: tuple[int, ...] = LENGTHS) -> list[Pass]:
    """One of each kind, whose items take turns with different numbers of targets."""
    plain = [make_datum(length, seed) for seed, length in enumerate(lengths)]
    several = [
        make_datum(length, seed, targets_a_position=3) for seed, length in enumerate(lengths)
    ]
    policy = [policy_datum(length, seed, "ppo") for seed, length in enumerate(lengths)]
    return [
        Pass(adapter_id="a", data=plain, loss_fn="cross_entropy"),
        Pass(adapter_id="b", data=several, loss_fn="cross_entropy"),
        Pass(adapter_id="a", data=policy, loss_fn="ppo"),
    ]


class Scored:
    """What the device was asked for and what was taken from it, in order; and rows whose logits
    were kept at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.rows = self.most_rows = 0
        seen = self

        class Watched(TargetLogprobs):
            def __init__(
                self, decoder: Decoder, hidden: Tensor, *rest: Any, **options: Any
            ) -> None:
                seen.events.append("score")
                seen.rows += len(hidden)
                seen.most_rows = max(seen.most_rows, seen.rows)
                self.num_rows = len(hidden)
                super().__init__(decoder, hidden, *rest, **options)

            def backward(self, grad: Tensor) -> Tensor:
                seen.events.append("back")
                seen.rows -= self.num_rows
                return super().backward(grad)

        monkeypatch.setattr(scoring, "TargetLogprobs", Watched)


def run(
    decoder: Decoder,
    new_adapter: Callable[..., Adapter],
    passes: list[Pass],
    **changes: Any,
) -> tuple[list[ForwardBackwardOutput | Failure], dict[str, Adapter]]:
    adapters = {name: new_adapter(decoder, fill_seed=seed) for seed, name in enumerate("ab")}
    limits = replace(BatchLimits.of(CPU, decoder), **changes)
    finished = run_passes(passes, adapters, decoder, CPU, limits)
    results = {each.index: each.result for each in finished if each}
    return [results[index] for index in range(len(passes))], adapters


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the few rows of a test."""

    def group_rows(self: BatchLimits, num_rows: int) -> int:
        return min(32, self.score_rows // 2) if self.is_ahead else self.score_rows

    monkeypatch.setattr(BatchLimits, "group_rows", group_rows)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("score_rows", [20, 70, 1000])
def test_results_and_gradients_are_those_of_one_group_after_the_other(
    score_rows: int, tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    """To rounding: products of other numbers of rows may add in another order."""
    passes = passes_of()
    expected, one = run(tiny_decoder, new_adapter, passes)
    found, other = run(
        tiny_decoder, new_adapter, passes, is_ahead=True, score_rows=score_rows, logits_rows=16
    )
    for a, b in zip(expected, found, strict=True):
        assert isinstance(a, ForwardBackwardOutput) and isinstance(b, ForwardBackwardOutput)
        assert a.metrics == pytest.approx(b.metrics, rel=1e-5, abs=1e-6)
        for x, y in zip(a.loss_fn_outputs, b.loss_fn_outputs, strict=True):
            torch.testing.assert_close(x["logprobs"].to_torch(), y["logprobs"].to_torch())
    for name in "ab":
        gradient, wanted = other[name].grad, one[name].grad
        assert gradient is not None and wanted is not None
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.usefixtures("small_groups")
def test_the_next_rows_are_asked_for_before_losses_are_worked_out(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = Scored(monkeypatch)
    data = [make_datum(20, seed) for seed in range(4)]
    passes = [Pass(adapter_id="a", data=data, loss_fn="cross_entropy")]
    run(tiny_decoder, new_adapter, passes, is_ahead=True)
    assert scored.events == ["score", "score", "back", "score", "back", "score", "back", "back"]


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("score_rows", [20, 45, 70])
def test_no_more_logits_are_kept_than_there_is_room_for(
    score_rows: int,
    tiny_decoder: Decoder,
    new_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored = Scored(monkeypatch)
    run(tiny_decoder, new_adapter, passes_of(), is_ahead=True, score_rows=score_rows)
    longest = max(LENGTHS)  # a sequence is not divided
    assert scored.most_rows <= max(score_rows, longest)


def test_a_micro_batch_has_several_groups_of_rows_that_keep_a_device_busy() -> None:
    limits = BatchLimits(
        batch_tokens=16_384,
        shared_tokens=16_384,
        logits_rows=3_500,
        score_rows=14_000,
        is_ahead=True,
        num_layers=28,
        kept_tokens=None,
        input_share=0.1,
        pass_bytes=None,
        are_reduced=False,
    )
    assert limits.group_rows(16_384) == 4096
    assert limits.group_rows(4096) == limits.group_rows(200) == 1024
    assert limits.group_rows(100_000) == 7000  # two are kept
    assert replace(limits, is_ahead=False).group_rows(16_384) == 14_000


@pytest.mark.parametrize("deterministic", [True, False])
def test_in_deterministic_mode_what_is_kept_of_a_pass_is_not_for_others_memory_to_say(
    deterministic: bool, tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are computed again, of the rows with a gradient alone, have other last bits."""
    monkeypatch.setattr(tiny_decoder, "device", torch.device("cuda"))
    config = replace(CPU, deterministic=deterministic)
    found = []
    for unused in (2**40, 2**20):
        monkeypatch.setattr(device_memory, "unused", lambda device, unused=unused: unused)
        found.append(BatchLimits.of(config, tiny_decoder, 2**34).score_rows)
    few, many = found[1], found[0]
    assert few == many if deterministic else few < many
