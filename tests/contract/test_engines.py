"""What every engine promises: one suite over `engine/base.py`, run on each implementation.

All engines serve the same small model: 97 tokens, of which 3 and up are characters. Numbers are
compared with each other, never with constants, so a model may be anything that learns.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tinsmith.engine.base import Engine, Failure, Pass, SampleJob, Step, TokensSampled
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.errors import EngineDiedError
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ImageChunk,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
    TensorData,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE_MODEL = "tiny"
VOCAB_SIZE = 97
CONTEXT_LENGTH = 128
EOS_TOKEN = 2
FIRST_CHARACTER = 3

LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=0.02, beta1=0.9, beta2=0.95)
SENTENCE = [10, 40, 20, 60, 30, 50, 12, 44]
OTHER = [70, 11, 35, 62, 15, 81]


def text_of(tokens: list[int]) -> str:
    return "".join(chr(29 + token) for token in tokens if token >= FIRST_CHARACTER)


@functools.cache
def write_tiny_model(folder: Path) -> Path:
    """A random two-layer Llama with a tokenizer of one token per character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = [text_of([token]) for token in range(FIRST_CHARACTER, VOCAB_SIZE)]
    names = ["<pad>", "<bos>", "<eos>", *letters]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


async def start(kind: str, folder: Path) -> Engine:
    if kind == "fake":
        model = FakeModel(
            name=BASE_MODEL,
            vocab_size=VOCAB_SIZE,
            max_context_length=CONTEXT_LENGTH,
            eos_token_ids=(EOS_TOKEN,),
        )
        return FakeEngine(FakeEngineConfig(models=(model,), detokenize=text_of))
    pytest.importorskip("torch", reason="the local engine needs torch")
    from tinsmith.engine.local.config import LocalEngineConfig
    from tinsmith.engine.local.engine import LocalEngine

    models = {BASE_MODEL: str(write_tiny_model(folder))}
    return await LocalEngine.start(
        LocalEngineConfig(models=models, device="cpu", deterministic=True, cache_folder=folder)
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module", params=["fake", "local"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(kind: str, model_folder: Path) -> AsyncIterator[Engine]:
    """Shared by the module's tests, which use names of their own for what they create."""
    engine = await start(kind, model_folder)
    yield engine
    await engine.close()


_names = itertools.count()


def new_name() -> str:
    return f"n{next(_names)}"


@pytest_asyncio.fixture(loop_scope="module")
async def adapter(engine: Engine) -> AsyncIterator[str]:
    name = await create(engine)
    yield name
    await engine.unload_adapter(name)


async def create(engine: Engine, lora: LoraConfig = LORA) -> str:
    name = new_name()
    assert await engine.create_adapter(name, BASE_MODEL, lora) is None
    return name


def datum(tokens: Sequence[int] = SENTENCE, **inputs: Any) -> Datum:
    """Predict each token from those before it."""
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **inputs},
    )


def forward_backward(adapter_id: str, *data: Datum, **more: Any) -> Pass:
    return Pass(adapter_id=adapter_id, data=list(data), **{"loss_fn": "cross_entropy", **more})


async def run(engine: Engine, *passes: Pass) -> list[ForwardBackwardOutput | Failure]:
    """Results in the order of the passes."""
    results = {index: result async for index, result in engine.run_passes(passes)}
    assert sorted(results) == list(range(len(passes)))
    return [results[index] for index in range(len(passes))]


async def done(engine: Engine, *passes: Pass) -> list[ForwardBackwardOutput]:
    results = []
    for result in await run(engine, *passes):
        assert isinstance(result, ForwardBackwardOutput), result
        results.append(result)
    return results


async def logprobs(engine: Engine, adapter_id: str, tokens: Sequence[int] = SENTENCE) -> np.ndarray:
    """What the adapter thinks of the tokens now; leaves no trace."""
    (output,) = await done(engine, forward_backward(adapter_id, datum(tokens), forward_only=True))
    return output.loss_fn_outputs[0]["logprobs"].numpy


async def step(engine: Engine, adapter_id: str, params: AdamParams = ADAM) -> dict[str, float]:
    (metrics,) = await engine.step([Step(adapter_id=adapter_id, params=params)])
    assert isinstance(metrics, dict), metrics
    return metrics


async def train(engine: Engine, adapter_id: str, *data: Datum, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        await done(engine, forward_backward(adapter_id, *(data or (datum(),))))
        await step(engine, adapter_id)


def job(prompt: Sequence[int] = SENTENCE[:3], **fields: Any) -> SampleJob:
    """Fields of the job, and of its sampling parameters."""
    params = {
        name: fields.pop(name)
        for name in ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
        if name in fields
    }
    settings = {"job_id": new_name(), "base_model": BASE_MODEL, "sampler_id": None, **fields}
    return SampleJob(
        prompt=ModelInput.from_ints(list(prompt)),
        params=SamplingParams(**{"max_tokens": 8, "stop": [], **params}),
        **settings,
    )


async def sample(engine: Engine, job: SampleJob) -> SampleResponse:
    events = [event async for event in engine.sample(job)]
    assert isinstance(events[-1], SampleResponse), events[-1]
    return events[-1]


async def failed_sample(engine: Engine, job: SampleJob) -> Failure:
    (event,) = [event async for event in engine.sample(job)]
    assert isinstance(event, Failure)
    return event


def tokens_of(response: SampleResponse) -> list[list[int]]:
    return [sequence.tokens for sequence in response.sequences]


# Base models


async def test_capabilities_describe_the_base_models(engine: Engine) -> None:
    capabilities = await engine.capabilities()
    (model,) = capabilities.models
    assert (model.name, model.vocab_size) == (BASE_MODEL, VOCAB_SIZE)
    assert model.max_context_length == CONTEXT_LENGTH
    assert capabilities.max_lora_rank >= 32


async def test_health_counts_what_the_engine_holds(engine: Engine) -> None:
    before = await engine.health()
    name, sampler = await create(engine), new_name()
    assert await engine.freeze(name, sampler) is None
    health = await engine.health()
    assert health.alive
    assert health.memory_bytes > 0
    assert health.num_adapters == before.num_adapters + 1
    assert health.num_samplers == before.num_samplers + 1
    await engine.unload_adapter(name)
    await engine.unload_sampler(sampler)
    after = await engine.health()
    assert after.num_adapters == before.num_adapters
    assert after.num_samplers == before.num_samplers


async def test_an_unknown_base_model_is_refused_by_name_and_the_known_ones_are_listed(
    engine: Engine,
) -> None:
    for failure in (
        await engine.create_adapter(new_name(), "gpt-17", LORA),
        await engine.load_sampler(new_name(), "gpt-17", Path("/nowhere")),
        await failed_sample(engine, job(base_model="gpt-17")),
    ):
        assert isinstance(failure, Failure)
        assert failure.category == "user"
        assert "gpt-17" in failure.message
        assert BASE_MODEL in failure.message


# Adapters


async def test_a_new_adapter_equals_the_base_model(engine: Engine, adapter: str) -> None:
    response = await sample(engine, job(SENTENCE, prompt_logprobs=True, max_tokens=1))
    assert response.prompt_logprobs_np is not None
    np.testing.assert_allclose(
        await logprobs(engine, adapter), response.prompt_logprobs_np[1:], atol=1e-5
    )


async def test_an_adapter_cannot_be_made_twice(engine: Engine, adapter: str) -> None:
    await train(engine, adapter)
    before = await logprobs(engine, adapter)
    failure = await engine.create_adapter(adapter, BASE_MODEL, LORA)
    assert isinstance(failure, Failure)
    assert adapter in failure.message
    np.testing.assert_array_equal(await logprobs(engine, adapter), before)


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        (LoraConfig(rank=0), "rank"),
        (LoraConfig(rank=100_000), "rank"),
        (LoraConfig(rank=4, seed=-1), "seed"),
        (LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=False), "train_"),
    ],
)
async def test_impossible_adapters_are_refused(engine: Engine, lora: LoraConfig, word: str) -> None:
    failure = await engine.create_adapter(new_name(), BASE_MODEL, lora)
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert word in failure.message


async def test_an_unloaded_adapter_is_gone_and_its_name_is_free(engine: Engine) -> None:
    name = await create(engine)
    await train(engine, name)
    await engine.unload_adapter(name)
    await engine.unload_adapter(name)
    (result,) = await run(engine, forward_backward(name, datum()))
    assert isinstance(result, Failure)
    assert name in result.message
    fresh = await create(engine)
    assert await engine.create_adapter(name, BASE_MODEL, LORA) is None
    np.testing.assert_array_equal(await logprobs(engine, name), await logprobs(engine, fresh))


async def test_unknown_adapters_fail_as_the_users_mistake(engine: Engine, tmp_path: Path) -> None:
    (passed,) = await run(engine, forward_backward("nobody", datum()))
    (stepped,) = await engine.step([Step(adapter_id="nobody", params=ADAM)])
    for failure in (
        passed,
        stepped,
        await engine.snapshot("nobody", tmp_path / "a", "training"),
        await engine.restore("nobody", tmp_path / "a", "training"),
        await engine.freeze("nobody", new_name()),
    ):
        assert isinstance(failure, Failure)
        assert failure.category == "user"
        assert "nobody" in failure.message


# Training


async def test_training_makes_a_datum_likelier(engine: Engine, adapter: str) -> None:
    before = await logprobs(engine, adapter)
    await train(engine, adapter, num_steps=5)
    assert (await logprobs(engine, adapter)).sum() > before.sum() + 0.1


async def test_a_pass_reports_every_log_probability_and_the_summed_loss(
    engine: Engine, adapter: str
) -> None:
    weights = [0.0, 1.0, 2.0, 0.0, 1.0, 0.5, 1.0]
    (output,) = await done(engine, forward_backward(adapter, datum(weights=weights), datum(OTHER)))
    first, second = (item["logprobs"].numpy for item in output.loss_fn_outputs)
    assert first.shape == (len(SENTENCE) - 1,)
    assert second.shape == (len(OTHER) - 1,)
    assert (first < 0).all()
    assert output.metrics["loss:sum"] == pytest.approx(
        -(first @ np.array(weights)) - second.sum(), rel=1e-5
    )


async def test_forward_leaves_no_trace(engine: Engine) -> None:
    touched, untouched = await create(engine), await create(engine)
    for name in (touched, untouched):
        if name == touched:
            await done(engine, forward_backward(name, datum(OTHER), forward_only=True))
        await done(engine, forward_backward(name, datum()))
        if name == touched:
            await done(engine, forward_backward(name, datum(OTHER), forward_only=True))
        await step(engine, name)
    np.testing.assert_array_equal(
        await logprobs(engine, touched), await logprobs(engine, untouched)
    )


async def test_gradients_add_up_however_the_data_is_cut(engine: Engine) -> None:
    whole, cut = await create(engine), await create(engine)
    await done(engine, forward_backward(whole, datum(), datum(OTHER), datum(SENTENCE[:4])))
    await done(engine, forward_backward(cut, datum()))
    await done(
        engine,
        forward_backward(cut, datum(OTHER)),
        forward_backward(cut, datum(SENTENCE[:4])),
    )
    assert await step(engine, whole) == await step(engine, cut)
    np.testing.assert_array_equal(await logprobs(engine, whole), await logprobs(engine, cut))


async def test_other_tenants_in_the_batch_change_nothing(engine: Engine) -> None:
    alone, together, stranger = [await create(engine) for _ in range(3)]
    await train(engine, stranger, datum(OTHER), num_steps=2)
    (expected,) = await done(engine, forward_backward(alone, datum()))
    _, result, _ = await done(
        engine,
        forward_backward(stranger, datum(OTHER), datum(OTHER)),
        forward_backward(together, datum()),
        forward_backward(stranger, datum(OTHER)),
    )
    assert result.loss_fn_outputs == expected.loss_fn_outputs
    clipped = AdamParams(learning_rate=0.02, grad_clip_norm=0.01)
    await engine.step(
        [Step(adapter_id=stranger, params=clipped), Step(adapter_id=together, params=ADAM)]
    )
    await step(engine, alone)
    np.testing.assert_array_equal(await logprobs(engine, alone), await logprobs(engine, together))


async def test_calls_take_effect_in_the_order_in_which_they_are_made(engine: Engine) -> None:
    waiting, hurrying = await create(engine), await create(engine)
    await train(engine, waiting)
    await train(engine, waiting, datum(OTHER))
    # Nothing is awaited until everything has been handed over.
    calls: list[Any] = [
        asyncio.ensure_future(call)
        for call in (
            run(engine, forward_backward(hurrying, datum())),
            step(engine, hurrying),
            run(engine, forward_backward(hurrying, datum(OTHER))),
            step(engine, hurrying),
        )
    ]
    await asyncio.gather(*calls)
    np.testing.assert_array_equal(await logprobs(engine, waiting), await logprobs(engine, hurrying))


async def drain(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def test_seeds_of_adapters_matter_and_reproduce(engine: Engine) -> None:
    first, again, other = [
        await create(engine, LoraConfig(rank=4, seed=seed)) for seed in (5, 5, 6)
    ]
    for name in (first, again, other):
        await train(engine, name, num_steps=2)
    np.testing.assert_array_equal(await logprobs(engine, first), await logprobs(engine, again))
    assert not np.array_equal(await logprobs(engine, first), await logprobs(engine, other))


async def test_a_step_reports_its_metrics_and_honours_its_parameters(engine: Engine) -> None:
    metrics = {}
    for name, params in {
        "plain": ADAM,
        "still": AdamParams(learning_rate=0.0),
        "clipped": AdamParams(learning_rate=0.02, eps=1.0, grad_clip_norm=1e-3),
    }.items():
        adapter_id = await create(engine)
        before = await logprobs(engine, adapter_id)
        await done(engine, forward_backward(adapter_id, datum()))
        metrics[name] = await step(engine, adapter_id, params)
        moved = np.abs(await logprobs(engine, adapter_id) - before).max()
        assert (moved == 0) == (name == "still")
        assert name != "clipped" or moved < 1e-2
    assert metrics["plain"]["grad_norm"] > 0
    assert metrics["plain"]["update_norm"] > metrics["clipped"]["update_norm"] > 0
    assert metrics["still"]["update_norm"] == 0


POLICY = {
    "logprobs": [-1.0, -2.0, -3.0, -1.5, -2.5, -0.5, -4.0],
    "advantages": [1.0, -1.0, 0.5, 0.0, 2.0, -0.5, 1.0],
}


@pytest.mark.parametrize(
    ("loss_fn", "config", "inputs"),
    [
        ("importance_sampling", {}, POLICY),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, POLICY),
        ("cispo", {}, POLICY),
        ("dro", {"beta": 0.1}, POLICY),
        ("gspo", {}, {**POLICY, "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]}),
    ],
)
async def test_every_loss_has_the_value_its_formula_gives(
    engine: Engine, loss_fn: str, config: dict[str, float], inputs: dict[str, list[float]]
) -> None:
    adapter_id = await create(engine)
    (output,) = await done(
        engine,
        forward_backward(
            adapter_id, datum(SENTENCE, **inputs), loss_fn=loss_fn, loss_fn_config=config
        ),
    )
    p = output.loss_fn_outputs[0]["logprobs"].numpy.astype(np.float64)
    expected = loss_by_formula(loss_fn, p, config, inputs)
    # float32 in the engine, ratios up to exp(4).
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    before = await logprobs(engine, adapter_id)
    await step(engine, adapter_id)
    assert not np.array_equal(await logprobs(engine, adapter_id), before)


def loss_by_formula(
    loss_fn: str, p: np.ndarray, config: dict[str, float], inputs: dict[str, list[float]]
) -> float:
    """The formulas of the public documentation, token by token."""
    low = config.get("clip_low_threshold", 0.8)
    high = config.get("clip_high_threshold", 1.2)
    total = 0.0
    mask = inputs.get("sequence_ratio_mask", [1.0] * len(p))
    differences = [pt - qt for pt, qt, m in zip(p, inputs["logprobs"], mask, strict=True) if m]
    sequence_ratio = math.exp(sum(differences) / len(differences))
    for pt, qt, at in zip(p, inputs["logprobs"], inputs["advantages"], strict=True):
        r = math.exp(pt - qt)
        if loss_fn == "importance_sampling":
            total -= r * at
        elif loss_fn == "ppo":
            total -= min(r * at, min(max(r, low), high) * at)
        elif loss_fn == "cispo":
            total -= min(max(r, low), high) * pt * at
        elif loss_fn == "dro":
            total -= pt * at - 0.5 * config["beta"] * (pt - qt) ** 2
        else:
            s = sequence_ratio
            total -= min(s * at, min(max(s, low), high) * at)
    return total


async def test_cross_entropy_takes_several_targets_a_position(engine: Engine, adapter: str) -> None:
    tokens = SENTENCE[:4]
    targets = np.array([[40, 7], [20, 8], [60, 9], [30, 5]])
    weights = np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5], [0.0, 1.0]], dtype=np.float32)
    item = Datum(
        model_input=ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": TensorData.from_numpy(targets),
            "weights": TensorData.from_numpy(weights),
        },
    )
    (output,) = await done(engine, forward_backward(adapter, item))
    scores = output.loss_fn_outputs[0]["logprobs"].numpy
    assert scores.shape == targets.shape
    assert output.metrics["loss:sum"] == pytest.approx(-(scores * weights).sum(), rel=1e-5)
    np.testing.assert_allclose(
        scores[:, 0], await logprobs(engine, adapter, [*tokens, 30]), atol=1e-5
    )


BAD_PASSES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no data": (lambda: {"data": []}, "data"),
    "unknown loss": (lambda: {"loss_fn": "hinge"}, "hinge"),
    "loss we do not have": (lambda: {"loss_fn": "stable_reinforce"}, "stable_reinforce"),
    "unknown setting": (lambda: {"loss_fn_config": {"gamma": 1.0}}, "gamma"),
    "token outside the vocabulary": (
        lambda: {"data": [datum(), datum([5, VOCAB_SIZE, 6])]},
        "data[1]",
    ),
    "target outside the vocabulary": (
        lambda: {"data": [datum([5, 6, VOCAB_SIZE])]},
        "target_tokens",
    ),
    "negative token": (lambda: {"data": [datum([5, -1, 6])]}, "data[0]"),
    "missing target": (
        lambda: {"data": [Datum(model_input=ModelInput.from_ints([1, 2]))]},
        "target_tokens",
    ),
    "missing input": (
        lambda: {"loss_fn": "ppo", "data": [datum(logprobs=POLICY["logprobs"])]},
        "advantages",
    ),
    "unknown input": (lambda: {"data": [datum(advantages=POLICY["advantages"])]}, "advantages"),
    "length mismatch": (lambda: {"data": [datum(weights=[1.0, 1.0])]}, "weights"),
    "empty sequence": (
        lambda: {"data": [Datum(ModelInput.empty(), {"target_tokens": []})]},
        "data[0]",
    ),
    "not finite": (
        lambda: {"data": [datum(weights=[1.0] * 6 + [math.nan])]},
        "weights",
    ),
    "too long": (lambda: {"data": [datum([5] * (CONTEXT_LENGTH + 2))]}, str(CONTEXT_LENGTH)),
    "an image": (
        lambda: {
            "data": [
                Datum(
                    ModelInput(chunks=[ImageChunk(data=b"x", format="png", expected_tokens=1)]),
                    {"target_tokens": [5]},
                )
            ]
        },
        "image",
    ),
}


@pytest.mark.parametrize("mistake", BAD_PASSES)
async def test_a_mistake_fails_its_own_pass_and_nothing_else(engine: Engine, mistake: str) -> None:
    change, word = BAD_PASSES[mistake]
    victim, neighbour, undisturbed = [await create(engine) for _ in range(3)]
    fields = {"adapter_id": victim, "data": [datum()], "loss_fn": "cross_entropy", **change()}
    before, failure, after = await run(
        engine,
        forward_backward(neighbour, datum()),
        Pass(**fields),
        forward_backward(victim, datum()),
    )
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert word in failure.message
    assert isinstance(before, ForwardBackwardOutput)
    assert isinstance(after, ForwardBackwardOutput)
    # The victim has the gradient of its good pass alone.
    await done(engine, forward_backward(undisturbed, datum()))
    for name in (victim, neighbour, undisturbed):
        await step(engine, name)
    expected = await logprobs(engine, undisturbed)
    np.testing.assert_array_equal(await logprobs(engine, victim), expected)
    np.testing.assert_array_equal(await logprobs(engine, neighbour), expected)


async def test_a_datum_may_fill_the_context(engine: Engine, adapter: str) -> None:
    tokens = [3 + i % 90 for i in range(CONTEXT_LENGTH + 1)]
    assert (await logprobs(engine, adapter, tokens)).shape == (CONTEXT_LENGTH,)


@pytest.mark.parametrize(
    "params",
    [AdamParams(beta1=1.0), AdamParams(learning_rate=math.nan), AdamParams(eps=-1.0)],
)
async def test_an_impossible_step_changes_nothing(engine: Engine, params: AdamParams) -> None:
    name, undisturbed = await create(engine), await create(engine)
    for adapter_id in (name, undisturbed):
        await done(engine, forward_backward(adapter_id, datum()))
    (failure,) = await engine.step([Step(adapter_id=name, params=params)])
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    for adapter_id in (name, undisturbed):
        await step(engine, adapter_id)
    np.testing.assert_array_equal(await logprobs(engine, name), await logprobs(engine, undisturbed))


# Snapshots


async def assert_same_future(engine: Engine, left: str, right: str) -> None:
    """Both have the same weights now, and after more training."""
    np.testing.assert_array_equal(await logprobs(engine, left), await logprobs(engine, right))
    for name in (left, right):
        await train(engine, name, datum(OTHER), num_steps=2)
    np.testing.assert_array_equal(await logprobs(engine, left), await logprobs(engine, right))


async def test_an_exact_snapshot_restores_everything(engine: Engine, tmp_path: Path) -> None:
    original = await create(engine)
    await train(engine, original, num_steps=2)
    await done(engine, forward_backward(original, datum(OTHER)))
    saved = await engine.snapshot(original, tmp_path / "s", "exact")
    assert not isinstance(saved, Failure)
    assert saved.step == 2
    assert saved.size_bytes == sum(f.stat().st_size for f in (tmp_path / "s").rglob("*"))
    copy = await create(engine, LoraConfig(rank=4, seed=99))
    restored = await engine.restore(copy, tmp_path / "s", "exact")
    assert not isinstance(restored, Failure)
    assert restored.step == 2
    for name in (original, copy):
        await step(engine, name)
    await assert_same_future(engine, original, copy)


async def test_a_training_snapshot_restores_the_optimizer_and_drops_gradients(
    engine: Engine, tmp_path: Path
) -> None:
    original, copy = await create(engine), await create(engine)
    await train(engine, original, num_steps=2)
    await engine.snapshot(original, tmp_path / "s", "training")
    await done(engine, forward_backward(copy, datum(OTHER)))
    assert not isinstance(await engine.restore(copy, tmp_path / "s", "training"), Failure)
    await assert_same_future(engine, original, copy)


async def test_restoring_the_weights_alone_starts_the_optimizer_afresh(
    engine: Engine, tmp_path: Path
) -> None:
    original, copy, again = [await create(engine) for _ in range(3)]
    await train(engine, original, num_steps=2)
    await train(engine, copy, datum(OTHER))
    await engine.snapshot(original, tmp_path / "full", "training")
    await engine.snapshot(original, tmp_path / "weights", "sampler")
    for name, folder in ((copy, "full"), (again, "weights")):
        info = await engine.restore(name, tmp_path / folder, "sampler")
        assert not isinstance(info, Failure)
    await assert_same_future(engine, copy, again)
    assert not np.array_equal(await logprobs(engine, copy), await logprobs(engine, original))


async def test_restoring_an_adapter_onto_itself_undoes_what_came_after(
    engine: Engine, adapter: str, tmp_path: Path
) -> None:
    await train(engine, adapter)
    before = await logprobs(engine, adapter)
    await engine.snapshot(adapter, tmp_path / "s", "training")
    await train(engine, adapter, num_steps=3)
    await engine.restore(adapter, tmp_path / "s", "training")
    np.testing.assert_array_equal(await logprobs(engine, adapter), before)


async def test_a_snapshot_does_not_disturb_the_adapter(engine: Engine, tmp_path: Path) -> None:
    saved, unsaved = await create(engine), await create(engine)
    for name in (saved, unsaved):
        await train(engine, name)
        await done(engine, forward_backward(name, datum()))
    for kind in ("sampler", "training", "exact"):
        await engine.snapshot(saved, tmp_path / kind, kind)  # type: ignore[arg-type]
    for name in (saved, unsaved):
        await step(engine, name)
    await assert_same_future(engine, saved, unsaved)


async def test_a_snapshot_never_overwrites(engine: Engine, adapter: str, tmp_path: Path) -> None:
    await engine.snapshot(adapter, tmp_path / "s", "training")
    await train(engine, adapter)
    before = contents(tmp_path)
    assert isinstance(await engine.snapshot(adapter, tmp_path / "s", "training"), Failure)
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files below the folder with their bytes, and all folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


async def test_a_snapshot_that_does_not_fit_is_refused_and_changes_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    source, target = await create(engine, LoraConfig(rank=2)), await create(engine)
    await train(engine, source)
    await train(engine, target)
    before = await logprobs(engine, target)
    await engine.snapshot(source, tmp_path / "rank", "exact")
    await engine.snapshot(target, tmp_path / "little", "sampler")
    (tmp_path / "empty").mkdir()
    for folder, kind, word in (
        ("rank", "training", "rank"),
        ("little", "training", "sampler"),
        ("empty", "sampler", ""),
        ("nowhere", "sampler", "nowhere"),
    ):
        failure = await engine.restore(target, tmp_path / folder, kind)  # type: ignore[arg-type]
        assert isinstance(failure, Failure), folder
        assert failure.category == "user", folder
        assert word in failure.message
        np.testing.assert_array_equal(await logprobs(engine, target), before)


# Samplers


@pytest.mark.parametrize("way", ["freeze", "load_sampler"])
async def test_a_sampler_is_frozen(engine: Engine, adapter: str, tmp_path: Path, way: str) -> None:
    await train(engine, adapter, num_steps=3)
    sampler = new_name()
    if way == "freeze":
        assert await engine.freeze(adapter, sampler) is None
    else:
        await engine.snapshot(adapter, tmp_path / "s", "sampler")
        assert await engine.load_sampler(sampler, BASE_MODEL, tmp_path / "s") is None
    asked = {"sampler_id": sampler, "prompt_logprobs": True, "seed": 3, "num_samples": 2}
    response = await sample(engine, job(SENTENCE, **asked))
    assert response.prompt_logprobs_np is not None
    np.testing.assert_allclose(
        response.prompt_logprobs_np[1:], await logprobs(engine, adapter), atol=1e-5
    )
    await train(engine, adapter, datum(OTHER), num_steps=5)
    trained = await logprobs(engine, adapter)
    again = await sample(engine, job(SENTENCE, **asked))
    np.testing.assert_array_equal(again.prompt_logprobs_np, response.prompt_logprobs_np)
    assert tokens_of(again) == tokens_of(response)
    # Nor does sampling change what is trained.
    np.testing.assert_array_equal(await logprobs(engine, adapter), trained)
    await engine.unload_adapter(adapter)
    assert tokens_of(await sample(engine, job(SENTENCE, **asked))) == tokens_of(response)


async def test_samplers_do_not_replace_each_other(engine: Engine, adapter: str) -> None:
    names, expected = [], []
    for _ in range(3):
        await train(engine, adapter, num_steps=2)
        names.append(new_name())
        assert await engine.freeze(adapter, names[-1]) is None
        expected.append((await logprobs(engine, adapter)).tolist())
    responses = await asyncio.gather(
        *(
            sample(engine, job(SENTENCE, sampler_id=name, prompt_logprobs=True, max_tokens=1))
            for name in names
        )
    )
    for response, values in zip(responses, expected, strict=True):
        np.testing.assert_allclose(response.prompt_logprobs_np[1:], values, atol=1e-5)  # type: ignore[index]
    failure = await engine.freeze(adapter, names[0])
    assert isinstance(failure, Failure)
    assert names[0] in failure.message


async def test_an_unloaded_sampler_is_gone(engine: Engine, adapter: str) -> None:
    sampler = new_name()
    await engine.freeze(adapter, sampler)
    await engine.unload_sampler(sampler)
    await engine.unload_sampler(sampler)
    failure = await failed_sample(engine, job(sampler_id=sampler))
    assert failure.category == "user"
    assert sampler in failure.message


async def test_a_sampler_cannot_be_loaded_from_nothing(engine: Engine, tmp_path: Path) -> None:
    failure = await engine.load_sampler(new_name(), BASE_MODEL, tmp_path / "nothing")
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert "nothing" in failure.message


# Sampling


async def test_a_sample_has_tokens_log_probabilities_and_a_stop_reason(engine: Engine) -> None:
    response = await sample(engine, job(num_samples=3, max_tokens=5))
    assert len(response.sequences) == 3
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        assert sequence.stop_reason == "length"
        assert sequence.tokens_np is not None
        assert sequence.logprobs_np is not None
        assert sequence.tokens_np.shape == sequence.logprobs_np.shape == (5,)
        assert (sequence.logprobs_np <= 0).all()
        assert all(0 <= token < VOCAB_SIZE for token in sequence.tokens)


async def test_seeds_reproduce_whatever_else_runs(engine: Engine) -> None:
    asked = {"seed": 11, "num_samples": 4, "max_tokens": 12}
    alone = await sample(engine, job(**asked))
    crowd = await asyncio.gather(
        *(sample(engine, job(OTHER, num_samples=2, max_tokens=20)) for _ in range(4)),
        sample(engine, job(**asked)),
        sample(engine, job(**{**asked, "seed": 12})),
    )
    assert tokens_of(crowd[4]) == tokens_of(alone)
    assert tokens_of(crowd[5]) != tokens_of(alone)
    # The samples of one request differ among themselves.
    assert len({tuple(tokens) for tokens in tokens_of(alone)}) > 1
    assert alone.sequences[0].logprobs == crowd[4].sequences[0].logprobs


async def test_without_a_seed_samples_differ(engine: Engine) -> None:
    first, second = [tokens_of(await sample(engine, job(max_tokens=30))) for _ in range(2)]
    assert first != second


async def test_temperature_zero_takes_the_likeliest_token(engine: Engine) -> None:
    response = await sample(
        engine, job(temperature=0, num_samples=2, topk_sample_logprobs=3, max_tokens=4)
    )
    first, second = response.sequences
    assert first.tokens == second.tokens
    assert first.topk_logprobs is not None
    for token, logprob, top in zip(
        first.tokens, first.logprobs or [], first.topk_logprobs, strict=True
    ):
        assert top is not None
        assert len(top) == 3
        assert top[0] == (token, pytest.approx(logprob, abs=1e-5))


async def test_top_k_of_one_is_greedy(engine: Engine) -> None:
    greedy = await sample(engine, job(temperature=0))
    cut = await sample(engine, job(top_k=1))
    assert tokens_of(cut) == tokens_of(greedy)
    tiny_nucleus = await sample(engine, job(top_p=1e-6))
    assert tokens_of(tiny_nucleus) == tokens_of(greedy)


async def test_sampled_log_probabilities_are_the_models(engine: Engine, adapter: str) -> None:
    prompt = SENTENCE[:3]
    (sequence,) = (await sample(engine, job(prompt, max_tokens=6))).sequences
    scores = await logprobs(engine, adapter, [*prompt, *sequence.tokens])
    np.testing.assert_allclose(sequence.logprobs_np, scores[len(prompt) - 1 :], atol=1e-5)


async def test_stop_tokens_end_a_sample_and_are_part_of_it(engine: Engine) -> None:
    (free,) = (await sample(engine, job(seed=5, max_tokens=10))).sequences
    stop = free.tokens[3]
    (stopped,) = (await sample(engine, job(seed=5, max_tokens=10, stop=[stop]))).sequences
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


async def test_stop_strings_are_found_across_tokens(engine: Engine) -> None:
    prompt = job(seed=5, max_tokens=40)
    (free,) = (await sample(engine, prompt)).sequences
    tokens = free.tokens
    start = next(i for i in range(len(tokens) - 1) if min(tokens[i : i + 2]) >= FIRST_CHARACTER)
    string = text_of(tokens[start : start + 2])
    (stopped,) = (await sample(engine, job(seed=5, max_tokens=40, stop=string))).sequences
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == tokens[: len(stopped.tokens)]
    assert string in text_of(stopped.tokens)
    assert string not in text_of(stopped.tokens[:-1])


async def test_the_end_of_sequence_token_stops_unless_nothing_may(
    engine: Engine, adapter: str
) -> None:
    sentence = [10, 40, EOS_TOKEN, 20]
    await train(engine, adapter, datum(sentence), num_steps=30)
    sampler = new_name()
    await engine.freeze(adapter, sampler)
    asked = {"sampler_id": sampler, "temperature": 0, "max_tokens": 4}
    (stopped,) = (await sample(engine, job([10], **asked, stop=None))).sequences
    assert (stopped.tokens, stopped.stop_reason) == ([40, EOS_TOKEN], "stop")
    (unstopped,) = (await sample(engine, job([10], **asked, stop=[]))).sequences
    assert (len(unstopped.tokens), unstopped.stop_reason) == (4, "length")


async def test_the_context_limits_a_sample(engine: Engine) -> None:
    prompt = [3 + i % 90 for i in range(CONTEXT_LENGTH - 28)]
    (sequence,) = (await sample(engine, job(prompt, max_tokens=None))).sequences
    assert len(sequence.tokens) == 28
    assert sequence.stop_reason == "length"


async def test_a_stream_reports_the_tokens_of_the_final_answer(engine: Engine) -> None:
    events = [event async for event in engine.sample(job(num_samples=3, seed=2, stream=True))]
    response = events.pop()
    assert isinstance(response, SampleResponse)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for event in events:
        assert isinstance(event, TokensSampled)
        streamed[event.index] += event.tokens.tolist()
        values[event.index] += event.logprobs.tolist()
    assert list(streamed.values()) == tokens_of(response)
    assert list(values.values()) == [sequence.logprobs for sequence in response.sequences]
    quiet = [event async for event in engine.sample(job(num_samples=3, seed=2))]
    assert len(quiet) == 1
    assert tokens_of(quiet[0]) == tokens_of(response)  # type: ignore[arg-type]


async def test_a_cancelled_job_ends_and_frees_its_place(engine: Engine) -> None:
    asked = job(max_tokens=100, num_samples=50, stream=True)
    stream = engine.sample(asked)
    assert isinstance(await anext(stream), TokensSampled)
    await engine.cancel(asked.job_id)
    await engine.cancel(asked.job_id)
    await engine.cancel("unknown")
    rest = [event async for event in stream]
    assert isinstance(rest[-1], Failure)
    assert asked.job_id in rest[-1].message
    health = await engine.health()
    assert health.running_samples == health.waiting_samples == 0


async def test_closing_a_stream_early_frees_its_place(engine: Engine) -> None:
    stream = engine.sample(job(max_tokens=100, num_samples=50, stream=True))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # engines give async generators
    health = await engine.health()
    assert health.running_samples == health.waiting_samples == 0


async def test_the_prompt_is_scored_as_asked(engine: Engine, adapter: str) -> None:
    expected = await logprobs(engine, adapter)
    targets = np.array([[40, 7], [-1, 8], [60, -1], [30, 5], [50, 1], [12, 12], [44, 3]])
    response = await sample(
        engine,
        job(
            SENTENCE,
            max_tokens=1,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            target_prompt_logprobs=TensorData.from_numpy(targets),
            prompt_alt_tokens_k=3,
            seed=1,
        ),
    )
    values = response.prompt_logprobs
    assert values is not None
    assert values[0] is None
    np.testing.assert_allclose(values[1:], expected, atol=1e-5)
    topk = response.topk_prompt_logprobs
    assert topk is not None
    assert topk[0] is None
    for row, own in zip(topk[1:], expected, strict=True):
        assert row is not None
        assert len(row) == 2
        assert row[0][1] >= row[1][1]
        assert row[0][1] >= own - 1e-5
    assert response.target_prompt_logprobs is not None
    scores = response.target_prompt_logprobs.numpy
    assert scores.shape == targets.shape
    assert scores[1, 0] == scores[2, 1] == 0
    np.testing.assert_allclose(scores[[0, 2, 3, 4], 0], expected[[0, 2, 3, 4]], atol=1e-5)
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.numpy.shape == (len(SENTENCE) - 1, 3)
    assert (response.prompt_alt_tokens.logprobs.numpy < 0).all()


async def test_sparse_targets_are_answered_in_their_own_layout(engine: Engine) -> None:
    asked = TensorData(
        data=[40, 60, 7],
        dtype="int64",
        shape=[7, 2],
        sparse_crow_indices=[0, 1, 1, 3, 3, 3, 3, 3],
        sparse_col_indices=[0, 0, 1],
    )
    plain = await sample(engine, job(SENTENCE, max_tokens=1, prompt_logprobs=True))
    response = await sample(engine, job(SENTENCE, max_tokens=1, target_prompt_logprobs=asked))
    answer = response.target_prompt_logprobs
    assert answer is not None
    assert answer.sparse_crow_indices == asked.sparse_crow_indices
    assert answer.sparse_col_indices == asked.sparse_col_indices
    assert plain.prompt_logprobs_np is not None
    np.testing.assert_allclose(answer.numpy[:2], plain.prompt_logprobs_np[[1, 3]], atol=1e-5)


async def test_only_the_last_prompt_positions_are_scored_when_asked(engine: Engine) -> None:
    whole = await sample(engine, job(SENTENCE, max_tokens=1, prompt_logprobs=True))
    part = await sample(
        engine, job(SENTENCE, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=3)
    )
    assert whole.prompt_logprobs_np is not None
    assert part.prompt_logprobs_np is not None
    assert np.isnan(part.prompt_logprobs_np[:-3]).all()
    np.testing.assert_allclose(
        part.prompt_logprobs_np[-3:], whole.prompt_logprobs_np[-3:], atol=1e-5
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [-1]},
        {"prompt": [5] * (CONTEXT_LENGTH + 1)},
        {"num_samples": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"max_tokens": -1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        {"prompt_logprobs_last_n": 1},
        {"topk_sample_logprobs": -1},
        {"target_prompt_logprobs": TensorData(data=[[5]], dtype="int64", shape=[1, 1])},
    ],
    ids=str,
)
async def test_impossible_samples_are_refused(engine: Engine, fields: dict[str, Any]) -> None:
    failure = await failed_sample(engine, job(**fields))
    assert failure.category == "user"


async def test_concurrent_calls_all_get_their_own_answer(engine: Engine) -> None:
    adapters = [await create(engine, LoraConfig(rank=4, seed=seed)) for seed in range(3)]

    async def train_one(name: str) -> np.ndarray:
        await train(engine, name, num_steps=3)
        return await logprobs(engine, name)

    prompts = [[10 + i, 20 + i, 30 + i] for i in range(20)]
    trained, sampled = await asyncio.gather(
        asyncio.gather(*map(train_one, adapters)),
        asyncio.gather(
            *(
                sample(engine, job(prompt, prompt_logprobs=True, temperature=0))
                for prompt in prompts
            )
        ),
    )
    again = [
        await sample(engine, job(prompt, prompt_logprobs=True, temperature=0)) for prompt in prompts
    ]
    assert [tokens_of(response) for response in sampled] == [tokens_of(r) for r in again]
    for name, values in zip(adapters, trained, strict=True):
        np.testing.assert_array_equal(await logprobs(engine, name), values)


# The end


async def test_a_closed_engine_says_so(kind: str, model_folder: Path) -> None:
    engine = await start(kind, model_folder)
    assert await engine.create_adapter("a", BASE_MODEL, LORA) is None
    stream = engine.sample(job(max_tokens=100, num_samples=50, stream=True))
    await anext(stream)
    await engine.close()
    await engine.close()
    health = await engine.health()
    assert not health.alive
    assert "closed" in health.detail
    with pytest.raises(EngineDiedError, match="closed"):
        await drain(stream)
    with pytest.raises(EngineDiedError, match="closed"):
        await engine.create_adapter("b", BASE_MODEL, LORA)
    with pytest.raises(EngineDiedError, match="closed"):
        await run(engine, forward_backward("a", datum()))
