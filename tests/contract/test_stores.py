"""What every store promises, tried on SQLite and on a real Postgres in a temporary folder."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tests.contract.store_rows import AUDIT, MODEL, SESSION, USAGE, checkpoint, operation, weights
from tinsmith.server.store import schema
from tinsmith.server.store.database import create_engine, sqlite_url
from tinsmith.server.store.errors import (
    OverQuotaError,
    StoreConflictError,
    StoreInUseError,
    StoreUnavailableError,
)
from tinsmith.server.store.losses import LossBounds
from tinsmith.server.store.migrations.migrate import alembic_config
from tinsmith.server.store.records import (
    CheckpointRecord,
    CustomLossRecord,
    Finish,
    KeyRecord,
    SamplerRecord,
    StepRecord,
)
from tinsmith.server.store.store import Store


async def test_the_migrated_tables_are_the_declared_ones(store: Store, database_url: str) -> None:
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, schema.metadata) == []


async def test_curves_of_version_0007_go_on_without_a_gap_or_a_double_point(
    database_url: str, tmp_path: Path
) -> None:
    """Steps lay in a table of their own in the order of their entries, in blocks of 8."""
    names = "entry_id, model_id, source, seq_id, at, kind, status, num_tokens, wait_seconds"
    step = sa.text(
        f"INSERT INTO steps ({names}, run_seconds, metrics, made) VALUES "
        "(:n, 's:train:0', 'operation', :n, 5, 'forward', 'done', 4, 1, 2, :metrics, :made)"
    )
    posted = sa.text(
        f"INSERT INTO steps ({names}, run_seconds, metrics) VALUES "
        """(101, 's:train:0', 'posted', 3, 5, 'posted', 'done', 0, 0, 0, '{"reward": 1.5}')"""
    )
    block = sa.text(
        "INSERT INTO step_blocks (model_id, source, size, block, summary) "
        "VALUES ('s:train:0', 'operation', :size, :block, '[1, 1.0, {}]')"
    )
    mark = "INSERT INTO step_marks VALUES ('s:train:0', 'operation', 40)"
    engine = create_engine(database_url)
    with engine.begin() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0007")
        for n in range(1, 101):
            values = {
                "n": n,
                "metrics": f'{{"loss": {n}.0}}',
                "made": "weights/a" if n == 9 else None,
            }
            connection.execute(step, values)
        connection.execute(posted)
        whole = '[31, 5.0, {"loss": [31, 16.0, 1.0, 31.0]}]'
        for size, number in ((8, 0), (8, 1), (8, 2), (8, 3), (8, 4), (32, 0)):
            connection.execute(block, {"size": size, "block": number})
        connection.execute(
            sa.text("UPDATE step_blocks SET summary = :whole WHERE size = 32"), {"whole": whole}
        )
        connection.execute(sa.text(mark))
    engine.dispose()
    store = Store(database_url, tmp_path / "blobs")
    try:
        await store.log.record(operation(0), MODEL)
        await store.log.record(operation(101))
        end = StepRecord(MODEL.model_id, 101, 6.0, "forward_backward", metrics='{"loss": 101.0}')
        ends = [
            Finish(request_id="r0", status="done", finished_at=6.0),
            Finish(request_id="r101", status="done", finished_at=6.0, step=end),
        ]
        ((number, _),) = await store.log.finish(ends)
        assert number == 102, "entries are counted on"
        for _ in range(2):
            (point,) = await store.curves.read(MODEL.model_id, "operation", -1, 1)
            assert point.ranges == {"loss": [101, 51.0, 1.0, 101.0]}
            found = await store.curves.read(MODEL.model_id, "operation", -1, 1000)
            assert [point.x for point in found] == [*range(1, 102)]
            await store.curves.draw(MODEL.model_id, "operation")
        assert (await store.curves.read(MODEL.model_id, "posted", -1, 9))[0].x == 3
        assert await store.steps.made(MODEL.model_id) == {"weights/a": 9}
    finally:
        await store.close()


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
    await store.account.add_usage([USAGE, USAGE])
    await store.account.add_usage([USAGE])
    assert await store.account.list_usage("o", 5, 6) == [dataclasses.replace(USAGE, count=21)]
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
    folders = (tmp_path / "a", tmp_path / "b")
    first, second = (Store(database_url, folder, lock_seconds=0.1) for folder in folders)
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
    assert {s.session_id for s in await store.sessions.older("o", None, 1000)} == answered
    await store.database.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 100000"))
    await store.sessions.add(dataclasses.replace(SESSION, session_id="after"))
    assert await store.sessions.get("after") is not None
    await store.close()


async def test_a_step_on_a_full_disk_is_no_other_trouble_than_the_rest(tmp_path: Path) -> None:
    """Steps go past SQLAlchemy to the driver; who reads the error must not notice."""
    store = Store(sqlite_url(tmp_path / "store.db"), tmp_path / "blobs")
    steps = [StepRecord(model_id="m", source="posted", seq_id=n, at=1.0, kind="") for n in (1, 2)]
    await store.steps.post(steps[0], {"reward": 1.0})
    await store.database.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1"))
    many = {"x" * 100 + str(number): 1.0 for number in range(60)}
    with pytest.raises(StoreUnavailableError, match="full"):
        await store.steps.post(steps[1], many)
    await store.database.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 100000"))
    await store.steps.post(steps[1], many)
    assert [point.x for point in await store.curves.read("m", "posted", -1, 10)] == [1, 2]
    append = store.database.appender(schema.steps)
    with pytest.raises(StoreConflictError):
        await store.database.write(lambda connection: append(connection, steps[0]))
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
        await first.account.add_usage([USAGE])
    await first.account.add_usage([USAGE])
    assert await first.account.list_usage("o", 0, 10) == [USAGE], "readers come back as well"
    with pytest.raises(StoreInUseError):
        await second.keep_others_out()
    _disconnect_everybody(postgres_url)
    third = Store(postgres_url, tmp_path / "c")
    await third.keep_others_out()
    with pytest.raises(StoreUnavailableError):
        await first.account.add_usage([USAGE])
    with pytest.raises(StoreInUseError):
        await first.account.add_usage([USAGE])
    for each in (first, second, third):
        await each.close()


async def test_what_an_owner_keeps_in_sessions_is_counted(store: Store) -> None:
    noted = dataclasses.replace(
        SESSION, session_id="t", user_metadata={"a": "x" * 100}, display_name="y" * 50
    )
    other = dataclasses.replace(noted, session_id="u", owner="another")
    assert await store.sessions.held_by(SESSION.owner) == (0, 0)
    for session in (SESSION, noted, other):
        await store.sessions.add(session)
    number, num_bytes = await store.sessions.held_by(SESSION.owner)
    assert number == 2 and 150 < num_bytes < 300
    known = await store.sessions.metadata_of(SESSION.owner, ["t", "u", "nobody's"])
    assert known == {"t": {"a": "x" * 100}}


async def test_a_runs_checkpoints_come_in_parts_and_the_newest_of_each_type_by_themselves(
    store: Store,
) -> None:
    await store.sessions.add(SESSION)
    await store.log.record(operation(0), MODEL)
    made = [
        checkpoint("a", "w0", size_bytes=7, created_at=1.0, user_metadata={"k": "v" * 50}),
        checkpoint("b", "w1", size_bytes=7, created_at=2.0, is_public=True),
        checkpoint("c", "w2", size_bytes=7, created_at=3.0),
        checkpoint("d", "w3", size_bytes=7, created_at=4.0, expires_at=5.0),
    ]
    for each in made:
        assert await store.checkpoints.add(each, None, AUDIT, weights(each.weights_id))
    run, checkpoints = MODEL.model_id, store.checkpoints
    names = [c.checkpoint_id for c in await checkpoints.of_model(run, 2, 1)]
    assert names == ["weights/c", "weights/b"]
    assert await checkpoints.metadata_bytes(run, 3, 0) < 50
    assert 50 < await checkpoints.metadata_bytes(run, 4, 0) < 100
    for only_public, name in ((False, "weights/c"), (True, "weights/b")):
        (newest,) = await checkpoints.newest(run, 6.0, only_public=only_public)
        assert newest.checkpoint_id == name
    assert await checkpoints.storage_of_session(SESSION.session_id) == (4, 28)
    assert len(await store.account.list_audit("o", None, 0.0, 10.0, 3, 2)) == 2
