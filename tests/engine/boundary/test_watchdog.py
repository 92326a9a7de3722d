"""An engine process that hangs is noticed and killed; one that has much to do is not."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.engine.boundary.stub_core import StubCore
from tinsmith.engine.base import Pass
from tinsmith.engine.local.boundary.messages import Patience, Reply, Request
from tinsmith.engine.local.boundary.worker import Incoming, Worker
from tinsmith.engine.local.engine import LocalEngine
from tinsmith.errors import EngineDiedError
from tinsmith.types import Datum, LoraConfig, ModelInput

LORA = LoraConfig(rank=4)


@pytest.fixture(autouse=True)
def _stub_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]))


async def _start(patience: Patience, **config: float) -> LocalEngine:
    return await LocalEngine.start(
        config, core="tests.engine.boundary.stub_core:StubCore", patience=patience
    )  # type: ignore[arg-type]  # the stub's own


async def test_a_stopped_process_is_killed_and_every_call_is_told_why() -> None:
    engine = await _start(Patience(silence_seconds=3.0))
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineDiedError, match="gave no sign of life for 3 s and was killed"):
        async with asyncio.timeout(20):
            await engine.create_adapter("a", "base", LORA)
    assert not (await engine.health()).alive
    await engine.close()


async def test_a_deadlocked_process_is_killed_although_it_gives_signs_of_life() -> None:
    engine = await _start(Patience(silence_seconds=60.0, turn_seconds=2.0))
    with pytest.raises(EngineDiedError, match=r"busy with create_adapter for . s and was killed"):
        async with asyncio.timeout(20):
            await engine.create_adapter("deadlock", "base", LORA)
    await engine.close()


@pytest.mark.slow
async def test_a_long_pass_is_not_a_hang() -> None:
    """It takes several times the time of a turn, and far more than none of its parts does."""
    engine = await _start(Patience(silence_seconds=3.0, turn_seconds=1.5), sleeps=0.1)
    passes = [Pass(adapter_id="parts:10", data=[], loss_fn="cross_entropy")]
    async with asyncio.timeout(30):
        results = [result async for result in engine.run_passes(passes)]
    assert len(results) == 1
    assert (await engine.health()).alive
    await engine.close()


@pytest.mark.slow
async def test_time_in_which_the_owner_was_stopped_does_not_count_as_silence() -> None:
    engine = await _start(Patience(silence_seconds=3.0))
    time.sleep(5.0)  # noqa: ASYNC251  # the whole owner stands still, as when a laptop sleeps
    await asyncio.sleep(1.5)
    assert await engine.create_adapter("a", "base", LORA) is None
    await engine.close()


def test_the_time_for_a_turn_grows_with_its_tokens() -> None:
    core = StubCore()
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    tokens = range(1000)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": [*tokens]}
    )
    item = Pass(adapter_id="parts:2", data=[datum] * 3, loss_fn="cross_entropy")
    beats = []
    spend = core._spend

    def spend_and_look(what: str, seconds: float) -> None:
        spend(what, seconds)
        beats.append(worker.beat())

    core._spend = spend_and_look

    def send(replies: list[Reply]) -> None:
        inbox.put(None)

    worker = Worker(core, inbox, send, core.clock, Patience(turn_seconds=10.0, token_seconds=0.5))
    inbox.put(Request(1, "run_passes", ((item,),)))
    worker.run()
    assert [(b.what, b.turn_seconds, b.patience_seconds) for b in beats] == [
        ("run_passes", 5.0, 10.0 + 0.5 * 3000)
    ] * 2
    assert worker.beat().turn_seconds == 0.0
