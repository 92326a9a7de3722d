"""Extreme but finite numbers: a result, or the sender's own error, and nobody else feels them."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from tests.support.engine_calls import (
    ADAM,
    OTHER,
    SENTENCE,
    create,
    datum,
    done,
    forward_backward,
    logprobs,
    run,
    step,
)
from tinsmith.engine.base import Engine, Failure, Pass, Step
from tinsmith.engine.loss_table import LOSSES
from tinsmith.types import AdamParams, ForwardBackwardOutput

pytestmark = pytest.mark.asyncio(loop_scope="session")

RATES = [0.0, 1e-300, 1e-4, 1.0, 1e4, 1e18, 1e19, 1e30, 3e38, 1e300]
NUMBERS = [0.0, 1e-45, -1.0, 1.0, -90.0, 90.0, -800.0, 1e19, -1e19, 1e30, 3e38, -3e38]


def is_clean(result: ForwardBackwardOutput | dict[str, float] | Failure) -> bool:
    """Whether it is a user's error, or numbers that are all finite."""
    if isinstance(result, Failure):
        return result.category == "user"
    if isinstance(result, dict):
        return all(math.isfinite(value) for value in result.values())
    numbers = [output["logprobs"].numpy for output in result.loss_fn_outputs]
    return all(np.isfinite(each).all() for each in numbers) and not any(
        math.isnan(value) for value in result.metrics.values()
    )


def some_params(draw: random.Random) -> AdamParams:
    return AdamParams(
        learning_rate=draw.choice(RATES),
        weight_decay=draw.choice([0.0, 0.0, *RATES]),
        beta1=draw.choice([0.0, 0.9, 1 - 1e-16]),
        beta2=draw.choice([0.0, 0.95, 1 - 1e-16]),
        eps=draw.choice([1e-30, 1e-12, 1.0, 1e300]),
        grad_clip_norm=draw.choice([0.0, 1e-300, 1.0, 1e300]),
    )


def some_pass(draw: random.Random, adapter_id: str) -> Pass:
    loss_fn = draw.choice(list(LOSSES))
    spec = LOSSES[loss_fn]
    length = len(SENTENCE) - 1
    inputs: dict[str, Any] = {
        name: [draw.choice(NUMBERS) for _ in range(length)]
        for name in (*spec.required, *(spec.optional if draw.random() < 0.5 else ()))
    }
    if "sequence_ratio_mask" in inputs:
        inputs["sequence_ratio_mask"] = [1.0] * length
    if "clip_low_threshold" in inputs:
        inputs["clip_low_threshold"] = [-3e38] * length
    config = {name: draw.choice([1e300, 4.0]) for name in spec.config if "low" not in name}
    return forward_backward(adapter_id, datum(**inputs), loss_fn=loss_fn, loss_fn_config=config)


@pytest.mark.parametrize("seed", range(12))
async def test_extreme_numbers_end_in_a_result_or_the_senders_error_and_others_are_bit_equal(
    engine: Engine, kind: str, seed: int
) -> None:
    """Each round the extreme model and a neighbour share a batch of passes and one of steps."""
    num_rounds = 2 if kind == "two_ranks" else 8
    draw = random.Random(seed)
    extreme, beside, alone = [await create(engine) for _ in range(3)]
    for _ in range(num_rounds):
        calm = forward_backward(beside, datum(), datum(OTHER))
        odd, other = await run(engine, some_pass(draw, extreme), calm)
        assert is_clean(odd), odd
        assert isinstance(other, ForwardBackwardOutput)
        (expected,) = await done(engine, forward_backward(alone, datum(), datum(OTHER)))
        assert other.metrics == expected.metrics
        params = some_params(draw)
        stepped, taken = await engine.step(
            [Step(adapter_id=extreme, params=params), Step(adapter_id=beside, params=ADAM)]
        )
        assert is_clean(stepped), (params, stepped)
        assert taken == await step(engine, alone)
    np.testing.assert_array_equal(await logprobs(engine, beside), await logprobs(engine, alone))


@pytest.mark.parametrize(
    ("field", "value"),
    [*itertools.product(["learning_rate", "weight_decay"], [1e5, 1e19, 1e30, 1e300])],
)
async def test_a_rate_beyond_all_sense_is_refused_with_its_field_and_limit(
    engine: Engine, adapter: str, field: str, value: float
) -> None:
    await done(engine, forward_backward(adapter, datum()))
    (failure,) = await engine.step([Step(adapter_id=adapter, params=AdamParams(**{field: value}))])
    assert isinstance(failure, Failure) and failure.category == "user"
    assert field in failure.message and "at most 10000" in failure.message
    taken = await step(engine, adapter)
    assert taken["unclipped_grad_l2:mean"] > 0, "the gradient is gone"


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
async def test_an_infinite_ratio_is_clipped_or_the_error_names_the_datum(
    engine: Engine, adapter: str, loss_fn: str
) -> None:
    length = len(SENTENCE) - 1
    inputs: dict[str, Any] = {
        "logprobs": [-3e38] * length,
        "advantages": [0.0] + [1.0] * (length - 1),
    }
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = [1.0] * length
    (result,) = await run(engine, forward_backward(adapter, datum(**inputs), loss_fn=loss_fn))
    if loss_fn == "importance_sampling":
        assert isinstance(result, Failure) and result.category == "user"
        assert "data[0].loss_fn_inputs" in result.message and "3.4e+38" in result.message
    else:
        assert isinstance(result, ForwardBackwardOutput), result
        assert math.isfinite(result.metrics["loss:sum"])
