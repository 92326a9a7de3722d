"""Scopes beside each other in one generator: what one asks for, the other neither sees nor feels.

Delay is counted in steps, which a loaded machine does not change.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tinsmith.engine.base import SampleJob
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.engine.local.sample.prompt_scores import PromptScores
from tinsmith.engine.local.sample.sequences import Request, Sequence
from tinsmith.types import ModelInput, SampleResponse, SamplingParams

PROMPT = [10, 40, 20, 60, 30]


def job(job_id: str, scope: str, prompt: list[int] = PROMPT, **fields: Any) -> SampleJob:
    max_tokens = fields.pop("max_tokens", 8)
    return SampleJob(
        job_id=job_id,
        base_model="tiny",
        weights_id=None,
        prompt=ModelInput.from_ints(prompt),
        params=SamplingParams(max_tokens=max_tokens, seed=5, stop=[]),
        scope=scope,
        **fields,
    )


def run_until(generator: Generator, job_id: str, max_steps: int = 20_000) -> tuple[Any, int]:
    """Step until the job has ended; its answer, and after how many steps."""
    for number in range(1, max_steps):
        for found, event in generator.step():
            if found == job_id:
                assert isinstance(event, SampleResponse), event
                return event, number
    raise AssertionError(f"{job_id} has not ended after {max_steps} steps")


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 97, num_tokens)]


@pytest.fixture
def new_generator(tiny_decoder: Decoder) -> Callable[..., Generator]:
    def build(**settings: Any) -> Generator:
        config = {"device": "cpu", "max_running_samples": 16, **settings}
        return Generator(tiny_decoder, LocalEngineConfig(**config), prefill_tokens=16)

    return build


def test_a_prompt_of_another_scope_brings_no_hit_and_no_speed(
    new_generator: Callable[..., Generator],
) -> None:
    secret = prompt_of(100)
    alone = new_generator()
    alone.submit(job("b", "bob", secret), None)
    wanted, quiet_steps = run_until(alone, "b")
    generator = new_generator()
    generator.submit(job("a", "ann", secret), None)
    run_until(generator, "a")
    generator.submit(job("b", "bob", secret), None)
    found, steps = run_until(generator, "b")
    assert found.prompt_cache_hit_tokens == wanted.prompt_cache_hit_tokens == 0
    assert steps == quiet_steps
    generator.submit(job("again", "bob", secret), None)
    hit, fewer_steps = run_until(generator, "again")
    assert hit.prompt_cache_hit_tokens == 96, "one's own prompts are still found"
    assert fewer_steps < quiet_steps


def test_a_prompt_that_another_scope_has_read_is_not_waited_for(
    new_generator: Callable[..., Generator],
) -> None:
    """Waiting for a neighbour's prefill would show by its delay that the prompts are alike."""
    steps = []
    for others_prompt in (prompt_of(100, seed=1), prompt_of(100, seed=2)):
        generator = new_generator()
        generator.submit(job("a", "ann", others_prompt), None)
        generator.step()
        generator.submit(job("b", "bob", prompt_of(100, seed=1)), None)
        steps.append(run_until(generator, "b")[1])
    assert steps[0] == steps[1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "crowd",
    [
        pytest.param([{"num_samples": 4096, "max_tokens": 120}], id="one request of 4096 samples"),
        pytest.param([{"max_tokens": 120}] * 300, id="300 requests"),
        pytest.param([{"num_samples": 16, "max_tokens": 120}] * 20, id="groups"),
    ],
)
def test_a_neighbours_sample_takes_few_more_steps_beside_a_crowd(
    new_generator: Callable[..., Generator], crowd: list[dict[str, Any]], deterministic: bool
) -> None:
    quiet = new_generator(deterministic=deterministic)
    quiet.submit(job("b", "bob"), None)
    wanted, quiet_steps = run_until(quiet, "b")
    generator = new_generator(deterministic=deterministic)
    for number, fields in enumerate(crowd):
        generator.submit(job(f"a{number}", "ann", **fields), None)
    for _ in range(30):
        generator.step()
    assert generator.num_running == 16
    generator.submit(job("b", "bob"), None)
    found, steps = run_until(generator, "b")
    assert steps <= 3 * quiet_steps
    assert found.sequences[0].tokens == wanted.sequences[0].tokens
    if deterministic:
        assert found.sequences[0].logprobs == wanted.sequences[0].logprobs


def test_a_neighbour_shares_steps_of_few_rows_with_a_crowd(
    new_generator: Callable[..., Generator],
) -> None:
    """On the CPU a step takes longer by the row, and the neighbour waits for all of them."""
    alone = new_generator(max_running_samples=256)
    alone.submit(job("a", "ann", num_samples=300, max_tokens=60), None)
    wanted, _ = run_until(alone, "a")
    generator = new_generator(max_running_samples=256)
    generator.submit(job("a", "ann", num_samples=300, max_tokens=60), None)
    for _ in range(15):
        generator.step()
    assert generator.num_running == 256, "one scope alone has all rows, after some steps"
    generator.submit(job("b", "bob"), None)
    rows = []
    while not any(found == "b" for found, _ in generator.step()):
        rows.append(generator.num_running)
    assert rows[2:] and max(rows[2:]) <= 64
    for _ in range(15):
        generator.step()
    assert generator.num_running == 256, "and has them again"
    found, _ = run_until(generator, "a")
    assert [s.tokens for s in found.sequences] == [s.tokens for s in wanted.sequences]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a sequence was asked for its scope."""
    counts: Counter[str] = Counter()

    def asked(request: Request) -> str:
        counts["asked"] += 1
        return request.job.scope

    monkeypatch.setattr(Request, "scope", property(asked))
    return counts


def test_a_step_looks_at_each_sequence_of_a_crowd_a_few_times(
    new_generator: Callable[..., Generator], counted: Counter[str]
) -> None:
    """And not at all of them for each that has a row to be given or taken."""
    generator = new_generator(max_running_samples=256)
    generator.submit(job("crowd", "ann", num_samples=600, max_tokens=100), None)
    for _ in range(30):
        generator.step()
    assert generator.num_running == 256
    generator.submit(job("one", "bob"), None)
    counted.clear()
    for _ in range(3):
        generator.step()
    assert counted["asked"] <= 3 * 10 * 600
    assert generator.num_running <= 64, "192 were paused"


def test_a_neighbour_who_comes_and_goes_finds_few_rows_of_a_crowd(
    new_generator: Callable[..., Generator],
) -> None:
    generator = new_generator(max_running_samples=256)
    generator.submit(job("crowd", "ann", num_samples=600, max_tokens=100), None)
    generator.submit(job("bob 0", "bob"), None)
    run_until(generator, "bob 0")
    for number in range(1, 5):
        generator.step()  # without him
        assert generator.num_running <= 64 + 16, "he waits for all rows of the step under way"
        generator.submit(job(f"bob {number}", "bob", max_tokens=2), None)
        run_until(generator, f"bob {number}")
    for _ in range(30):
        generator.step()
    assert generator.num_running == 256, "who is alone has all rows after a while"


def test_a_neighbours_long_prompt_is_read_beside_endless_short_ones(
    new_generator: Callable[..., Generator],
) -> None:
    quiet = new_generator()
    quiet.submit(job("b", "bob", prompt_of(110)), None)
    _, quiet_steps = run_until(quiet, "b")
    generator = new_generator()
    for number in range(400):
        short = prompt_of(15, seed=number)
        generator.submit(job(f"a{number}", "ann", short, max_tokens=1), None)
    generator.submit(job("b", "bob", prompt_of(110)), None)
    _, steps = run_until(generator, "b")
    assert steps <= 4 * quiet_steps, "half of the prefill, every second step"


def test_a_prompt_from_which_much_is_drawn_is_read_a_few_tokens_at_a_time(
    new_generator: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand alternatives take as long as sixty tokens, and others share the step."""
    rows: list[int] = []
    add = PromptScores.add

    def noted(scores: PromptScores, first: int, logits: Tensor) -> None:
        rows.append(len(logits))
        add(scores, first, logits)

    monkeypatch.setattr(PromptScores, "add", noted)
    generator = new_generator()
    prompt = [1 + number % 90 for number in range(60)]
    generator.submit(job("a", "ann", prompt, prompt_alt_tokens_k=1000), None)
    answer, _ = run_until(generator, "a")
    assert rows == [1] * 59
    assert answer.prompt_alt_tokens.tokens.shape == [59, 1000]
    rows.clear()
    generator.submit(job("b", "ann", prompt, prompt_alt_tokens_k=8), None)
    run_until(generator, "b")
    assert max(rows) == 16 and sum(rows) == 59, "a few are drawn beside the reading"


def test_what_breaks_as_a_prompt_is_scored_is_its_own_requests(
    new_generator: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(scores: PromptScores, first: int, logits: Tensor) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(PromptScores, "add", broken)
    generator = new_generator()
    generator.submit(job("a", "ann", prompt_logprobs=True), None)
    generator.submit(job("b", "bob", PROMPT[1:]), None)
    answer, _ = run_until(generator, "b")
    assert isinstance(answer, SampleResponse)


def test_what_is_asked_of_a_prompt_takes_nothing_while_it_waits(
    new_generator: Callable[..., Generator],
) -> None:
    """The answer to one of these takes more than a million bytes."""
    generator = new_generator()
    prompt = [1 + number % 90 for number in range(100)]
    tracemalloc.start()
    try:
        for number in range(100):
            asked = {"topk_prompt_logprobs": 90, "prompt_alt_tokens_k": 1000}
            generator.submit(job(f"a{number}", "ann", prompt, **asked), None)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 100 * 20_000


def test_thousands_of_samples_take_nothing_while_they_wait(
    new_generator: Callable[..., Generator],
) -> None:
    generator = new_generator()
    for number in range(20):
        generator.submit(job(f"a{number}", "ann", num_samples=4096, max_tokens=64), None)
    generator.step()
    assert generator.num_waiting + generator.num_running == 20 * 4096
    generator.cancel("a19")
    gc.collect()
    made = sum(type(each) is Sequence for each in gc.get_objects())
    assert made < 2 * 4096, "of the one whose turn it is"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_paused_sequence_goes_on_as_if_nothing_had_been(
    new_generator: Callable[..., Generator], deterministic: bool
) -> None:
    quiet = new_generator(deterministic=deterministic)
    quiet.submit(job("a", "ann", num_samples=16, max_tokens=40), None)
    wanted, _ = run_until(quiet, "a")
    generator = new_generator(deterministic=deterministic)
    generator.submit(job("a", "ann", num_samples=16, max_tokens=40), None)
    for number in range(10):
        generator.step()
        generator.submit(job(f"b{number}", "bob", max_tokens=12), None)
    found, _ = run_until(generator, "a")
    assert [s.tokens for s in found.sequences] == [s.tokens for s in wanted.sequences]
    if deterministic:
        assert [s.logprobs for s in found.sequences] == [s.logprobs for s in wanted.sequences]


def test_a_scope_that_fills_the_cache_makes_way_for_a_neighbour(
    new_generator: Callable[..., Generator], tiny_decoder: Decoder
) -> None:
    config = tiny_decoder.config
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    small: dict[str, Any] = {"kv_cache_bytes": 700 * token}
    quiet = new_generator(**small)
    quiet.submit(job("b", "bob", prompt_of(90)), None)
    wanted, quiet_steps = run_until(quiet, "b")
    generator = new_generator(**small)
    for number in range(40):
        own = prompt_of(40, seed=number + 1)
        generator.submit(job(f"a{number}", "ann", own, max_tokens=80), None)
    for _ in range(40):
        generator.step()
    generator.submit(job("b", "bob", prompt_of(90)), None)
    found, steps = run_until(generator, "b")
    assert steps <= 3 * quiet_steps
    assert found.sequences[0].tokens == wanted.sequences[0].tokens
    ended = [event for _ in range(2000) if generator.busy for _, event in generator.step()]
    assert not generator.busy
    assert all(isinstance(event, SampleResponse) for event in ended), "nor is the crowd harmed"
