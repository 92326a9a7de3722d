"""What every engine promises of passes and steps: run on each.

Numbers are compared with each other, never with constants, so a model may be anything that learns.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.engine_calls import (
    ADAM,
    CONTEXT_LENGTH,
    OTHER,
    SENTENCE,
    VOCAB_SIZE,
    create,
    datum,
    done,
    forward_backward,
    logprobs,
    run,
    step,
    train,
)
from tinsmith.engine.base import Engine, Failure, Pass, Step
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ImageChunk,
    LoraConfig,
    ModelInput,
    TensorData,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
    assert metrics["plain"]["unclipped_grad_l2:mean"] > 0
    updates = {name: values["optim/update_norm"] for name, values in metrics.items()}
    assert updates["plain"] > updates["clipped"] > updates["still"] == 0


async def test_no_metric_of_a_step_has_a_name_that_callers_use_themselves(engine: Engine) -> None:
    metrics = await step(engine, await create(engine))
    assert metrics.keys().isdisjoint({"step", "learning_rate", "lr", "loss", "grad_norm"})
    assert all(name.startswith("optim/") or name.count(":") == 1 for name in metrics)


async def test_tokens_count_positions_and_weights_are_summed(engine: Engine, adapter: str) -> None:
    some = datum([10, 40, 20, 60], weights=[0.0, 1.5, 0.5])
    (output,) = await done(engine, forward_backward(adapter, some, datum([10, 40])))
    assert output.metrics["tokens:sum"] == 3 + 1
    assert output.metrics["weights:sum"] == 2.0 + 1.0


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
    low = config.get("clip_low_threshold", 0.0 if loss_fn == "cispo" else 0.8)
    high = config.get("clip_high_threshold", 4.0 if loss_fn == "cispo" else 1.2)
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
