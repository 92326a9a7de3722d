"""A model on two ranks computes what it computes on one, and its checkpoints fit both.

One pair of processes serves all tests; one rank is an engine core in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from tests.engine.conftest import build_reference, save_tokenizer
from tests.engine.train.test_pass_time import sorting_loss
from tests.support.engine_calls import datum
from tests.support.tiny_families import save_tiny
from tinsmith.engine.base import (
    ExpertsChosen,
    Failure,
    FinishedPass,
    Pass,
    SampleJob,
    Step,
)
from tinsmith.engine.local.boundary.core import Later
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.engine import LocalEngine
from tinsmith.errors import EngineDiedError, EngineError
from tinsmith.types import (
    AdamParams,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"vocab_size": 96}),
    "undivided_head": ("llama_biased", {}),
    "one_kv_head": ("qwen3", {"vocab_size": 96, "num_key_value_heads": 1}),
    "softcapped": ("gemma2", {"vocab_size": 96}),
}
"""A vocabulary of 97 cannot be divided by two, and biases are added once; a key/value head that
both ranks have; norms and caps on both sides of a sum."""

EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
"""Of these experts are divided, and nothing else; those of the last have biases, and gates and ups
in turns."""

ELSEWHERE = ("qwen3_moe", "mixtral", "deepseek_v3")
"""Of these one rank takes our own decoder, and two the modules of `transformers`: gradients differ
by 2e-6, of which Adam makes more in its first steps."""

MODELS = (*VARIANTS, *EXPERTS)

SENTENCES = ([10, 40, 20, 60, 30, 50, 12, 44], [70, 11, 35, 62, 15, 81], [5, 6, 7, 90])
ADAM = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, grad_clip_norm=1.0)
TOLERANCE = 1e-5

_names = (f"n{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LocalEngineConfig:
    folder = tmp_path_factory.mktemp("models")
    models = {}
    for name, (variant, changes) in VARIANTS.items():
        build_reference(variant, **changes).save_pretrained(folder / name)
        save_tokenizer(folder / name, 97)
        models[name] = str(folder / name)
    build_reference(
        "llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3
    ).save_pretrained(folder / "three_heads")
    for name in (*EXPERTS, "qwen3_next"):
        save_tiny(name, folder / name)
        models[name] = str(folder / name)
    models["three_heads"] = str(folder / "three_heads")
    return LocalEngineConfig(
        models=models,
        device="cpu",
        deterministic=True,
        custom_loss_seconds=0.2,
        router_replay=True,
        verify_models=False,
        cache_folder=folder,
    )


@pytest.fixture(scope="module")
def one(config: LocalEngineConfig) -> EngineCore:
    return EngineCore(config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(config: LocalEngineConfig) -> AsyncIterator[LocalEngine]:
    engine = await LocalEngine.start(replace(config, ranks=2))
    yield engine
    await engine.close()


Some = EngineCore | LocalEngine


async def call(engine: Some, method: str, *arguments: Any) -> Any:
    value = getattr(engine, method)(*arguments)
    if isinstance(engine, LocalEngine):
        return await value
    return value.finish() if isinstance(value, Later) else value


async def created(engine: Some, base_model: str, **lora: Any) -> str:
    name = next(_names)
    config = LoraConfig(**{"rank": 4, "seed": 3, **lora})
    assert await call(engine, "create_adapter", name, base_model, config) is None
    return name


async def run(engine: Some, *passes: Pass) -> list[Any]:
    if isinstance(engine, LocalEngine):
        finished = [each async for each in engine.run_passes(passes)]
    else:
        finished = [each for each in engine.run_passes(passes) if isinstance(each, FinishedPass)]
    return [each.result for each in sorted(finished, key=lambda each: each.index)]


async def sampled(engine: Some, job: SampleJob) -> SampleResponse:
    answer = (await events_of(engine, job))[-1]
    assert isinstance(answer, SampleResponse), answer
    return answer


async def events_of(engine: Some, job: SampleJob) -> list[Any]:
    if isinstance(engine, LocalEngine):
        events: list[Any] = [event async for event in engine.sample(job)]
    else:
        assert engine.submit_sample(job) is None
        events = []
        while engine.is_sampling:
            events += [event for _, event in engine.sampling_turn()]
    return events


async def taught(engine: Some, base_model: str, num_steps: int = 3) -> tuple[str, list[Any]]:
    """An adapter after some steps, with a gradient pending; and all that was reported."""
    name = await created(engine, base_model)
    reported = []
    for _ in range(num_steps):
        reported += await run(engine, passed(name))
        reported += await call(engine, "step", [Step(adapter_id=name, params=ADAM)])
    reported += await run(engine, passed(name))
    return name, reported


def passed(name: str, loss_fn: str = "cross_entropy", **more: Any) -> Pass:
    data = [datum(tokens, **_inputs(loss_fn, len(tokens) - 1)) for tokens in SENTENCES]
    return Pass(adapter_id=name, data=data, loss_fn=loss_fn, **more)  # type: ignore[arg-type]  # one of them


def _inputs(loss_fn: str, length: int) -> dict[str, Any]:
    if loss_fn == "cross_entropy":
        return {"weights": np.linspace(0.0, 1.0, length, dtype=np.float32)}
    return {
        "logprobs": np.linspace(-3.0, -1.0, length, dtype=np.float32),
        "advantages": np.linspace(-1.0, 1.0, length, dtype=np.float32),
    }


def flat(reported: list[Any]) -> np.ndarray:
    """All numbers of what passes and steps reported."""
    numbers: list[float] = []
    for each in reported:
        assert not isinstance(each, Failure), each
        if isinstance(each, ForwardBackwardOutput):
            for output in each.loss_fn_outputs:
                numbers += output["logprobs"].numpy.tolist()
            each = each.metrics
        numbers += [each[key] for key in sorted(each)]
    return np.array(numbers)


async def tensors(engine: Some, name: str, folder: Path) -> dict[str, np.ndarray]:
    """Weights, moments and pending gradient of an adapter, as an exact save has them."""
    info = await call(engine, "save", name, folder, "exact")
    assert not isinstance(info, Failure), info
    return _stored(folder)


def _stored(folder: Path) -> dict[str, np.ndarray]:
    return {
        f"{file.stem}/{key}": value
        for file in sorted(folder.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def assert_close(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = TOLERANCE
) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # Of the matrix's size: single numbers may be what large ones leave of each other.
        atol = tolerance * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(found[key], value, atol=atol, rtol=0, err_msg=key)


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(found[key], value), key


@pytest.mark.parametrize("base_model", MODELS)
async def test_two_ranks_report_and_learn_what_one_does(
    one: EngineCore, two: LocalEngine, base_model: str, tmp_path: Path
) -> None:
    found, reported = await taught(two, base_model)
    expected, expected_reports = await taught(one, base_model)
    np.testing.assert_allclose(flat(reported), flat(expected_reports), atol=TOLERANCE, rtol=1e-5)
    assert_close(
        await tensors(two, found, tmp_path / "two"),
        await tensors(one, expected, tmp_path / "one"),
        3 * TOLERANCE if base_model in ELSEWHERE else TOLERANCE,
    )


@pytest.mark.parametrize("base_model", EXPERTS)
async def test_two_ranks_report_experts_and_go_to_those_that_they_are_given(
    one: EngineCore, two: LocalEngine, base_model: str, tmp_path: Path
) -> None:
    """To the next ones after those that a sampler chose."""
    job = SampleJob(
        job_id="j",
        base_model=base_model,
        weights_id=None,
        prompt=ModelInput.from_ints(SENTENCES[0][:3]),
        params=SamplingParams(max_tokens=5, seed=1, stop=[]),
        reports_experts=True,
    )
    reported, losses, states = [], [], []
    for number, engine in enumerate((two, one)):
        chosen, _ = await events_of(engine, replace(job, job_id=f"experts {number}"))
        assert isinstance(chosen, ExpertsChosen)
        reported.append(np.concatenate([chosen.prompt, *chosen.samples]))
        name = await created(engine, base_model)
        item = replace(passed(name), choices=((reported[0] + 1) % 4, None, None))
        losses.append(flat(await run(engine, item)))
        states.append(await tensors(engine, name, tmp_path / str(number)))
    assert (reported[0] == reported[1]).all()
    np.testing.assert_allclose(*losses, atol=TOLERANCE, rtol=1e-5)
    assert_close(*states)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
async def test_other_losses_have_the_same_gradients(
    one: EngineCore, two: LocalEngine, loss_fn: str, tmp_path: Path
) -> None:
    found, expected = [], []
    for engine, into in ((two, found), (one, expected)):
        name = await created(engine, "llama")
        into += [name, *await run(engine, passed(name, loss_fn))]
    np.testing.assert_allclose(flat(found[1:]), flat(expected[1:]), atol=TOLERANCE, rtol=1e-5)
    assert_close(
        await tensors(two, found[0], tmp_path / "two"),
        await tensors(one, expected[0], tmp_path / "one"),
    )


async def test_an_uploaded_loss_runs_on_both_and_ends_where_the_first_rank_says(
    one: EngineCore, two: LocalEngine, tmp_path: Path
) -> None:
    """While it runs other turns are taken, as many on one rank as on the other."""
    found, expected = [], []
    for engine, into in ((two, found), (one, expected)):
        name = await created(engine, "llama")
        short = replace(passed(name), loss_fn="custom", custom_loss=sorting_loss(2**4, 1))
        into += [name, *await run(engine, short)]
    np.testing.assert_allclose(flat(found[1:]), flat(expected[1:]), atol=TOLERANCE, rtol=1e-5)
    long = replace(passed(found[0]), loss_fn="custom", custom_loss=sorting_loss(2**20, 3))
    (failure,) = await run(two, replace(long, data=[*long.data] * 4))
    assert isinstance(failure, Failure) and "more than 0.2 s" in failure.message
    assert_close(
        await tensors(two, found[0], tmp_path / "two"),
        await tensors(one, expected[0], tmp_path / "one"),
    )


async def test_repeats_are_equal_to_the_bit(two: LocalEngine, tmp_path: Path) -> None:
    first, first_reports = await taught(two, "one_kv_head")
    second, second_reports = await taught(two, "one_kv_head")
    assert flat(first_reports).tobytes() == flat(second_reports).tobytes()
    assert_equal(
        await tensors(two, second, tmp_path / "2"), await tensors(two, first, tmp_path / "1")
    )


@pytest.mark.parametrize("base_model", MODELS)
async def test_checkpoints_do_not_depend_on_the_number_of_ranks(
    one: EngineCore, two: LocalEngine, base_model: str, tmp_path: Path
) -> None:
    for index, (source, target) in enumerate(((two, one), (one, two))):
        name, _ = await taught(source, base_model, num_steps=1)
        saved = await tensors(source, name, tmp_path / f"{index}")
        other = await created(target, base_model, seed=99)
        info = await call(target, "restore", other, tmp_path / f"{index}", "exact")
        assert not isinstance(info, Failure), info
        assert_equal(await tensors(target, other, tmp_path / f"{index}-again"), saved)


@pytest.mark.parametrize("base_model", MODELS)
async def test_samples_are_those_of_one_rank(
    one: EngineCore, two: LocalEngine, base_model: str, tmp_path: Path
) -> None:
    name, _ = await taught(one, base_model)
    await tensors(one, name, tmp_path / "weights")
    responses = []
    for engine in (two, one):
        sampler = next(_names)
        failure = await call(engine, "load_sampler", sampler, base_model, tmp_path / "weights")
        assert failure is None
        job = SampleJob(
            job_id=next(_names),
            base_model=base_model,
            weights_id=sampler,
            prompt=ModelInput.from_ints(SENTENCES[0]),
            params=SamplingParams(max_tokens=12, seed=5, temperature=0.8, stop=[]),
            num_samples=3,
            prompt_logprobs=True,
        )
        responses.append(await sampled(engine, job))
    found, expected = responses
    for ours, theirs in zip(found.sequences, expected.sequences, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=TOLERANCE)
    np.testing.assert_allclose(
        np.array(found.prompt_logprobs[1:]), np.array(expected.prompt_logprobs[1:]), atol=TOLERANCE
    )


async def test_a_sample_without_a_seed_has_one_seed_on_both_ranks(two: LocalEngine) -> None:
    job = SampleJob(
        job_id=next(_names),
        base_model="llama",
        weights_id=None,
        prompt=ModelInput.from_ints(SENTENCES[0]),
        params=SamplingParams(max_tokens=20, temperature=2.0, stop=[]),
    )
    (sequence,) = (await sampled(two, job)).sequences
    assert len(sequence.tokens) == 20
    assert (await two.health()).alive


async def test_models_that_cannot_be_divided_are_refused_with_the_reason(
    two: LocalEngine,
) -> None:
    capabilities = await two.capabilities()
    reasons = {model.name: model.reason for model in capabilities.refused}
    assert [model.name for model in capabilities.models] == list(MODELS)
    assert "3 attention heads cannot be divided evenly" in reasons["three_heads"]
    assert "recurrent layers are not divided" in reasons["qwen3_next"]


async def test_weights_in_few_bits_are_refused(config: LocalEngineConfig) -> None:
    with pytest.raises(EngineError, match="ranks = 2 divides weights that are kept in full"):
        EngineCore(replace(config, ranks=2, base_weights="int8"))


async def test_the_death_of_a_rank_is_that_of_the_engine(two: LocalEngine) -> None:
    """The last test: nothing is asked of this engine afterwards."""
    tasks = [Path(f"/proc/{two.pid}/task/{two.pid}/children")]
    (rank,) = [int(pid) for task in tasks for pid in task.read_text().split()]
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(60):
        while (health := await two.health()).alive:  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.01)
    assert f"rank 1 of the engine, process {rank}, ended with status -9" in health.detail
    with pytest.raises(EngineDiedError):
        await two.capabilities()
