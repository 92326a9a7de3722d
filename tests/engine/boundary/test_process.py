"""The process boundary: what crosses it, and what is left when a process dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.boundary.stub_requests import LORA, job, passes
from tinsmith.engine.base import Failure, Pass, TokensSampled
from tinsmith.engine.local.boundary.frames import Packed
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.engine import LocalEngine
from tinsmith.errors import EngineDiedError, EngineError, TinkerError
from tinsmith.types import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampleResponse,
)

STUB = "tests.engine.boundary.stub_core:StubCore"


@pytest.fixture
def stub_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process finds the stub and the package where the tests found them."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]))


@contextlib.asynccontextmanager
async def running(**config: float) -> AsyncIterator[LocalEngine]:
    engine = await LocalEngine.start(config, core=STUB)  # type: ignore[arg-type]  # the stub's own
    try:
        yield engine
    finally:
        await engine.close()


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def exists(pid: int) -> bool:
    """Whether there is such a process, a zombie included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("ours", "seen"), [(None, b"1"), ("4,7", b"7"), ("GPU-a,GPU-b", b"GPU-b")])
@pytest.mark.usefixtures("stub_path")
async def test_of_several_cuda_devices_a_process_sees_its_own(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, seen: bytes
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if ours is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    engine = await LocalEngine.start({}, core=STUB, cuda_devices=[1])  # type: ignore[arg-type]  # the stub's own
    try:
        assert b"CUDA_VISIBLE_DEVICES=" + seen in environment_of(engine.pid)
    finally:
        await engine.close()


async def test_a_cuda_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with pytest.raises(EngineError, match="no device cuda:2: CUDA_VISIBLE_DEVICES is 4,7"):
        await LocalEngine.start({}, core=STUB, cuda_devices=[2])  # type: ignore[arg-type]  # the stub's own


@pytest.mark.usefixtures("stub_path")
class TestProcess:
    async def test_calls_and_streams_reach_the_core(self) -> None:
        async with running() as engine:
            assert (await engine.capabilities()).max_lora_rank == 64
            assert await engine.create_adapter("a", "base", LORA) is None
            assert await engine.create_adapter("bad", "base", LORA) == Failure(
                "no such thing", "user"
            )
            results = [item async for item in engine.run_passes(passes("a", "parts:2"))]
            assert [item.index for item in results] == [0, 1]
            assert isinstance(results[1].result, ForwardBackwardOutput)
            events = [event async for event in engine.sample(job("j", 3, stream=True))]
            assert [type(e) for e in events] == [TokensSampled] * 3 + [SampleResponse]

    async def test_thousands_of_samples_are_unpacked_beside_the_event_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = []
        unpack = Packed.open

        def noting(packed: Packed) -> Any:
            threads.append(threading.get_ident())
            return unpack(packed)

        monkeypatch.setattr(Packed, "open", noting)
        async with running() as engine:
            (few,) = [event async for event in engine.sample(job("few"))]
            assert not threads
            (many,) = [event async for event in engine.sample(job("many"))]
        assert isinstance(few, SampleResponse) and len(few.sequences) == 1
        assert isinstance(many, SampleResponse) and len(many.sequences) == 4096
        assert len(threads) == 1 and threads[0] != threading.get_ident()

    async def test_calls_are_sent_when_they_are_made(self) -> None:
        async with running() as engine:
            stream = engine.run_passes(passes("a"))
            await engine.step([])
            assert (await engine.health()).detail == "part step"
            assert len([item async for item in stream]) == 1

    async def test_large_batches_cross_whole(self) -> None:
        async with running() as engine:
            tokens = np.arange(100_000, dtype=np.int32)
            datum = Datum(model_input=ModelInput.from_ints(tokens))
            batch = [Pass(adapter_id="a", data=[datum] * 50, loss_fn="cross_entropy")]
            results = [item async for item in engine.run_passes(batch)]
            assert len(results) == 1

    async def test_closing_a_stream_early_gives_up_the_rest(self) -> None:
        async with running(sleeps=0.001) as engine:
            stream = engine.run_passes(passes("a", *["parts:1000"] * 100))
            async for item in stream:
                assert item.index == 0
                break
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator
            async with asyncio.timeout(30):
                await engine.step([])
            sampling = engine.sample(job("j", max_tokens=100_000, stream=True))
            await anext(sampling)
            await sampling.aclose()  # type: ignore[attr-defined]  # an async generator
            assert (await engine.health()).running_samples == 0

    async def test_trouble_inside_is_raised_and_the_engine_lives_on(self) -> None:
        async with running() as engine:
            with pytest.raises(EngineError, match="out of cheese"):
                await engine.create_adapter("raise", "base", LORA)
            with pytest.raises(EngineError, match="out of cheese"):
                [item async for item in engine.run_passes(passes("raise"))]
            with pytest.raises(EngineError, match="out of cheese"):
                [event async for event in engine.sample(job("raise"))]
            assert (await engine.health()).alive

    async def test_an_engine_that_cannot_start_says_why(self) -> None:
        with pytest.raises(EngineError, match="there is no such device"):
            await LocalEngine.start({"refuse": 1.0}, core=STUB)  # type: ignore[arg-type]

    async def test_health_is_answered_while_the_process_is_busy(self) -> None:
        async with running() as engine:
            before = await engine.health()
            busy = asyncio.create_task(engine.create_adapter("slow:3600", "base", LORA))
            async with asyncio.timeout(30):
                while not (health := await engine.health()).detail.startswith("busy"):  # noqa: ASYNC110  # nobody announces it
                    await asyncio.sleep(0.01)
            assert before.alive
            assert health.alive
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError):
                await busy

    @pytest.mark.parametrize(
        ("signal_number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM")]
    )
    async def test_a_killed_process_fails_every_pending_call_at_once(
        self, signal_number: signal.Signals, name: str
    ) -> None:
        async with running(sleeps=0.01) as engine:
            stream = engine.run_passes(passes(*["parts:1000"] * 10))
            sampling = engine.sample(job("j", max_tokens=100_000, stream=True))
            await anext(sampling)
            slow = engine.create_adapter("slow:60", "base", LORA)  # whether or not it has begun
            pending = [
                asyncio.create_task(call) for call in (_drain(stream), _drain(sampling), slow)
            ]
            await asyncio.sleep(0.05)
            start = time.monotonic()
            os.kill(engine.pid, signal_number)
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
            assert time.monotonic() - start < 10, "not by its silence, which takes a minute"
            for outcome in outcomes:
                assert isinstance(outcome, EngineDiedError)
                assert f"engine process {engine.pid} was killed by {name}" in str(outcome)
            health = await engine.health()
            assert not health.alive
            assert name in health.detail
            with pytest.raises(EngineDiedError, match=name):
                await engine.step([])
            assert not exists(engine.pid)

    async def test_the_reason_of_a_death_holds_the_last_output(self) -> None:
        async with running() as engine:
            with pytest.raises(EngineDiedError, match="exited with status 3") as caught:
                await engine.create_adapter("exit:3", "base", LORA)
            assert "the disk has melted" in str(caught.value)

    async def test_a_segfault_is_reported_with_the_python_stack(self) -> None:
        async with running() as engine:
            with pytest.raises(EngineDiedError, match="SIGSEGV") as caught:
                await engine.create_adapter("segfault", "base", LORA)
            assert "create_adapter" in str(caught.value)

    async def test_ctrl_c_is_left_to_the_owner(self) -> None:
        async with running() as engine:
            os.kill(engine.pid, signal.SIGINT)
            await asyncio.sleep(0.05)
            assert (await engine.health()).alive

    async def test_two_engines_live_side_by_side(self) -> None:
        async with running() as left, running() as right:
            assert left.pid != right.pid
            os.kill(left.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError):
                await left.create_adapter("slow:60", "base", LORA)
            assert (await right.health()).alive
            assert await right.create_adapter("a", "base", LORA) is None

    async def test_close_leaves_no_process_and_no_waiting_call(self) -> None:
        async with running(sleeps=0.01) as engine:
            pending = asyncio.create_task(_drain(engine.run_passes(passes("parts:100000"))))
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await engine.close()
            assert time.monotonic() - start < 30, "the parts would take a thousand seconds"
            assert not exists(engine.pid)
            with pytest.raises(EngineDiedError, match="was closed"):
                await pending
            with pytest.raises(TinkerError, match="was closed"):
                await engine.capabilities()
            await engine.close()

    async def test_close_does_not_wait_for_a_turn_that_takes_for_ever(self) -> None:
        async with running() as engine:
            pending = asyncio.create_task(engine.create_adapter("slow:3600", "base", LORA))
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await engine.close()
            assert time.monotonic() - start < 30
            assert not exists(engine.pid)
            with pytest.raises(EngineDiedError):
                await pending

    def test_the_process_of_a_killed_owner_ends(self, tmp_path: Path) -> None:
        script = tmp_path / "owner.py"
        script.write_text(
            "import asyncio\n"
            "from tinsmith.engine.local.engine import LocalEngine\n"
            "async def main():\n"
            f"    engine = await LocalEngine.start({{}}, core={STUB!r})\n"
            "    print(engine.pid, flush=True)\n"
            "    await asyncio.sleep(3600)\n"
            "asyncio.run(main())\n"
        )
        with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            assert exists(pid)
            owner.kill()
        deadline = time.monotonic() + 30.0
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(pid)


# The real core in the process


@contextlib.asynccontextmanager
async def training(folder: Path) -> AsyncIterator[tuple[LocalEngine, AsyncIterator[Any]]]:
    """An engine with passes under way that would take many seconds; one of them is done."""
    datum = Datum(
        model_input=ModelInput.from_ints([5, 6, 7] * 40),
        loss_fn_inputs={"target_tokens": [6, 7, 5] * 40},
    )
    config = LocalEngineConfig(models={"tiny": str(folder)}, device="cpu", deterministic=True)
    engine = await LocalEngine.start(config)
    try:
        assert await engine.create_adapter("a", "tiny", LORA) is None
        item = Pass(adapter_id="a", data=[datum] * 10, loss_fn="cross_entropy")
        results = engine.run_passes([item] * 1000)
        assert isinstance((await anext(results)).result, ForwardBackwardOutput)
        yield engine, results
    finally:
        await engine.close()


async def test_a_process_killed_in_the_middle_of_a_pass_is_noticed_at_once(
    tiny_llama_folder: Path,
) -> None:
    async with training(tiny_llama_folder) as (engine, results):
        start = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            await _drain(results)
        assert time.monotonic() - start < 10, "not by its silence, which takes a minute"


async def test_a_sample_does_not_wait_for_the_passes_under_way(tiny_llama_folder: Path) -> None:
    async with training(tiny_llama_folder) as (engine, results):
        sample = job("j", max_tokens=5)
        events = await _drain(engine.sample(dataclasses.replace(sample, base_model="tiny")))
        assert isinstance(events[-1], SampleResponse)
        # The passes go on: they were not given up, nor all done before.
        assert isinstance((await anext(results)).result, ForwardBackwardOutput)


def is_running(pid: int) -> bool:
    """Whether the process still does something; nobody may be there to reap it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def _drain(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]
