"""The worker of an engine's process: whose turn it is, and who waits for whom."""

from __future__ import annotations

import itertools
import queue
import subprocess
import sys
import threading
from pathlib import Path

from tests.engine.boundary.stub_core import StubCore
from tests.engine.boundary.stub_requests import LORA, job, passes, work
from tinsmith.engine.base import Failure, Step
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
from tinsmith.types import (
    AdamParams,
    SampleResponse,
)


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
