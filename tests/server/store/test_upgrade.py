"""A store that an earlier version wrote is opened and goes on; a later version's is refused.

`old_stores` holds a store that the first version of the tables wrote, as text. Those of later
versions are made of it by the steps to them, which never change: what each gives is known here by
its digest. When a step is added, so is the digest of what the one before it gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from tinsmith.server.store import schema
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.errors import StoreTooNewError
from tinsmith.server.store.migrations.migrate import alembic_config
from tinsmith.server.store.store import Store

if TYPE_CHECKING:
    from tests.support.in_process_server import StartServer

OLD = Path(__file__).parent / "old_stores"
MODEL = "e99a62d4-6e72-44ee-94fe-01ced6f63a88:train:0"
WITH_SNAPSHOT = "96d80c61-ca91-4691-8ec9-0b91ee72f51e:train:0"
PENDING = ("5cdbe8ef68e048e7bf8df3e8374ad84f", "e24ef725d62b465ab5be3b35e756ce9e")


DIGESTS = {
    "0001": "58d6b938fe44dc82",
    "0002": "817a9ac6aae04920",
    "0003": "b89693ae86a0a741",
    "0004": "58d787e715c059e7",
    "0005": "9a47cb3e0845f70f",
    "0006": "1208afd613cf9598",
    "0007": "5f2dbcc36cebe786",
}
"""Of what the store of each earlier version holds, tables and rows."""


def _open(folder: Path, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "tinsmith.db"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.executescript((OLD / "0001.sql").read_text())
        if version != "0001":
            database.executescript((OLD / "0001_losses_and_unloads.sql").read_text())
    engine = sa.create_engine(f"sqlite:///{file}")
    config = alembic_config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, version)
    engine.dispose()
    return file


def _digest(file: Path) -> str:
    with contextlib.closing(sqlite3.connect(file)) as database:
        found = [
            (
                table,
                database.execute(f"PRAGMA table_info({table})").fetchall(),
                sorted(database.execute(f"SELECT * FROM {table}").fetchall(), key=repr),
            )
            for (table,) in database.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
            ).fetchall()
        ]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def test_a_step_that_stores_have_taken_never_changes(tmp_path: Path) -> None:
    steps = ScriptDirectory.from_config(alembic_config())
    earlier = {step.revision for step in steps.walk_revisions()} - {steps.get_current_head()}
    assert {version: _digest(_open(tmp_path / version, version)) for version in earlier} == DIGESTS


@pytest.mark.parametrize("version", DIGESTS)
async def test_everything_in_an_earlier_store_is_read(tmp_path: Path, version: str) -> None:
    file = _open(tmp_path, version)
    with sqlite3.connect(file) as database:
        counts = {
            name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        # These left the log.
        counts["operations"] -= database.execute(
            "SELECT count(*) FROM operations WHERE kind IN ('create_custom_loss', 'unload_model')"
        ).fetchone()[0]
        # What ended is a point of its run's curves.
        counts["steps"] = database.execute(
            "SELECT count(*) FROM operations WHERE status <> 'pending' "
            "AND kind NOT IN ('create_custom_loss', 'unload_model', 'refused')"
        ).fetchone()[0]
    database.close()
    store = Store(sqlite_url(file), tmp_path / "blobs")
    try:
        with store.database.connect() as connection:
            for table in schema.metadata.sorted_tables:
                rows = connection.execute(sa.select(table)).all()
                assert len(rows) == counts.get(table.name, 0), table.name
        model = await store.models.get(WITH_SNAPSHOT)
        assert model is not None and model.snapshot_weights_id is not None
        # What is older than its snapshot had been dropped, so there is no going back behind it.
        assert model.previous_snapshot_seq_id == model.snapshot_seq_id == 2
        assert model.previous_snapshot_weights_id == model.snapshot_weights_id
        first = await store.models.get(MODEL)
        assert first is not None and first.previous_snapshot_seq_id == -1
        log = await store.log.read(MODEL, -1)
        assert [o.seq_id for o in log] == list(range(10))
        for operation in log:
            assert await store.log.read_payload(operation.request_id)
        checkpoints = await store.checkpoints.of_model(MODEL)
        assert [c.checkpoint_id for c in checkpoints] == ["weights/a"]
        assert len(await store.samplers.of_session(MODEL.partition(":")[0])) == 1
        assert [k.owner for k in await store.keys.list()] == ["owner"]
        usage = await store.account.list_usage("owner", 0, 10**9)
        assert sorted(dataclasses.replace(u, hour=0).count for u in usage) == [4, 12]
        ended = await store.steps.newest(MODEL, 10**6, 100)
        assert [s.seq_id for s in ended] == [o.seq_id for o in reversed(log) if o.finished_at]
        assert all(s.at == o.finished_at for s, o in zip(reversed(ended), log, strict=False))
    finally:
        await store.close()


async def test_an_uploaded_loss_leaves_the_log_and_keeps_its_request_id(tmp_path: Path) -> None:
    store = Store(sqlite_url(_open(tmp_path, "0003")), tmp_path / "blobs")
    try:
        assert await store.log.get("1055" * 8) is None
        loss = await store.losses.of_request("1055" * 8)
        assert loss is not None and await store.losses.get(loss.loss_id) == loss
        assert await store.log.get("0ff0" * 8) is None, "unloads are gone"
    finally:
        await store.close()


async def test_losses_of_the_first_release_stay_while_a_run_may_need_them(tmp_path: Path) -> None:
    """Many may be there; which passes used which was not recorded."""
    file = _open(tmp_path, "0001")
    with contextlib.closing(sqlite3.connect(file)) as database:
        for number in range(5000):
            owner = "owner" if number % 2 else "gone"
            database.execute(
                "INSERT INTO custom_losses (loss_id, session_id, custom_loss_seq_id, owner, name, "
                "definition, created_at) VALUES (?, 's', ?, ?, 'n', '{\"graph\": {}}', 5.0)",
                (f"s:loss:{number}", number, owner),
            )
            database.execute(
                "INSERT INTO operations (request_id, model_id, seq_id, owner, kind, content_type, "
                "created_at, status, payload_bytes, num_tokens, result_bytes) VALUES "
                "(?, 's:loss', ?, ?, 'create_custom_loss', '', 5.0, 'done', 0, 0, 0)",
                (f"upload {number}", number, owner),
            )
        newest = database.execute("SELECT max(created_at) FROM operations").fetchone()[0]
        database.commit()
    store = Store(sqlite_url(file), tmp_path / "blobs")
    try:
        used, unused = await store.losses.get("s:loss:1"), await store.losses.get("s:loss:0")
        assert used is not None and used.used_at == newest and used.num_bytes == 13
        assert unused is not None and unused.used_at == 5.0
        assert await store.losses.delete_unused(newest + 1) == 2500, "nobody's passes need them"
        for model_id in await store.database.column(sa.select(schema.models.c.model_id)):
            await store.models.retire(model_id, newest)
        assert await store.losses.delete_unused(newest + 1) == 2500
    finally:
        await store.close()


async def test_a_run_goes_on_in_a_later_version(start_server: StartServer, tmp_path: Path) -> None:
    """Pending operations are carried out on a model that the old log rebuilds."""
    file = _open(tmp_path / "data", "0001")
    with contextlib.closing(sqlite3.connect(file)) as database:
        for (weights_id,) in database.execute("SELECT weights_id FROM weights").fetchall():
            (tmp_path / "data" / "weights" / weights_id).mkdir(parents=True)
    server = await start_server()
    api = server.api
    for request_id in PENDING:
        await api.result(request_id)
    fresh = await api.model()
    for number in range(3):
        await api.result(await api.send_pass(fresh, 1 + 2 * number))
        await api.result(await api.send_step(fresh, 2 + 2 * number))
    assert await api.loss(MODEL, 10) == await api.loss(fresh, 7)


def test_a_store_of_a_later_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = _open(tmp_path, "0001")
    with sqlite3.connect(file) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        before = list(database.iterdump())
    database.close()
    with pytest.raises(StoreTooNewError, match=r"version 9999 .* later release"):
        Store(sqlite_url(file), tmp_path / "blobs")
    database = sqlite3.connect(file)
    assert list(database.iterdump()) == before
    database.close()
