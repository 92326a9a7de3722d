"""What every engine promises of saved adapters and samplers: run on each.

Numbers are compared with each other, never with constants, so a model may be anything that learns.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.support.engine_calls import (
    BASE_MODEL,
    OTHER,
    SENTENCE,
    create,
    datum,
    done,
    failed_sample,
    forward_backward,
    job,
    logprobs,
    new_name,
    sample,
    step,
    tokens_of,
    train,
)
from tinsmith.engine.base import Engine, Failure
from tinsmith.types import (
    LoraConfig,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


# Saved adapters


async def assert_same_future(engine: Engine, left: str, right: str) -> None:
    """Both have the same weights now, and after more training."""
    np.testing.assert_array_equal(await logprobs(engine, left), await logprobs(engine, right))
    for name in (left, right):
        await train(engine, name, datum(OTHER), num_steps=2)
    np.testing.assert_array_equal(await logprobs(engine, left), await logprobs(engine, right))


async def test_an_exact_save_restores_everything(engine: Engine, tmp_path: Path) -> None:
    original = await create(engine)
    await train(engine, original, num_steps=2)
    await done(engine, forward_backward(original, datum(OTHER)))
    saved = await engine.save(original, tmp_path / "s", "exact")
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


async def test_a_training_save_restores_the_optimizer_and_drops_gradients(
    engine: Engine, tmp_path: Path
) -> None:
    original, copy = await create(engine), await create(engine)
    await train(engine, original, num_steps=2)
    await engine.save(original, tmp_path / "s", "training")
    await done(engine, forward_backward(copy, datum(OTHER)))
    assert not isinstance(await engine.restore(copy, tmp_path / "s", "training"), Failure)
    await assert_same_future(engine, original, copy)


async def test_restoring_the_weights_alone_starts_the_optimizer_afresh(
    engine: Engine, tmp_path: Path
) -> None:
    original, copy, again = [await create(engine) for _ in range(3)]
    await train(engine, original, num_steps=2)
    await train(engine, copy, datum(OTHER))
    await engine.save(original, tmp_path / "full", "training")
    await engine.save(original, tmp_path / "weights", "sampler")
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
    await engine.save(adapter, tmp_path / "s", "training")
    await train(engine, adapter, num_steps=3)
    await engine.restore(adapter, tmp_path / "s", "training")
    np.testing.assert_array_equal(await logprobs(engine, adapter), before)


async def test_a_save_does_not_disturb_the_adapter(engine: Engine, tmp_path: Path) -> None:
    saved, unsaved = await create(engine), await create(engine)
    for name in (saved, unsaved):
        await train(engine, name)
        await done(engine, forward_backward(name, datum()))
    for kind in ("sampler", "training", "exact"):
        await engine.save(saved, tmp_path / kind, kind)  # type: ignore[arg-type]
    for name in (saved, unsaved):
        await step(engine, name)
    await assert_same_future(engine, saved, unsaved)


async def test_a_save_never_overwrites(engine: Engine, adapter: str, tmp_path: Path) -> None:
    await engine.save(adapter, tmp_path / "s", "training")
    await train(engine, adapter)
    before = contents(tmp_path)
    assert isinstance(await engine.save(adapter, tmp_path / "s", "training"), Failure)
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files below the folder with their bytes, and all folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


async def test_a_save_that_does_not_fit_is_refused_and_changes_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    source, target = await create(engine, LoraConfig(rank=2)), await create(engine)
    await train(engine, source)
    await train(engine, target)
    before = await logprobs(engine, target)
    await engine.save(source, tmp_path / "rank", "exact")
    await engine.save(target, tmp_path / "little", "sampler")
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
        await engine.save(adapter, tmp_path / "s", "sampler")
        assert await engine.load_sampler(sampler, BASE_MODEL, tmp_path / "s") is None
    asked = {"weights_id": sampler, "prompt_logprobs": True, "seed": 3, "num_samples": 2}
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
            sample(engine, job(SENTENCE, weights_id=name, prompt_logprobs=True, max_tokens=1))
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
    failure = await failed_sample(engine, job(weights_id=sampler))
    assert failure.category == "user"
    assert sampler in failure.message


async def test_a_sampler_cannot_be_loaded_from_nothing(engine: Engine, tmp_path: Path) -> None:
    failure = await engine.load_sampler(new_name(), BASE_MODEL, tmp_path / "nothing")
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert "nothing" in failure.message
