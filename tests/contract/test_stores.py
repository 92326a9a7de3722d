"""What every store promises, tried on SQLite and on a real Postgres in a temporary folder."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tinsmith.server.store import schema
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.errors import (
    ExpiredOperationError,
    OverQuotaError,
    StoreDamagedError,
    StoreInUseError,
    StoreUnavailableError,
)
from tinsmith.server.store.losses import LossBounds
from tinsmith.server.store.records import (
    AuditRecord,
    CheckpointRecord,
    CustomLossRecord,
    Finish,
    KeyRecord,
    ModelRecord,
    OperationRecord,
    SamplerRecord,
    SessionRecord,
    StepRecord,
    UsageRecord,
    WeightsRecord,
)
from tinsmith.server.store.store import Store


@pytest.fixture
async def store(database_url: str, tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(database_url, tmp_path / "blobs")
    yield store
    await store.close()


SESSION = SessionRecord(
    session_id="s", owner="o", created_at=1.5, last_seen_at=1.5, sdk_version="0.36.0", tags=["a"]
)
MODEL = ModelRecord(
    model_id="s:train:0",
    session_id="s",
    model_seq_id=0,
    owner="o",
    base_model="b",
    lora={"rank": 4},
    optimizer={"type": "adamw"},
    created_at=2.0,
    last_request_at=2.0,
)


def operation(seq_id: int, **fields: object) -> OperationRecord:
    values: dict[str, object] = {
        "request_id": f"r{seq_id}",
        "model_id": MODEL.model_id,
        "seq_id": seq_id,
        "owner": "o",
        "kind": "forward_backward",
        "content_type": "application/x-protobuf",
        "payload": b"payload",
        "payload_bytes": 7,
        "created_at": 3.0,
    }
    return OperationRecord(**(values | fields))  # type: ignore[arg-type]  # a test's shorthand


def weights(weights_id: str, kind: str = "training") -> WeightsRecord:
    return WeightsRecord(
        weights_id=weights_id,
        kind=kind,
        base_model="b",
        lora={"rank": 4},
        optimizer={"type": "adamw"},
        size_bytes=10,
        created_at=4.0,
    )


def checkpoint(name: str, weights_id: str, **fields: object) -> CheckpointRecord:
    values: dict[str, object] = {
        "model_id": MODEL.model_id,
        "checkpoint_id": f"weights/{name}",
        "owner": "o",
        "checkpoint_type": "training",
        "weights_id": weights_id,
        "size_bytes": 10,
        "created_at": 4.0,
    }
    return CheckpointRecord(**(values | fields))  # type: ignore[arg-type]  # a test's shorthand


AUDIT = AuditRecord(owner="o", at=5.0, area="checkpoints", event="e", details={"n": 1})


async def test_the_migrated_tables_are_the_declared_ones(store: Store, database_url: str) -> None:
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, schema.metadata) == []


async def test_a_secret_is_made_once(store: Store) -> None:
    first = await store.keys.secret("a")
    assert len(first) == 32
    assert await store.keys.secret("a") == first != await store.keys.secret("b")


async def test_keys_are_added_listed_and_revoked(store: Store) -> None:
    key = await store.keys.add(KeyRecord(owner="o", name="n", key_hash="h", created_at=1.0))
    assert key.key_id > 0
    assert await store.keys.list() == [key]
    assert await store.keys.revoke(key.key_id, 2.0)
    assert not await store.keys.revoke(key.key_id, 3.0)
    assert (await store.keys.list())[0].revoked_at == 2.0


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


async def test_the_log_is_read_in_order_and_pending_models_are_known(store: Store) -> None:
    await store.log.record(operation(0), MODEL)
    for seq_id in (3, 1, 2):
        await store.log.record(operation(seq_id))
    assert [o.seq_id for o in await store.log.read(MODEL.model_id, 0)] == [1, 2, 3]
    assert await store.log.models_with_pending() == [MODEL.model_id]


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


async def test_weights_are_kept_while_anything_refers_to_them(store: Store) -> None:
    await store.log.record(operation(0), MODEL)
    end = Finish(
        request_id="r0",
        status="done",
        finished_at=5.0,
        weights=weights("w"),
        checkpoint=checkpoint("a", "w"),
        audit=AUDIT,
    )
    await store.log.finish([end])
    await store.samplers.add(_sampler("s:sample:0", 0))
    assert await store.checkpoints.delete(checkpoint("a", "w"), AUDIT)
    assert not await store.checkpoints.delete(checkpoint("a", "w"), AUDIT)
    assert await store.weights.unreferenced() == []
    await store.samplers.forget("s")
    (unused,) = await store.weights.unreferenced()
    assert unused.deleted_checkpoint is not None, "what it was called is remembered"
    assert CheckpointRecord(**unused.deleted_checkpoint) == checkpoint("a", "w")
    assert await store.weights.forget(["w"]) == ["w"]
    assert await store.weights.get("w") is None


def _sampler(sampler_id: str, number: int) -> SamplerRecord:
    return SamplerRecord(
        sampler_id=sampler_id,
        session_id="s",
        sampling_session_seq_id=number,
        owner="o",
        base_model="b",
        weights_id="w",
        created_at=4.0,
    )


async def _keep_weights(store: Store, *weights_ids: str) -> None:
    """A run whose operations left weights."""
    for seq_id, weights_id in enumerate(weights_ids):
        await store.log.record(operation(seq_id), MODEL if seq_id == 0 else None)
        kept = weights(weights_id)
        await store.log.finish(
            [Finish(request_id=f"r{seq_id}", status="done", finished_at=5.0, weights=kept)]
        )


async def test_nothing_refers_to_weights_that_were_forgotten_a_moment_ago(store: Store) -> None:
    """Whoever found them may come after somebody who deleted the last that needed them."""
    await _keep_weights(store, "w")
    assert await store.weights.forget(["w"]) == ["w"]
    assert not await store.checkpoints.add(checkpoint("a", "w"), None, AUDIT)
    assert await store.samplers.add(_sampler("s:sample:0", 0)) is None
    assert await store.checkpoints.get(MODEL.model_id, "weights/a") is None
    assert await store.account.list_audit("o", "checkpoints", 0.0, 10.0) == []
    assert await store.samplers.of_session("s") == []


async def test_a_sampler_is_made_once_and_counts_its_clients(store: Store) -> None:
    await _keep_weights(store, "w")
    first = await store.samplers.add(_sampler("s:sample:0", 0))
    assert first is not None
    again = await store.samplers.add(dataclasses.replace(first, sampler_id="x", base_model="c"))
    assert again == first
    assert await asyncio.gather(*[store.samplers.join("s:sample:0") for _ in range(5)]) == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert len(await store.samplers.of_session("s")) == 1


async def test_lists_come_in_pages_newest_first(store: Store) -> None:
    for number in range(5):
        await store.sessions.add(
            dataclasses.replace(SESSION, session_id=f"s{number}", created_at=float(number))
        )
    await store.sessions.add(dataclasses.replace(SESSION, session_id="other", owner="p"))
    page = await store.sessions.page_of_owner("o", 2, 1)
    assert [s.session_id for s in page.items] == ["s3", "s2"]
    assert page.total == 5


async def test_a_session_is_changed_touched_and_found_again(store: Store) -> None:
    await store.sessions.add(SESSION)
    assert await store.sessions.get("s") == SESSION
    await store.sessions.touch({"s": 9.0})
    assert await store.sessions.seen_since(8.0) == ["s"]
    assert await store.sessions.seen_since(9.0) == []
    await store.sessions.update("s", {"state": "finished", "finish_reason": "success"})
    found = await store.sessions.get("s")
    assert found is not None
    assert (found.last_seen_at, found.state, found.finish_reason) == (9.0, "finished", "success")
    assert await store.sessions.seen_since(0.0) == []


async def test_checkpoints_are_changed_listed_and_expire(store: Store) -> None:
    await _keep_weights(store, "w")
    assert await store.checkpoints.add(checkpoint("a", "w"), None, AUDIT)
    await store.checkpoints.add(checkpoint("b", "w", created_at=6.0), None, AUDIT)
    assert await store.checkpoints.update(checkpoint("a", "w"), {"expires_at": 7.0}, AUDIT)
    assert [c.checkpoint_id for c in await store.checkpoints.expired(8.0)] == ["weights/a"]
    page = await store.checkpoints.page_of_owner("o", 10, 0)
    assert [c.checkpoint_id for c in page.items] == ["weights/b", "weights/a"]
    assert await store.checkpoints.storage_of_owner("o") == (2, 20)
    assert len(await store.account.list_audit("o", "checkpoints", 0.0, 10.0)) == 3
    assert await store.account.list_audit("o", "projects", 0.0, 10.0) == []


async def test_a_late_change_of_a_checkpoint_does_not_touch_a_later_one_of_its_name(
    store: Store,
) -> None:
    """Somebody read the first one, and saved another under its name before the change came."""
    first, second = checkpoint("a", "w1"), checkpoint("a", "w2")
    await _keep_weights(store, "w1", "w2")
    await store.checkpoints.add(first, None, AUDIT)
    await store.checkpoints.add(second, None, AUDIT)
    assert not await store.checkpoints.update(first, {"is_public": True}, AUDIT)
    assert not await store.checkpoints.delete(first, AUDIT)
    assert await store.checkpoints.get(MODEL.model_id, "weights/a") == second
    assert len(await store.account.list_audit("o", "checkpoints", 0.0, 10.0)) == 2


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
    dropped = await store.log.drop_results(
        retrieved_before=21.0, finished_before=11.0, max_bytes=150
    )
    assert dropped == 3  # r3 was fetched, r0 is old, r1 is beyond the bytes
    left = [(await store.log.get(f"r{n}")).result_bytes for n in range(4)]  # type: ignore[union-attr]  # all exist
    assert left == [0, 0, 100, 0]


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
        )
        await store.log.finish([end])
    for name, seq_id in zip("ab", snapshots, strict=True):
        await store.models.record_snapshot(MODEL.model_id, seq_id, weights(name, "exact"))
    await store.models.record_snapshot(MODEL.model_id, snapshots[1], weights("c", "exact"))
    await store.log.drop_results(retrieved_before=0.0, finished_before=6.0, max_bytes=10**9)


async def test_a_log_is_trimmed_behind_its_snapshots_and_results(store: Store) -> None:
    await _ended(store, range(30), (10, 20))
    assert await store.log.trim(keep=5, ended_before=6.0) == 15
    left = [o.seq_id for o in await store.log.read(MODEL.model_id, -1)]
    assert left == [0, *range(16, 30)], "the first, and what a late retry may ask for"
    assert await store.log.trim(keep=5, ended_before=6.0) == 0
    model = await store.models.get(MODEL.model_id)
    assert model is not None and model.trimmed_seq_id == 15


async def test_a_trimmed_number_that_comes_again_is_refused_for_ever(
    store: Store, tmp_path: Path
) -> None:
    await _ended(store, range(30), (10, 20))
    await store.log.trim(keep=5, ended_before=6.0)
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
        await store.log.trim(keep=5, ended_before=6.0)
        left = [o.seq_id for o in await store.log.read(MODEL.model_id, 0)]
        assert left == [*range(7, 30)], values
    assert await store.log.trim(keep=5, ended_before=8.0) == 9


def custom_loss(number: int, **fields: object) -> CustomLossRecord:
    values: dict[str, object] = {
        "loss_id": f"s:loss:{number}",
        "request_id": f"upload {number}",
        "session_id": "s",
        "custom_loss_seq_id": number,
        "owner": "o",
        "name": "n",
        "definition": {"graph": {"nodes": []}},
        "num_bytes": 30,
        "created_at": 1.0,
        "used_at": 1.0,
    }
    return CustomLossRecord(**(values | fields))  # type: ignore[arg-type]  # a test's shorthand


async def test_a_custom_loss_is_kept_once(store: Store) -> None:
    loss = custom_loss(0)
    assert await store.losses.add(loss) == loss
    assert await store.losses.add(dataclasses.replace(loss, request_id="again")) == loss
    assert await store.losses.get("s:loss:0") == loss == await store.losses.of_request("upload 0")
    assert await store.losses.of_request("again") is None


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        pytest.param(LossBounds(max_number=2), "this owner has 2 uploaded losses", id="number"),
        pytest.param(LossBounds(max_bytes=89), "would have 90 bytes; at most 89 may be", id="size"),
    ],
)
async def test_an_owner_may_upload_so_many_losses_and_bytes(
    database_url: str, tmp_path: Path, bounds: LossBounds, problem: str
) -> None:
    store = Store(database_url, tmp_path / "blobs", loss_bounds=bounds)
    try:
        for number in range(2):
            await store.losses.add(custom_loss(number))
        with pytest.raises(OverQuotaError, match=problem):
            await store.losses.add(custom_loss(2))
        assert await store.losses.get("s:loss:2") is None
        assert await store.losses.add(custom_loss(1)) == custom_loss(1), "a repeat is none more"
        await store.losses.add(custom_loss(3, owner="p"))
        await store.losses.delete_unused(2.0)
        await store.losses.add(custom_loss(2))
    finally:
        await store.close()


async def test_a_loss_goes_when_it_is_old_and_no_operation_can_refer_to_it(store: Store) -> None:
    """A use is noted up to an hour late, so a pass counts with those of the hour before it."""
    late = 10 * 3600.0
    await store.log.record(operation(0, created_at=late, payload=b"x"), MODEL)
    await store.log.record(operation(1, created_at=late + 5, payload=b"x" * 200_000))
    used = {0: 1.0, 1: late - 3601.0, 2: late - 3599.0, 3: late + 5.0}
    for number, used_at in used.items():
        await store.losses.add(custom_loss(number, used_at=used_at))
    await store.losses.add(custom_loss(4, owner="p", used_at=late))
    assert await store.losses.note_use("s:loss:0", "p", 2 * late) is False, "it is another's"
    assert await store.losses.note_use("s:loss:9", "o", 2 * late) is False
    assert await store.losses.note_use("s:loss:4", "p", 2 * late) is True

    async def left() -> list[int]:
        return [n for n in range(5) if await store.losses.get(f"s:loss:{n}") is not None]

    assert await store.losses.delete_unused(0.5) == 0
    assert await store.losses.delete_unused(late + 6) == 2
    assert await left() == [2, 3, 4], "what may be run again has its loss"
    await store.models.retire(MODEL.model_id, late + 10)
    assert await store.losses.delete_unused(late + 6) == 2
    assert await left() == [4], "used since"


async def test_usage_adds_up(store: Store) -> None:
    entry = UsageRecord(owner="o", hour=5, base_model="b", session_id="s", kind="training", count=7)
    await store.account.add_usage([entry, entry])
    await store.account.add_usage([entry])
    assert await store.account.list_usage("o", 5, 6) == [dataclasses.replace(entry, count=21)]
    assert await store.account.list_usage("o", 6, 9) == []


async def test_a_failing_write_does_not_take_its_neighbours_with_it(store: Store) -> None:
    await store.sessions.add(SESSION)
    answers = await asyncio.gather(
        store.sessions.add(dataclasses.replace(SESSION, session_id="t")),
        store.sessions.add(SESSION),
        store.sessions.add(dataclasses.replace(SESSION, session_id="u")),
        return_exceptions=True,
    )
    assert [isinstance(a, Exception) for a in answers] == [False, True, False]
    assert (await store.sessions.page_of_owner("o", 10, 0)).total == 3


async def test_what_was_written_is_there_after_reopening(database_url: str, tmp_path: Path) -> None:
    first = Store(database_url, tmp_path / "blobs")
    await first.log.record(operation(0, payload=b"x" * 200_000), MODEL)
    await first.close()
    second = Store(database_url, tmp_path / "blobs")
    assert await second.log.read_payload("r0") == b"x" * 200_000
    await second.close()


async def test_a_second_server_of_one_database_is_refused(
    database_url: str, tmp_path: Path
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("an SQLite file lies in the data folder, which has a lock of its own")
    first, second = (Store(database_url, tmp_path / name) for name in ("a", "b"))
    await first.keep_others_out()
    with pytest.raises(StoreInUseError, match="another server"):
        await second.keep_others_out()
    await first.close()
    await second.close()


async def test_a_full_disk_takes_back_no_write_that_was_answered(tmp_path: Path) -> None:
    """SQLite then ends the transaction by itself; the commit behind it says nothing."""
    file = tmp_path / "store.db"
    store = Store(sqlite_url(file), tmp_path / "blobs")
    await store.database.write(lambda c: c.exec_driver_sql("PRAGMA cache_size = 8"))
    await store.database.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 300"))
    answered: set[str] = set()
    refused: list[str] = []

    async def add(number: int) -> None:
        session = dataclasses.replace(
            SESSION, session_id=str(number), display_name="x" * (20_000 if number % 3 else 10)
        )
        try:
            await store.sessions.add(session)
        except StoreUnavailableError as error:
            refused.append(str(error))
        else:
            answered.add(session.session_id)

    for start in range(0, 300, 30):
        await asyncio.gather(*[add(number) for number in range(start, start + 30)])
    assert answered and refused
    assert all("full" in reason for reason in refused), "the first cause is told"
    assert {s.session_id for s in await store.sessions.of_owner("o")} == answered
    await store.database.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 100000"))
    await store.sessions.add(dataclasses.replace(SESSION, session_id="after"))
    assert await store.sessions.get("after") is not None
    await store.close()


def _disconnect_everybody(url: str) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )


@pytest.mark.slow
async def test_a_lost_connection_is_replaced_and_the_lock_is_taken_again(
    postgres_url: str, tmp_path: Path
) -> None:
    first, second = (Store(postgres_url, tmp_path / name) for name in ("a", "b"))
    await first.keep_others_out()
    _disconnect_everybody(postgres_url)
    with pytest.raises(StoreUnavailableError):
        await first.account.add_audit(AUDIT)
    await first.account.add_audit(AUDIT)
    assert len(await first.account.list_audit("o", None, 0.0, 1e12)) == 1, (
        "readers come back as well"
    )
    with pytest.raises(StoreInUseError):
        await second.keep_others_out()
    _disconnect_everybody(postgres_url)
    third = Store(postgres_url, tmp_path / "c")
    await third.keep_others_out()
    with pytest.raises(StoreUnavailableError):
        await first.account.add_audit(AUDIT)
    with pytest.raises(StoreInUseError):
        await first.account.add_audit(AUDIT)
    for each in (first, second, third):
        await each.close()


async def test_what_stays_of_an_end_is_read_as_it_was_recorded(store: Store) -> None:
    await store.sessions.add(SESSION)
    await store.log.record(operation(0), MODEL)
    step = StepRecord(
        model_id=MODEL.model_id,
        seq_id=0,
        at=5.5,
        kind="forward_backward",
        loss_fn="cross_entropy",
        num_tokens=7,
        weight_sum=6.5,
        wait_seconds=0.25,
        run_seconds=0.5,
        metrics='{"loss": 1.5, "50%": 2.0}',
        made="weights/a",
    )
    end = Finish(request_id="r0", status="done", finished_at=5.5, step=step)
    ((number, told),) = await store.log.finish([end])
    assert told == step
    assert await store.steps.newest(MODEL.model_id, 1, 10) == [
        dataclasses.replace(step, entry_id=number)
    ]
    assert await store.log.finish([end]) == [], "once"
