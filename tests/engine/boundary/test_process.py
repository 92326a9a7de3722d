"""The process boundary: whose turn it is, and what is left when a process dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import queue
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

from tests.engine.boundary.stub_core import StubCore
from tinsmith.engine.base import Failure, Pass, SampleJob, Step, TokensSampled
from tinsmith.engine.local.boundary.frames import Packed
from tinsmith.engine.local.boundary.messages import (
    Abandon,
    Done,
    Item,
    Reply,
    Request,
    Result,
    Trouble,
)
from tinsmith.engine.local.boundary.worker import Incoming, Worker
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.engine import LocalEngine
from tinsmith.errors import EngineDiedError, EngineError, TinkerError
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

LORA = LoraConfig(rank=4)
STUB = "tests.engine.boundary.stub_core:StubCore"


def job(
    job_id: str,
    max_tokens: int = 1,
    weights_id: str | None = None,
    base_model: str = "base",
    **more: Any,
) -> SampleJob:
    return SampleJob(
        job_id=job_id,
        base_model=base_model,
        weights_id=weights_id,
        prompt=ModelInput.from_ints([1]),
        params=SamplingParams(max_tokens=max_tokens),
        **more,
    )


def passes(*adapter_ids: str) -> tuple[Pass, ...]:
    return tuple(Pass(adapter_id=name, data=[], loss_fn="cross_entropy") for name in adapter_ids)


def work(*messages: Request | Abandon, core: StubCore | None = None) -> list[Reply]:
    """Let a worker treat messages that all have arrived; end when the last reply is there."""
    core = core or StubCore()
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    abandoned = {m.number for m in messages if isinstance(m, Abandon)}
    waiting = {m.number for m in messages} - abandoned
    replies: list[Reply] = []

    def send(batch: list[Reply]) -> None:
        replies.extend(batch)
        waiting.difference_update(r.number for r in batch if not isinstance(r, Item))
        if not waiting:
            inbox.put(None)

    for message in messages:
        inbox.put(message)
    Worker(core, inbox, send, core.clock).run()
    return replies


# Turns


def test_training_and_sampling_share_time_and_not_turns() -> None:
    core = StubCore()
    work(
        Request(1, "run_passes", (passes("parts:4"),)),
        Request(2, "sample", (job("j", max_tokens=20),)),
        core=core,
    )
    # A part takes five times as long as a decoding turn.
    assert core.log[:13] == ["turn", "part", *["turn"] * 5, "part", *["turn"] * 5]


def test_time_not_used_while_idle_is_not_saved_up() -> None:
    core = StubCore()
    worker_inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()

    def send(batch: list[Reply]) -> None:
        for reply in batch:
            if isinstance(reply, Done) and reply.number == 1:
                worker_inbox.put(Request(2, "sample", (job("j", max_tokens=50),)))
                worker_inbox.put(Request(3, "run_passes", (passes("parts:4"),)))
            if isinstance(reply, Done) and reply.number == 3:
                worker_inbox.put(None)

    worker_inbox.put(Request(1, "run_passes", (passes("parts:100"),)))
    Worker(core, worker_inbox, send, core.clock).run()
    mixed = core.log[100:113]
    assert mixed == ["turn", "part", *["turn"] * 5, "part", *["turn"] * 5]


def test_requests_are_carried_out_in_the_order_of_arrival() -> None:
    core = StubCore()
    work(
        Request(1, "create_adapter", ("a", "base", LORA)),
        Request(2, "run_passes", (passes("a"),)),
        Request(3, "step", ((Step(adapter_id="a", params=AdamParams()),),)),
        Request(4, "unload_adapter", ("a",)),
        core=core,
    )
    assert core.log == ["create a", "part", "step", "unload a"]


def test_a_long_call_for_passes_is_waited_for_only_by_requests_about_its_adapters() -> None:
    replies = work(
        Request(1, "run_passes", (passes("parts:100"),)),
        Request(2, "run_passes", (passes("parts:3"),)),
        Request(3, "step", ((Step(adapter_id="b", params=AdamParams()),),)),
        Request(4, "freeze", ("parts:100", "s")),
        Request(5, "create_adapter", ("c", "base", LORA)),
    )
    ended = [reply.number for reply in replies if not isinstance(reply, Item)]
    assert ended[:2] == [3, 2]
    last = max(at for at, reply in enumerate(replies) if isinstance(reply, Item))
    assert [reply.number for reply in replies[last:]] == [1, 4, 5, 1], "the pass, then those, done"


def test_who_has_his_result_goes_on_while_others_of_the_same_call_wait_for_theirs() -> None:
    step = Request(3, "step", ((Step(adapter_id="a", params=AdamParams()),),))
    replies = work(
        Request(1, "run_passes", (passes("a", "parts:100", "b", "a"),)),
        Request(2, "run_passes", (passes("b"),)),
        step,
    )
    told = [reply.number for reply in replies]
    assert told[:3] == [1, 1, 1], "of each a pass is behind the long one"
    replies = work(
        Request(1, "run_passes", (passes("a", "b", "parts:100", "b"),)),
        Request(2, "run_passes", (passes("a"),)),
        step,
    )
    told = [reply.number for reply in replies]
    assert told[:4] == [1, 1, 2, 3], "before the long one the next pass, and then the step"


def test_a_disk_that_is_slow_is_waited_for_by_nobody_but_who_reads_what_is_written() -> None:
    """Everybody else has his turn, also whoever trains on with the adapter that is saved."""
    core = StubCore()
    core.disk.clear()
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    answered: list[int] = []

    def send(batch: list[Reply]) -> None:
        answered.extend(reply.number for reply in batch if not isinstance(reply, Item))
        if set(answered) == {2, 3, 4}:
            core.disk.set()  # all that can be done meanwhile is done
        if len(answered) == 5:
            inbox.put(None)

    for message in (
        Request(1, "save", ("a", Path("/a"), "exact")),
        Request(2, "run_passes", (passes("a", "b"),)),
        Request(3, "sample", (job("j", max_tokens=2),)),
        Request(4, "restore", ("b", Path("/b"), "exact")),
        Request(5, "restore", ("c", Path("/a"), "exact")),
    ):
        inbox.put(message)
    Worker(core, inbox, send, core.clock).run()
    assert answered[3:] == [1, 5]
    assert core.log[-3:] == ["restore b", "write a", "restore c"]


def test_a_save_that_cannot_be_written_is_told_and_the_next_one_is_written() -> None:
    replies = work(
        Request(1, "save", ("raise", Path("/a"), "exact")),
        *(Request(n, "save", ("a", Path(f"/{n}"), "exact")) for n in range(2, 30)),
    )
    found = {reply.number: reply for reply in replies}
    assert found.pop(1) == Trouble(1, "save failed: RuntimeError: out of cheese")
    assert len(found) == 28 and all(isinstance(reply, Result) for reply in found.values())


def test_housekeeping_waits_until_there_is_nothing_to_do() -> None:
    core = StubCore()
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    inbox.put(Request(1, "run_passes", (passes("parts:3"),)))

    def settle() -> None:
        core.log.append("settle")
        inbox.put(None)

    Worker(core, inbox, lambda replies: None, core.clock, on_idle=settle).run()
    assert core.log == ["part", "part", "part", "settle"]


def test_what_stays_is_looked_through_once_after_modules_were_loaded() -> None:
    """In a process of its own: it changes what this one collects."""
    program = """
import gc
from tinsmith.engine.local.boundary.garbage import Garbage
garbage = Garbage()
garbage.settle()
first, kept = gc.get_freeze_count(), [[] for _ in range(1000)]
garbage.settle()
assert gc.get_freeze_count() <= first
import wave
garbage.settle()
assert gc.get_freeze_count() >= first + 1000
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_passes_wait_for_no_request_before_them_that_is_about_other_adapters() -> None:
    """And do not pay for the long one among those."""
    core = StubCore()
    replies = work(
        Request(1, "run_passes", (passes("parts:60"),)),
        Request(2, "create_adapter", ("long:400", "base", LORA)),
        *(Request(n, "unload_adapter", (f"{n}",)) for n in range(4, 9)),
        Request(3, "run_passes", (passes("parts:2"),)),
        Request(9, "run_passes", (passes("8"),)),
        core=core,
    )
    assert core.log[:3] == ["part", "part", "create long:400"], "both have begun before it"
    told = [reply.number for reply in replies]
    assert told[:3] == [2, 3, 3]
    assert told.index(8) < told.index(9)


def test_calls_for_passes_share_time_and_none_is_given_up_for_another() -> None:
    core = StubCore()
    replies = work(
        *(Request(number, "run_passes", (passes("parts:10"),)) for number in (1, 2)),
        Request(3, "run_passes", (passes("other"),)),
        core=core,
    )
    # Two of one adapter are carried out one after the other; the third waits for neither.
    assert [r.number for r in replies if isinstance(r, Done)] == [3, 1, 2]
    assert core.log == ["part"] * 21


def test_questions_are_answered_before_queued_work() -> None:
    replies = work(
        Request(1, "run_passes", (passes("parts:3"),)),
        Request(2, "health", ()),
        Request(3, "capabilities", ()),
    )
    assert [reply.number for reply in replies[:2]] == [2, 3]


def test_health_tells_how_long_the_engine_has_worked() -> None:
    """Only the turns count, not the waiting between them."""
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    replies: list[Reply] = []
    seconds = itertools.count(step=10.0)
    worker = Worker(StubCore(), inbox, replies.extend, clock=lambda: next(seconds))
    inbox.put(Request(1, "step", ((Step(adapter_id="a", params=AdamParams()),),)))
    threading.Timer(0.2, lambda: [inbox.put(m) for m in (Request(2, "health", ()), None)]).start()
    worker.run()
    (health,) = [r.value for r in replies if isinstance(r, Result) and r.number == 2]
    assert health.busy_seconds == 10.0


def test_a_sample_waits_for_the_freeze_that_makes_its_sampler() -> None:
    replies = work(
        Request(1, "run_passes", (passes("parts:2"),)),
        Request(2, "freeze", ("a", "s")),
        Request(3, "sample", (job("j", weights_id="s"),)),
    )
    (answer,) = [r.value for r in replies if isinstance(r, Item) and r.number == 3]
    assert isinstance(answer, SampleResponse)


def test_a_failing_request_is_reported_and_the_next_one_runs() -> None:
    replies = work(
        Request(1, "create_adapter", ("raise", "base", LORA)),
        Request(2, "run_passes", (passes("raise"),)),
        Request(3, "create_adapter", ("a", "base", LORA)),
    )
    assert replies == [
        Trouble(1, "create_adapter failed: RuntimeError: out of cheese"),
        Trouble(2, "run_passes failed: RuntimeError: out of cheese"),
        Result(3, None),
    ]


def test_a_failing_sampling_turn_ends_the_jobs_under_way() -> None:
    core = StubCore()
    replies = work(
        Request(1, "sample", (job("raise"),)), Request(2, "sample", (job("j"),)), core=core
    )
    assert [type(reply) for reply in replies] == [Trouble, Trouble]
    assert not core.is_sampling


def test_a_cancelled_job_ends_with_a_failure() -> None:
    replies = work(
        Request(1, "sample", (job("j", max_tokens=1000),)),
        Request(2, "cancel", ("j",)),
        Request(3, "cancel", ("unknown",)),
    )
    failure = Failure("sampling job 'j' was cancelled", "user")
    assert replies == [Item(1, failure), Done(1), Result(2, None), Result(3, None)]


def test_a_job_may_be_cancelled_while_it_waits_for_its_sampler() -> None:
    replies = work(
        Request(1, "freeze", ("a", "s")),
        Request(2, "sample", (job("j", weights_id="s"),)),
        Request(3, "cancel", ("j",)),
    )
    assert Item(2, Failure("sampling job 'j' was cancelled", "user")) in replies


def test_abandoned_work_is_not_done() -> None:
    core = StubCore()
    replies = work(
        Request(1, "run_passes", (passes("parts:1000"),)),
        Request(2, "sample", (job("j", max_tokens=1000),)),
        Abandon(1),
        Abandon(2),
        Request(3, "step", ((),)),
        core=core,
    )
    assert replies == [Result(3, [])]
    assert core.log == ["cancel j", "step"]


# The process


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
            busy = asyncio.create_task(engine.create_adapter("slow:1.6", "base", LORA))
            await asyncio.sleep(0.05)
            health = await engine.health()
            assert before.alive
            assert health.alive
            assert health.detail.startswith("busy")
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
            assert name in await engine.died()
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
            await left.died()
            assert (await right.health()).alive
            assert await right.create_adapter("a", "base", LORA) is None

    async def test_close_leaves_no_process_and_no_waiting_call(self) -> None:
        async with running(sleeps=0.01) as engine:
            pending = asyncio.create_task(_drain(engine.run_passes(passes("parts:100000"))))
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await engine.close()
            assert time.monotonic() - start < 2.0
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
            assert time.monotonic() - start < 4.0
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
        deadline = time.monotonic() + 5.0
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
