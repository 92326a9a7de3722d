"""Two ranks that share one GPU compute what one rank does, in float32.

Sums are made in another order with two ranks, so results differ in last bits. Adam divides by the
size of the gradient: where that is all rounding, its sign is, too, and a step follows it at full
length. What is compared within 1e-5 are therefore the passes and their gradients, and steps of an
optimizer that does not blow up what is next to nothing (a large epsilon). With the usual epsilon
two ranks are held to what one rank does to itself when the batch comes in another order, which is
the same rounding without any ranks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.numpy import load_file

from tests.engine.conftest import build_reference, save_tokenizer
from tests.support.engine_calls import datum
from tinsmith.engine.base import Failure, Pass, Step
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.engine import LocalEngine
from tinsmith.types import AdamParams, Datum, LoraConfig

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-5
STEPS = 3
CALM = AdamParams(learning_rate=0.01, eps=1.0)
USUAL = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95)

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> LocalEngineConfig:
    folder = tmp_path_factory.mktemp("ranks")
    changes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384}
    build_reference("qwen3", **changes).save_pretrained(folder / "model")
    save_tokenizer(folder / "model", 97)
    return LocalEngineConfig(
        models={"m": str(folder / "model")},
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype="float32",
        deterministic=True,
        memory_fraction=0.2,
        verify_models=False,
        cache_folder=folder,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(config: LocalEngineConfig) -> AsyncIterator[LocalEngine]:
    engine = await LocalEngine.start(config)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(config: LocalEngineConfig) -> AsyncIterator[LocalEngine]:
    engine = await LocalEngine.start(replace(config, ranks=2))
    yield engine
    await engine.close()


async def test_a_pass_has_the_log_probabilities_and_gradients_of_one_rank(
    one: LocalEngine, two: LocalEngine, tmp_path: Path
) -> None:
    found, expected = [await taught(e, CALM, 0, tmp_path / n) for e, n in ((two, "2"), (one, "1"))]
    difference = largest_difference(found, expected)
    print(f"a pass: {difference:.1e}")
    assert difference <= TOLERANCE


async def test_calm_steps_end_where_those_of_one_rank_end(
    one: LocalEngine, two: LocalEngine, tmp_path: Path
) -> None:
    found, expected = [
        await taught(e, CALM, STEPS, tmp_path / n) for e, n in ((two, "2"), (one, "1"))
    ]
    difference = largest_difference(found, expected)
    print(f"{STEPS} calm steps: {difference:.1e}")
    assert difference <= TOLERANCE


async def test_usual_steps_differ_by_no_more_than_another_order_of_sums_makes(
    one: LocalEngine, two: LocalEngine, tmp_path: Path
) -> None:
    expected = await taught(one, USUAL, STEPS, tmp_path / "1")
    found = largest_difference(await taught(two, USUAL, STEPS, tmp_path / "2"), expected)
    turned = await taught(one, USUAL, STEPS, tmp_path / "turned", is_turned=True)
    by_order = largest_difference(turned, expected)
    print(f"{STEPS} usual steps: two ranks {found:.1e}, another order of the batch {by_order:.1e}")
    assert found <= max(TOLERANCE, 10 * by_order)


async def test_repeats_are_equal_to_the_bit(two: LocalEngine, tmp_path: Path) -> None:
    first, again = [await taught(two, USUAL, STEPS, tmp_path / n) for n in ("first", "again")]
    assert all(np.array_equal(first[name], again[name]) for name in first)


async def taught(
    engine: LocalEngine, adam: AdamParams, steps: int, folder: Path, *, is_turned: bool = False
) -> Tensors:
    """Weights, moments and the pending gradient after some steps and one more pass, and that
    pass's log-probabilities."""
    name = folder.name + str(adam.eps) + str(steps)
    assert await engine.create_adapter(name, "m", LoraConfig(rank=8, seed=3)) is None
    data = batch()
    order = list(reversed(range(len(data)))) if is_turned else list(range(len(data)))
    for _ in range(steps):
        await passed(engine, name, [data[place] for place in order])
        await engine.step([Step(adapter_id=name, params=adam)])
    logprobs = await passed(engine, name, [data[place] for place in order])
    info = await engine.save(name, folder, "exact")
    assert not isinstance(info, Failure), info
    await engine.unload_adapter(name)
    return _stored(folder) | {
        f"logprobs/{place}": row for place, row in zip(order, logprobs, strict=True)
    }


def _stored(folder: Path) -> Tensors:
    return {
        f"{file.stem}/{key}": value
        for file in sorted(folder.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


async def passed(engine: LocalEngine, name: str, data: list[Datum]) -> list[np.ndarray]:
    call = Pass(adapter_id=name, data=data, loss_fn="cross_entropy")
    (finished,) = [each async for each in engine.run_passes([call])]
    assert not isinstance(finished.result, Failure), finished.result
    return [output["logprobs"].numpy for output in finished.result.loss_fn_outputs]


def batch() -> list[Datum]:
    draw = np.random.default_rng(5)
    return [datum(draw.integers(3, 97, length).tolist()) for length in (64, 120, 33, 90)]


def largest_difference(found: Tensors, expected: Tensors) -> float:
    """Of a matrix's size: single numbers may be what large ones leave of each other."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[name] - value).max() / max(1.0, np.abs(value).max()))
        for name, value in expected.items()
    )
