"""The log of operations in every store: recorded once, ended once, read in order, trimmed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.contract.store_rows import MODEL, SESSION, operation, weights
from tinsmith.server.store import schema
from tinsmith.server.store.database import row_of
from tinsmith.server.store.errors import (
    ExpiredOperationError,
    StoreDamagedError,
)
from tinsmith.server.store.records import (
    Finish,
    StepRecord,
)
from tinsmith.server.store.store import Store


async def test_a_repeated_number_finds_the_first_operation(store: Store) -> None:
    """S35."""
    recorded, is_new = await store.log.record(operation(0), MODEL)
    assert is_new and recorded.request_id == "r0"
    again, is_new = await store.log.record(operation(0, request_id="other"), MODEL)
    assert not is_new and again.request_id == "r0"
    assert await store.models.get(MODEL.model_id) == MODEL


async def test_numbers_recorded_at_the_same_time_are_recorded_once(store: Store) -> None:
    await store.log.record(operation(0), MODEL)
    answers = await asyncio.gather(
        *[store.log.record(operation(1, request_id=f"x{n}")) for n in range(20)]
    )
    assert len({record.request_id for record, _ in answers}) == 1
    assert sum(is_new for _, is_new in answers) == 1


@pytest.mark.parametrize("size", [10, 300_000])
async def test_payloads_and_results_of_any_size_come_back(store: Store, size: int) -> None:
    payload, result = os.urandom(size), os.urandom(size)
    await store.log.record(operation(0, payload=payload), MODEL)
    assert await store.log.read_payload("r0") == payload
    end = Finish(
        request_id="r0", status="done", finished_at=5.0, result_type="output", result=result
    )
    await store.log.finish([end])
    found = await store.log.get("r0")
    assert found is not None and bytes(found.result or b"") == result
    assert (found.status, found.result_type, found.result_bytes) == ("done", "output", size)


async def test_an_operation_ends_once(store: Store) -> None:
    await store.log.record(operation(0), MODEL)
    end = Finish(request_id="r0", status="done", finished_at=5.0, result_type="json", result=b"1")
    await store.log.finish([end])
    await store.log.finish([dataclasses.replace(end, status="failed", error="late")])
    found = await store.log.get("r0")
    assert found is not None and found.status == "done" and found.error is None


async def test_an_end_that_quotes_what_no_database_takes_is_recorded(store: Store) -> None:
    """Errors quote names that clients chose. Were one refused, its operation could never end."""
    problem = "no input called 'a\0b\ud800'"
    step = StepRecord(model_id="m", seq_id=0, at=5.0, kind="forward_backward", error=problem)
    end = Finish(request_id="r0", status="failed", finished_at=5.0, error=problem, step=step)
    await store.log.record(operation(0), MODEL)
    ((_, told),) = await store.log.finish([end])
    refused = dataclasses.replace(operation(1), status="failed", finished_at=5.0, error=problem)
    await store.log.record(refused)
    for request_id in ("r0", "r1"):
        found = await store.log.get(request_id)
        assert found is not None and found.status == "failed"
        assert found.error == told.error == r"no input called 'a\0b\ud800'"


async def test_the_log_is_read_in_order_and_pending_models_are_known(store: Store) -> None:
    await store.log.record(operation(0), MODEL)
    for seq_id in (3, 1, 2):
        await store.log.record(operation(seq_id))
    assert [o.seq_id for o in await store.log.read(MODEL.model_id, 0)] == [1, 2, 3]
    assert await store.log.models_with_pending() == [MODEL.model_id]


async def test_what_waits_under_numbers_that_nobody_waits_for_any_more_has_failed(
    store: Store,
) -> None:
    await store.log.record(operation(0), MODEL)
    for seq_id in (1, 2, 3):
        await store.log.record(operation(seq_id))
    await store.log.finish([Finish(request_id="r0", status="done", finished_at=5.0)])
    await store.log.close(MODEL.model_id, 2, "too late")
    model = await store.models.get(MODEL.model_id)
    assert model is not None and model.closed_seq_id == 2
    log = await store.log.read(MODEL.model_id, -1)
    assert [o.status for o in log] == ["done", "failed", "failed", "pending"]
    assert [o.error for o in log] == [None, "too late", "too late", None]


async def test_the_logs_of_models_after_their_snapshots_are_read_together(store: Store) -> None:
    other = dataclasses.replace(MODEL, model_id="s:train:1", model_seq_id=1)
    await store.log.record(operation(0), MODEL)
    for seq_id in (2, 1):
        await store.log.record(operation(seq_id, payload=b"x" * 9000, payload_bytes=9000))
    await store.log.record(operation(0, request_id="other", model_id=other.model_id), other)
    await store.models.update(MODEL.model_id, {"snapshot_seq_id": 0})
    ids = [MODEL.model_id, other.model_id, "no such model"]
    found = await store.log.read_after_snapshots(ids, 10)
    assert [(o.model_id, o.seq_id) for o in found] == [(ids[0], 1), (ids[0], 2), (ids[1], 0)]
    assert [o.payload and bytes(o.payload) for o in found] == [None, None, b"payload"]
    assert await store.log.read_after_snapshots(ids, 2) == found[:2]
    assert {m.model_id for m in await store.models.get_many(ids)} == set(ids[:2])


async def test_models_in_use_are_those_of_active_sessions_used_last(store: Store) -> None:
    for session_id in ("s", "t"):
        await store.sessions.add(dataclasses.replace(SESSION, session_id=session_id))
    await store.sessions.update("t", {"state": "finished"})
    made = [("s", 5.0, 7), ("s", 7.0, 7), ("s", 6.0, 7), ("s", 8.0, 9000), ("t", 9.0, 7)]
    for number, (session_id, at, size) in enumerate(made):
        model = dataclasses.replace(
            MODEL,
            model_id=f"m{number}",
            model_seq_id=number,
            session_id=session_id,
            last_request_at=at,
        )
        about = {"request_id": model.model_id, "model_id": model.model_id, "created_at": at}
        first = operation(0, payload_bytes=size, **about)
        await store.log.record(first, model)
    assert await store.models.used_since(6.0, 10) == ["m1", "m2"]
    assert await store.models.used_since(0.0, 1) == ["m1"]


async def test_many_payloads_are_read_together_but_for_those_in_files(store: Store) -> None:
    sizes = {0: 10, 1: 100_000, 2: 20}
    payloads = {f"r{n}": os.urandom(size) for n, size in sizes.items()}
    for n in sizes:
        await store.log.record(operation(n, payload=payloads[f"r{n}"]), None if n else MODEL)
    found = await store.log.read_payloads(["r0", "r1", "r2", "r9"])
    assert found == {name: payloads[name] for name in ("r0", "r2")}
    assert await store.log.read_payloads([]) == {}


async def test_a_snapshot_drops_the_payloads_before_the_previous_one(store: Store) -> None:
    """The previous one is kept, and what is needed to come from there to the newest."""
    for seq_id in range(4):
        payload = os.urandom(100_000 if seq_id == 1 else 10)
        await store.log.record(operation(seq_id, payload=payload), MODEL if seq_id == 0 else None)
    ends = [Finish(request_id=f"r{n}", status="done", finished_at=5.0) for n in (0, 1, 2)]
    await store.log.finish(ends)
    await store.models.record_snapshot(MODEL.model_id, 1, weights("w1", "exact"))
    assert len(await store.log.read_payload("r1")) == 100_000
    await store.models.record_snapshot(MODEL.model_id, 2, weights("w2", "exact"))
    model = await store.models.get(MODEL.model_id)
    assert model is not None
    assert (model.snapshot_seq_id, model.snapshot_weights_id) == (2, "w2")
    assert (model.previous_snapshot_seq_id, model.previous_snapshot_weights_id) == (1, "w1")
    log = await store.log.read(MODEL.model_id, -1)
    assert [o.payload_file for o in log] == [None, None, None, None]
    assert [len(await store.log.read_payload(f"r{n}")) for n in (2, 3)] == [10, 10]
    assert await store.weights.unreferenced() == []
    await store.models.record_snapshot(MODEL.model_id, 2, weights("w3", "exact"))
    assert await store.weights.unreferenced() == [weights("w1", "exact")]


async def test_a_damaged_snapshot_gives_way_to_the_previous_one(store: Store) -> None:
    await store.log.record(operation(0), MODEL)
    await store.models.record_snapshot(MODEL.model_id, 0, weights("w1", "exact"))
    await store.models.record_snapshot(MODEL.model_id, 5, weights("w2", "exact"))
    await store.models.revert_snapshot(MODEL.model_id)
    model = await store.models.get(MODEL.model_id)
    assert model is not None
    assert (model.snapshot_seq_id, model.snapshot_weights_id) == (0, "w1")
    assert await store.weights.unreferenced() == [weights("w2", "exact")]
    assert set(await store.weights.ids()) == {"w1", "w2"}


async def test_a_retry_with_a_large_payload_leaves_no_second_file(
    store: Store, tmp_path: Path
) -> None:
    await store.log.record(operation(0, payload=b"x" * 100_000), MODEL)
    again = dataclasses.replace(operation(0, payload=b"x" * 100_000), request_id="another")
    first, is_new = await store.log.record(again)
    assert (first.request_id, is_new) == ("r0", False)
    names = [f.name for f in tmp_path.rglob("*.payload.*")]  # noqa: ASYNC240
    assert [name.partition(".")[0] for name in names] == ["r0"]


async def test_an_end_that_is_recorded_again_leaves_one_file(store: Store, tmp_path: Path) -> None:
    """After a commit that only seemed to fail."""
    await store.log.record(operation(0), MODEL)
    end = Finish(
        request_id="r0", status="done", finished_at=5.0, result_type="json", result=b"y" * 100_000
    )
    for _ in range(3):
        await store.log.finish([end])
    assert len([*tmp_path.rglob("r0.result.*")]) == 1  # noqa: ASYNC240
    found = await store.log.get("r0")
    assert found is not None and found.result == b"y" * 100_000


async def test_a_damaged_file_is_noticed(store: Store, tmp_path: Path) -> None:
    await store.log.record(operation(0, payload=b"x" * 100_000), MODEL)
    end = Finish(
        request_id="r0", status="done", finished_at=5.0, result_type="json", result=b"y" * 100_000
    )
    await store.log.finish([end])
    assert len(await store.log.read_payload("r0")) == 100_000
    for file in tmp_path.rglob("r0.*"):  # noqa: ASYNC240
        file.write_bytes(file.read_bytes()[:-1] + b"z")
    with pytest.raises(StoreDamagedError, match="checksum"):
        await store.log.read_payload("r0")
    found = await store.log.get("r0")
    assert found is not None and (found.result, found.result_type) == (None, "dropped")


async def test_results_are_dropped_by_age_and_by_size(store: Store) -> None:
    for seq_id in range(4):
        await store.log.record(operation(seq_id), MODEL if seq_id == 0 else None)
        end = Finish(
            request_id=f"r{seq_id}",
            status="done",
            finished_at=10.0 + seq_id,
            result_type="json",
            result=b"x" * 100,
        )
        await store.log.finish([end])
    await store.log.mark_retrieved({"r3": 20.0})
    dropped = await store.retention.drop_results(
        retrieved_before=21.0, finished_before=11.0, max_bytes=150
    )
    assert dropped == 3  # r3 was fetched, r0 is old, r1 is beyond the bytes
    left = [(await store.log.get(f"r{n}")).result_bytes for n in range(4)]  # type: ignore[union-attr]  # all exist
    assert left == [0, 0, 100, 0]


async def test_the_owner_whose_results_take_most_loses_the_oldest(store: Store) -> None:
    """One who leaves large results behind costs nobody else a result that was not fetched yet."""
    for owner, size, num_results in (("small", 30, 1), ("even", 60, 1), ("crowd", 50, 4)):
        model = dataclasses.replace(
            MODEL, session_id=None, model_seq_id=None, model_id=owner, owner=owner
        )
        for seq_id in range(num_results):
            request_id = f"{owner}{seq_id}"
            record = dataclasses.replace(
                operation(seq_id), request_id=request_id, model_id=owner, owner=owner
            )
            await store.log.record(record, model if seq_id == 0 else None)
            # The others' ended first: by age alone they would go.
            at = 10.0 + seq_id + 10.0 * (owner == "crowd")
            end = Finish(
                request_id=request_id,
                status="done",
                finished_at=at,
                result_type="json",
                result=b"x" * size,
            )
            await store.log.finish([end])
    for max_bytes, left in ((300, 4), (200, 2), (160, 1)):
        await store.retention.drop_results(
            retrieved_before=0.0, finished_before=0.0, max_bytes=max_bytes
        )
        kept = [f"crowd{n}" for n in range(4)][4 - left :]
        for request_id in ("small0", "even0", *(f"crowd{n}" for n in range(4))):
            found = await store.log.get(request_id)
            assert found is not None
            is_kept = request_id in (*kept, "small0", "even0")
            assert bool(found.result_bytes) == is_kept, (max_bytes, request_id)


async def _ended(store: Store, numbers: range, snapshots: tuple[int, int]) -> None:
    """A log whose results were fetched and dropped, with two snapshots."""
    for seq_id in numbers:
        await store.log.record(operation(seq_id), MODEL if seq_id == 0 else None)
        end = Finish(
            request_id=f"r{seq_id}",
            status="done",
            finished_at=5.0,
            result_type="json",
            result=b"x",
            step=StepRecord(
                model_id=MODEL.model_id,
                seq_id=seq_id,
                at=5.0,
                kind="forward_backward",
                metrics=f'{{"loss": {seq_id}.5}}',
                made=f"weights/{seq_id}" if seq_id % 10 == 7 else None,
            ),
        )
        await store.log.finish([end])
    for name, seq_id in zip("ab", snapshots, strict=True):
        await store.models.record_snapshot(MODEL.model_id, seq_id, weights(name, "exact"))
    await store.models.record_snapshot(MODEL.model_id, snapshots[1], weights("c", "exact"))
    await store.retention.drop_results(retrieved_before=0.0, finished_before=6.0, max_bytes=10**9)


async def test_a_log_is_trimmed_behind_its_snapshots_and_results(store: Store) -> None:
    await _ended(store, range(30), (10, 20))
    assert await store.retention.trim(keep=5, ended_before=6.0) == 15
    left = [o.seq_id for o in await store.log.read(MODEL.model_id, -1)]
    assert left == [0, *range(16, 30)], "the first, and what a late retry may ask for"
    assert await store.retention.trim(keep=5, ended_before=6.0) == 0
    model = await store.models.get(MODEL.model_id)
    assert model is not None and model.trimmed_seq_id == 15


async def test_a_long_log_is_trimmed_a_part_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others write waited for all of it."""
    await store.log.record(operation(0), MODEL)
    ended = {"status": "done", "finished_at": 5.0, "payload": None}
    step = {"metrics": "{}", "wait_seconds": 0.0, "run_seconds": 0.0}
    rows = [row_of(operation(n, **ended)) | step | {"entry_id": n} for n in range(1, 5001)]
    await store.database.execute_many(sa.insert(schema.operations), rows)
    snapshots = {"snapshot_seq_id": 5000, "previous_snapshot_seq_id": 4999}
    await store.models.update(MODEL.model_id, snapshots)
    write, parts = store.database.write, list[int]()

    async def counted(work: Callable[[sa.Connection], Any]) -> Any:
        parts.append(await write(work))
        return parts[-1]

    monkeypatch.setattr(store.database, "write", counted)
    assert await store.retention.trim(keep=99, ended_before=6.0) == 4900
    assert sum(parts) == 4900 and max(parts) <= 2000
    assert [o.seq_id for o in await store.log.read(MODEL.model_id, -1)] == [0, *range(4901, 5001)]
    assert len(await store.steps.newest(MODEL.model_id, 10_000, 10_000)) == 5000
    model = await store.models.get(MODEL.model_id)
    assert model is not None and (model.trimmed_seq_id, model.trimmed_entry_id) == (4900, 4900)
    assert await store.retention.trim(keep=99, ended_before=6.0) == 0


async def test_a_trimmed_number_that_comes_again_is_refused_for_ever(
    store: Store, tmp_path: Path
) -> None:
    await _ended(store, range(30), (10, 20))
    await store.retention.trim(keep=5, ended_before=6.0)
    for seq_id in (1, 15):
        again = operation(seq_id, request_id="again", payload=b"x" * 100_000)
        with pytest.raises(ExpiredOperationError, match=f"operation {seq_id} of .* long ago"):
            await store.log.record(again)
    assert not [*tmp_path.rglob("again*")], "nor is its payload kept"  # noqa: ASYNC240
    found, is_new = await store.log.record(operation(16, request_id="again"))
    assert (found.request_id, is_new) == ("r16", False)
    _, is_new = await store.log.record(operation(30))
    assert is_new


async def test_a_trim_stops_at_what_is_still_wanted(store: Store) -> None:
    await _ended(store, range(30), (10, 20))
    table = schema.operations

    def want(**values: object) -> sa.Update:
        return sa.update(table).where(table.c.seq_id == 7).values(**values)

    nothing = {"result_bytes": 0, "weights_id": None, "status": "done"}
    for values in (
        {"result_bytes": 1},
        {"weights_id": "w"},
        {"status": "failed", "finished_at": 7.0},
    ):
        await store.database.execute(want(**nothing))
        await store.database.execute(want(**values))
        await store.retention.trim(keep=5, ended_before=6.0)
        left = [o.seq_id for o in await store.log.read(MODEL.model_id, 0)]
        assert left == [*range(7, 30)], values
    assert await store.retention.trim(keep=5, ended_before=8.0) == 9


async def test_what_stays_of_an_end_is_read_as_it_was_recorded(store: Store) -> None:
    await store.sessions.add(SESSION)
    await store.log.record(operation(0, num_tokens=7), MODEL)
    step = StepRecord(
        model_id=MODEL.model_id,
        seq_id=0,
        at=5.5,
        kind="forward_backward",
        loss_fn="cross_entropy",
        num_tokens=7,
        wait_seconds=0.25,
        run_seconds=0.5,
        metrics='{"loss": 1.5, "50%": 2.0}',
        made="weights/a",
    )
    end = Finish(request_id="r0", status="done", finished_at=5.5, step=step)
    ((number, told),) = await store.log.finish([end])
    assert told == step
    assert await store.steps.newest(MODEL.model_id, 1, 10) == [StepRecord(*step[:-1], number)]
    assert await store.log.finish([end]) == [], "once"


async def test_what_stays_of_an_end_outlives_its_entry_in_the_log(store: Store) -> None:
    """Each step is there once, before and after."""
    await _ended(store, range(30), (10, 20))

    async def seen() -> tuple[object, ...]:
        return (
            await store.steps.newest(MODEL.model_id, 1000, 100),
            await store.steps.newest(MODEL.model_id, 20, 10),
            await store.steps.made(MODEL.model_id),
            await store.curves.read(MODEL.model_id, "operation", -1, 100),
            await store.curves.read(MODEL.model_id, "operation", 12, 3),
            await store.steps.last_entry(),
        )

    before = await seen()
    assert [step.seq_id for step in before[0]] == [*reversed(range(30))]  # type: ignore[attr-defined]
    assert before[2] == {f"weights/{n}": n for n in (7, 17, 27)}
    assert await store.retention.trim(keep=5, ended_before=6.0) == 15
    assert await seen() == before


async def test_entries_are_read_in_their_order_as_far_as_the_log_has_them(store: Store) -> None:
    await _ended(store, range(30), (10, 20))
    post = StepRecord(MODEL.model_id, 3, 6.0, "posted", source="posted")
    posted = await store.steps.post(post, {"reward": 1.0})

    async def numbers(after: int, owner: str = "o", run: str | None = None) -> list[int] | None:
        found = await store.steps.since(after, owner, run, 100)
        return None if found is None else [step.entry_id for step in found]

    assert await numbers(0) == await numbers(0, run=MODEL.model_id) == [*range(1, 32)]
    assert await numbers(0, owner="another") == await numbers(0, run="another") == []
    await store.retention.trim(keep=5, ended_before=6.0)
    assert await numbers(16) == [*range(17, 32)] and posted.entry_id == 31
    assert await numbers(15) is None, "some of them are not looked for in this order any more"
