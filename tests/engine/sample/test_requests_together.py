"""Requests beside each other: they share batches and prompts, and none harms another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.sample.sampling_reference import (
    CPU,
    DETERMINISTIC,
    answer,
    answers,
    assert_trainer_agrees,
    finish,
    job_of,
    tokens_in,
    tokens_of,
)
from tinsmith.engine.base import Failure, Grammar, SampleEvent, Shaping
from tinsmith.engine.grammar import CompiledGrammar, Tokens
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import SampleResponse


def test_a_group_larger_than_the_running_limit_is_completed(tiny_decoder: Decoder) -> None:
    config = LocalEngineConfig(device="cpu", max_running_samples=3)
    job = job_of("a", tokens_of(12), seed=1, num_samples=10)
    limited = Generator(tiny_decoder, config)
    limited.submit(job, None)
    most = 0
    found: list[SampleEvent] = []
    while limited.busy:
        found += [event for _, event in limited.step()]
        most = max(most, limited.num_running)
    (response,) = found
    assert isinstance(response, SampleResponse)
    assert most == 3
    assert tokens_in(response) == tokens_in(answer(Generator(tiny_decoder, CPU), job))


def test_adapters_and_the_bare_model_share_a_batch(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    adapters: list[Adapter | None] = [
        new_adapter(tiny_decoder, fill_seed=1),
        None,
        new_adapter(tiny_decoder, fill_seed=2, rank=8, train_mlp=False),
        new_adapter(tiny_decoder, fill_seed=3, train_unembed=True),
    ]
    jobs = [
        (
            job_of(f"{a}/{i}", tokens_of(7 + 5 * i, i), seed=i, num_samples=1 + i, max_tokens=15),
            adapter,
        )
        for a, adapter in enumerate(adapters)
        for i in range(3)
    ]
    together = answers(Generator(tiny_decoder, CPU, prefill_tokens=16), jobs)
    for job, adapter in jobs:
        alone = answer(Generator(tiny_decoder, CPU), job, adapter)
        assert tokens_in(together[job.job_id]) == tokens_in(alone)
        prompt = job.prompt.to_ints()
        assert_trainer_agrees(tiny_decoder, prompt, together[job.job_id], adapter)


def test_a_prompt_that_continues_a_known_one_is_not_read_again(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(40)
    first = answer(generator, job_of("a", prompt, seed=1))
    assert first.prompt_cache_hit_tokens == 0
    again = answer(generator, job_of("b", prompt, seed=1))
    assert again.prompt_cache_hit_tokens == 32, "two full blocks"
    assert tokens_in(again) == tokens_in(first)
    longer = answer(generator, job_of("c", prompt + tokens_of(20, 9), seed=1))
    assert longer.prompt_cache_hit_tokens == 32
    fresh = answer(Generator(tiny_decoder, CPU), job_of("c", prompt + tokens_of(20, 9), seed=1))
    assert tokens_in(longer) == tokens_in(fresh)
    branching = answer(generator, job_of("d", prompt[:25] + tokens_of(9, 8), seed=1, num_samples=3))
    assert branching.prompt_cache_hit_tokens == 16
    assert_trainer_agrees(tiny_decoder, prompt[:25] + tokens_of(9, 8), branching)


def test_a_prefix_is_reused_only_under_the_same_adapter(
    generator: Generator, tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    one, two = new_adapter(tiny_decoder, fill_seed=1), new_adapter(tiny_decoder, fill_seed=2)
    prompt = tokens_of(40)
    for adapter in (None, one, two):
        response = answer(generator, job_of("a", prompt), adapter)
        assert response.prompt_cache_hit_tokens == 0
        assert_trainer_agrees(tiny_decoder, prompt, response, adapter)
    generator.forget(one)
    assert answer(generator, job_of("a", prompt), one).prompt_cache_hit_tokens == 0
    assert answer(generator, job_of("a", prompt), two).prompt_cache_hit_tokens == 32


def test_equal_prompts_that_arrive_together_are_read_once(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompt = tokens_of(60)
    found = answers(generator, [(job_of(str(i), prompt, seed=i), None) for i in range(5)])
    assert sorted(r.prompt_cache_hit_tokens for r in found.values()) == [0, 48, 48, 48, 48]
    for response in found.values():
        assert_trainer_agrees(tiny_decoder, prompt, response)


def test_a_short_request_joins_and_leaves_while_a_long_one_runs(generator: Generator) -> None:
    generator.submit(job_of("long", tokens_of(10), max_tokens=100), None)
    for _ in range(5):
        assert generator.step() == []
    generator.submit(job_of("short", tokens_of(4), max_tokens=3), None)
    events: list[tuple[str, SampleEvent]] = []
    for _ in range(4):
        events += generator.step()
    assert [job_id for job_id, _ in events] == ["short"]
    assert generator.num_running == 1


def test_a_long_prompt_holds_up_neither_runners_nor_short_requests(generator: Generator) -> None:
    generator.submit(job_of("runner", tokens_of(4), max_tokens=100, stream=True), None)
    generator.step()
    generator.submit(job_of("long", tokens_of(110), max_tokens=2), None)
    generator.submit(job_of("short", tokens_of(6), max_tokens=2), None)
    seen: list[str] = []
    for _ in range(4):
        seen += [job_id for job_id, _ in generator.step()]
    assert seen.count("runner") == 4
    assert "short" in seen
    assert "long" not in seen


def test_cancelling_frees_the_place_and_ends_the_events(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    kept = job_of("kept", tokens_of(9), seed=3, num_samples=2, max_tokens=20)
    for name, prompt, count in (("running", 9, 4), ("reading", 110, 1)):
        generator.submit(job_of(name, tokens_of(prompt, 7), num_samples=count, max_tokens=50), None)
    generator.submit(kept, None)
    for _ in range(3):
        generator.step()
    before = generator.num_running
    for name in ("running", "reading", "unknown"):
        generator.cancel(name)
    assert (before, generator.num_running, generator.num_waiting) == (6, 2, 0)
    events = finish(generator)
    assert list(events) == ["kept"]
    (response,) = events["kept"]
    assert isinstance(response, SampleResponse)
    assert tokens_in(response) == tokens_in(answer(Generator(tiny_decoder, CPU), kept))


def test_all_memory_but_remembered_prompts_is_given_back(
    generator: Generator, tiny_decoder: Decoder
) -> None:
    prompts = [tokens_of(20, seed) for seed in range(3)]
    answers(
        generator, [(job_of(str(i), p, num_samples=1 + i), None) for i, p in enumerate(prompts)]
    )
    config = tiny_decoder.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert generator.cache_bytes == 3 * 16 * per_token, "a full block of each"


@pytest.mark.parametrize("room_for", [150, 300, 600])
def test_with_little_memory_requests_take_turns_and_results_stay_the_same(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter], room_for: int
) -> None:
    """Sequences need more and more blocks, so some have to give way and are taken up again."""
    shape = tiny_decoder.config
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    config = LocalEngineConfig(device="cpu", kv_cache_bytes=room_for * per_token)
    adapters = [None, new_adapter(tiny_decoder)]
    jobs = [
        (
            job_of(str(i), tokens_of(10 + 7 * i, i), seed=i, max_tokens=70, num_samples=1 + i % 3),
            adapters[i % 2],
        )
        for i in range(6)
    ]
    small = Generator(tiny_decoder, config, prefill_tokens=32)
    found = answers(small, jobs)
    wanted = answers(Generator(tiny_decoder, CPU), jobs)
    for job, adapter in jobs:
        assert tokens_in(found[job.job_id]) == tokens_in(wanted[job.job_id])
        assert_trainer_agrees(tiny_decoder, job.prompt.to_ints(), found[job.job_id], adapter)
    assert small.cache_bytes <= room_for * per_token


def test_in_deterministic_mode_company_changes_not_a_bit(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    job = job_of("a", tokens_of(30), seed=5, num_samples=3, max_tokens=20, prompt_logprobs=True)
    adapter = new_adapter(tiny_decoder)
    alone = answer(Generator(tiny_decoder, DETERMINISTIC, prefill_tokens=16), job, adapter)
    busy = Generator(tiny_decoder, DETERMINISTIC, prefill_tokens=16)
    answer(busy, job_of("before", tokens_of(30)), adapter)
    others = [(job_of(f"b{i}", tokens_of(5 + 9 * i, i), num_samples=2), None) for i in range(4)]
    beside = answers(busy, [*others, (job, adapter)])["a"]
    assert beside == alone
    assert beside.prompt_cache_hit_tokens == 0


def test_a_diverged_adapter_fails_alone(
    tiny_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    broken = new_adapter(tiny_decoder)
    broken.flat.fill_(float("nan"))
    generator = Generator(tiny_decoder, CPU)
    job = job_of("good", tokens_of(9), seed=2, max_tokens=30)
    generator.submit(job, None)
    generator.step()
    for name, fields in (("bad", {}), ("scored", {"prompt_logprobs": True})):
        generator.submit(job_of(name, tokens_of(9), num_samples=2, **fields), broken)
    events = finish(generator)
    for name in ("bad", "scored"):
        (failure,) = events[name]
        assert isinstance(failure, Failure)
        assert "not finite" in failure.message
    (response,) = events["good"]
    assert isinstance(response, SampleResponse)
    assert tokens_in(response) == tokens_in(answer(Generator(tiny_decoder, CPU), job))
    assert answer(generator, job_of("after", tokens_of(9), seed=2)).sequences[0].tokens


def test_a_turn_that_breaks_fails_its_requests_and_leaves_the_sampler_usable(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(tiny_decoder, CPU)
    generator.submit(job_of("a", tokens_of(9), num_samples=3), None)
    generator.step()
    with monkeypatch.context() as patch:
        patch.setattr(tiny_decoder, "hidden", _run_out_of_memory)
        ((job_id, failure),) = generator.step()
    assert job_id == "a"
    assert isinstance(failure, Failure)
    assert (failure.category, "out of memory" in failure.message) == ("server", True)
    assert not generator.busy
    assert len(answer(generator, job_of("b", tokens_of(9))).sequences[0].tokens) == 8


def _break(*_: Any) -> str:
    raise RuntimeError("it broke")


class _BrokenTokens(Tokens):
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        raise RuntimeError("it broke")


def _break_beyond_the_prompt(tokens: list[int]) -> str:
    return "x" if len(tokens) <= 3 else _break()


@pytest.mark.parametrize(
    ("fields", "detokenize"),
    [
        ({"stop": ["a"], "num_samples": 3}, _break),
        ({"stop": ["a"], "num_samples": 3}, _break_beyond_the_prompt),
        ({"shaping": Shaping(grammar=Grammar(kind="regex", text="a*"))}, None),
    ],
    ids=["prompt cannot be decoded", "answer cannot be decoded", "grammar breaks the compiler"],
)
def test_what_breaks_for_one_request_leaves_those_in_its_step_alone(
    tiny_decoder: Decoder, fields: dict[str, Any], detokenize: Any
) -> None:
    """Not only the model is run for all of them together: so are the looks at what it said."""
    generator = Generator(tiny_decoder, CPU, detokenize, _BrokenTokens(None, 97))
    neighbours = [job_of(name, tokens_of(9, seed), seed=seed) for seed, name in enumerate("bc")]
    jobs = [neighbours[0], job_of("a", tokens_of(3), **fields), neighbours[1]]
    for job in jobs:
        generator.submit(job, None)
    events = finish(generator)
    (failure,) = events.pop("a")
    assert isinstance(failure, Failure)
    assert failure.category == "server" and "it broke" in failure.message
    alone = answers(Generator(tiny_decoder, CPU), [(job, None) for job in neighbours])
    for name, (response,) in events.items():
        assert isinstance(response, SampleResponse), response
        assert tokens_in(response) == tokens_in(alone[name])
    assert len(events) == 2 and not generator.num_running and not generator.num_waiting


def _run_out_of_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError("out of memory")


def test_memory_that_the_machine_does_not_have_fails_one_request(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(tiny_decoder, CPU)
    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.engine.local.sample.kvcache.BlockTable", _run_out_of_memory)
        generator.submit(job_of("a", tokens_of(9)), None)
        ((_, failure),) = generator.step()
    assert isinstance(failure, Failure)
    assert generator.cache_bytes == 0
    assert len(answer(generator, job_of("b", tokens_of(9))).sequences[0].tokens) == 8
