"""A store and a data folder that do not belong together are refused, and nothing is deleted."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from tinsmith.cli.server import storage
from tinsmith.server.config import ServerConfig
from tinsmith.server.config_sources import build_config
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.serving import claim_store, open_store
from tinsmith.server.storage import binding
from tinsmith.server.storage.folder import FolderStorage
from tinsmith.server.store import schema
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.errors import ForeignStoreError
from tinsmith.server.store.records import AuditRecord, IdentityRecord
from tinsmith.server.trash import Trash
from tinsmith.types import Datum, ModelInput

if TYPE_CHECKING:
    from tests.support.in_process_server import StartServer, TestServer


WIDE = Datum(
    model_input=ModelInput.from_ints([1] * 4000), loss_fn_inputs={"target_tokens": [2] * 4000}
)
"""Large enough that requests and results are files."""


async def _trained(server: TestServer) -> list[str]:
    """A model with checkpoints, a snapshot and large requests; the paths of the checkpoints."""
    api = server.api
    model = await api.model()
    for number in range(3):
        await api.result(await api.send_pass(model, 1 + 3 * number, *[WIDE] * 6))
        await api.result(await api.send_step(model, 2 + 3 * number))
        body = {"model_id": model, "seq_id": 3 + 3 * number, "path": f"step{number}"}
        await api.result((await api.ok("/save_weights", body))["request_id"])
    page = (await api.get("/checkpoints")).json()["checkpoints"]
    return sorted(c["tinker_path"] for c in page)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for part in ("weights", "blobs", "trash")
        for file in (folder / part).rglob("*")
        if file.is_file()
    }


@pytest.fixture
async def left(start_server: StartServer, database_url: str, tmp_path: Path) -> ServerConfig:
    """The settings of a server that has stopped and left a full data folder and database."""
    server = await start_server(database_url=database_url, snapshot_steps=2)
    assert len(await _trained(server)) == 3
    await server.stop()
    config = server.service.config
    assert len([*(config.data_dir / "weights").iterdir()]) >= 3 and _files(config.data_dir)
    return config


def _with(config: ServerConfig, **changes: object) -> ServerConfig:
    values = {"data_dir": config.data_dir, "database_url": config.database_url, **changes}
    return build_config(values)


async def _refused(config: ServerConfig, reason: str) -> None:
    before = _files(config.data_dir)
    with pytest.raises(ForeignStoreError, match=reason) as caught:
        await claim_store(config)
    assert "tinsmith storage adopt" in str(caught.value), "it says what to do"
    assert _files(config.data_dir) == before


async def test_an_empty_database_with_a_full_folder_is_refused(
    left: ServerConfig, tmp_path: Path
) -> None:
    """The default server first, then another database as docs/how-to/postgres.md had it."""
    empty = _with(left, database_url=sqlite_url(tmp_path / "another.db"))
    await _refused(empty, "the database is new")
    store = await claim_store(left)
    await store.close()


async def test_another_database_with_a_full_folder_is_refused(
    left: ServerConfig, tmp_path: Path
) -> None:
    other = build_config({"data_dir": tmp_path / "other"})
    other.data_dir.mkdir()
    await (await claim_store(other)).close()
    mixed = _with(left, database_url=sqlite_url(other.data_dir / "tinsmith.db"))
    await _refused(mixed, "the database belongs to another storage")


async def test_a_database_with_an_empty_folder_is_refused(
    left: ServerConfig, tmp_path: Path
) -> None:
    await _refused(_with(left, data_dir=tmp_path / "mistyped"), "another data folder")


async def test_an_older_copy_of_the_database_is_refused(
    left: ServerConfig, start_server: StartServer
) -> None:
    """The copy was made while the first server ran; another run came after it."""
    before = await _identity(left)
    server = await start_server(database_url=left.database_url)
    await _trained(server)
    await server.stop()
    await _set_epoch(left, before)
    await _refused(left, "the database is an older copy")


async def test_an_older_copy_made_a_moment_before_the_server_was_killed_is_refused(
    start_server: StartServer, database_url: str, tmp_path: Path
) -> None:
    """No epoch lies between them; one operation was answered after the copy was made."""
    server = await start_server(database_url=database_url)
    await _trained(server)
    before = await server.service.store.identity.get()
    await server.api.session()
    after = await server.service.store.identity.get()
    assert before is not None and after is not None
    assert (before.epoch, before.position + 1) == (after.epoch, after.position)
    left = tmp_path / "left"  # what a killed server leaves
    shutil.copytree(server.service.config.data_dir, left)
    await server.stop()
    config = _with(server.service.config, data_dir=left)
    await _set(config, epoch=before.epoch, position=before.position)
    await _refused(config, "the database is an older copy")
    await _set(config, epoch=after.epoch, position=after.position)
    await (await claim_store(config)).close()


@pytest.mark.parametrize("content", [None, b"", bytes(21)])
async def test_a_power_cut_that_loses_the_folders_position_is_no_mismatch(
    left: ServerConfig, content: bytes | None
) -> None:
    position = left.data_dir / "position"
    assert int(position.read_text()) > 0
    position.unlink()
    if content is not None:
        position.write_bytes(content)
    await (await claim_store(left)).close()


async def test_a_position_that_cannot_be_noted_is_told_once_and_not_for_each_commit(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server()
    position = server.service.config.data_dir / "position"
    for _ in range(2):
        position.unlink()
        position.mkdir()  # as a full disk, it takes nothing
        for _ in range(5):
            await server.api.session()
        position.rmdir()
        await server.api.session()
    told = [record.levelname for record in caplog.records if "older copy" in record.getMessage()]
    assert [level for level in told if level == "WARNING"] == ["WARNING"] * 2


async def test_an_older_copy_of_the_folder_is_refused(left: ServerConfig, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(left.data_dir, copy)
    await (await claim_store(left)).close()
    await (await claim_store(left)).close()
    await _refused(_with(left, data_dir=copy), "the folder is an older copy")


async def test_a_crash_while_counting_up_is_no_mismatch(left: ServerConfig) -> None:
    """The database is one ahead then."""
    await _set_epoch(left, await _identity(left) + 1)
    await (await claim_store(left)).close()


class _Deadly(FolderStorage):
    """Whoever uses it dies when the database has counted up, before the folder is told."""

    async def write_identity(self, identity: IdentityRecord) -> None:
        raise _Death


class _Death(Exception):
    pass


class _Slow(FolderStorage):
    """Whoever uses it is stopped there, until it may go on."""

    def __init__(self, folder: DataFolder) -> None:
        super().__init__(folder)
        self.is_there, self.may_go_on = asyncio.Event(), asyncio.Event()

    async def write_identity(self, identity: IdentityRecord) -> None:
        self.is_there.set()
        await self.may_go_on.wait()
        await super().write_identity(identity)


async def _die_while_counting_up(config: ServerConfig, times: int) -> None:
    for _ in range(times):
        store = open_store(config)
        storage = _Deadly(DataFolder(config.data_dir))
        await binding.check(storage, store)
        with pytest.raises(_Death):
            await binding.bind(storage, store)
        await store.close()


async def test_any_number_of_crashes_while_counting_up_is_no_mismatch(left: ServerConfig) -> None:
    await _die_while_counting_up(left, times=4)
    await (await claim_store(left)).close()


async def test_a_server_that_was_stopped_while_counting_up_takes_nothing_back(
    left: ServerConfig,
) -> None:
    store, slow = open_store(left), _Slow(DataFolder(left.data_dir))
    stopped = asyncio.create_task(binding.advance(slow, store))
    await slow.is_there.wait()
    for _ in range(3):
        await (await claim_store(left)).close()
    before = DataFolder(left.data_dir).identity()
    slow.may_go_on.set()
    await stopped
    await store.close()
    assert DataFolder(left.data_dir).identity() == before
    await (await claim_store(left)).close()


async def test_a_server_that_was_stopped_and_crashes_of_others_are_no_mismatch(
    left: ServerConfig,
) -> None:
    store, slow = open_store(left), _Slow(DataFolder(left.data_dir))
    stopped = asyncio.create_task(binding.advance(slow, store))
    await slow.is_there.wait()
    await _die_while_counting_up(left, times=3)
    slow.may_go_on.set()
    await stopped
    await store.close()
    await (await claim_store(left)).close()


@pytest.mark.parametrize("is_copied_first", [True, False])
async def test_after_crashes_while_counting_up_older_copies_are_still_refused(
    left: ServerConfig, tmp_path: Path, is_copied_first: bool
) -> None:
    copy = tmp_path / "copy"
    if is_copied_first:
        shutil.copytree(left.data_dir, copy)
    await _die_while_counting_up(left, times=4)
    if not is_copied_first:
        shutil.copytree(left.data_dir, copy)
    epoch = await _identity(left)
    for _ in range(2):
        await (await claim_store(left)).close()
    await _refused(_with(left, data_dir=copy), "the folder is an older copy")
    await _set_epoch(left, epoch)
    await _refused(left, "the database is an older copy")


async def test_the_epoch_counts_up_while_a_server_runs(start_server: StartServer) -> None:
    server = await start_server()
    before = DataFolder(server.service.config.data_dir).identity()
    await server.service.tidy_results()
    after = DataFolder(server.service.config.data_dir).identity()
    assert before is not None and after is not None and after.epoch > before.epoch


async def _identity(config: ServerConfig) -> int:
    store = open_store(config)
    found = await store.identity.get()
    await store.close()
    assert found is not None
    return found.epoch


async def _set_epoch(config: ServerConfig, epoch: int) -> None:
    await _set(config, epoch=epoch)


async def _set(config: ServerConfig, **values: int) -> None:
    store = open_store(config)
    await store.database.execute(sa.update(schema.identity).values(values))
    await store.close()


async def _as_of_release_0_1(config: ServerConfig) -> None:
    """Take the identity away from both."""
    (config.data_dir / "identity.json").unlink()
    store = open_store(config)
    await store.database.write(lambda c: c.execute(sa.text("DELETE FROM identity")))
    await store.close()


async def test_a_store_of_the_first_release_gets_an_identity(left: ServerConfig) -> None:
    await _as_of_release_0_1(left)
    before = _files(left.data_dir)
    await (await claim_store(left)).close()
    assert _files(left.data_dir) == before
    assert DataFolder(left.data_dir).identity() is not None


async def test_an_empty_database_with_a_folder_of_the_first_release_is_refused(
    left: ServerConfig, tmp_path: Path
) -> None:
    await _as_of_release_0_1(left)
    empty = _with(left, database_url=sqlite_url(tmp_path / "another.db"))
    await _refused(empty, "knows none of the")


async def test_a_store_of_the_first_release_with_another_folder_is_refused(
    left: ServerConfig, tmp_path: Path
) -> None:
    await _as_of_release_0_1(left)
    await _refused(_with(left, data_dir=tmp_path / "mistyped"), "none of the .* is there")


async def test_a_damaged_identity_is_refused(left: ServerConfig) -> None:
    (left.data_dir / "identity.json").write_text("{")
    await _refused(left, "identity.json is damaged")


async def test_a_server_that_adopted_a_folder_deletes_nothing_that_it_does_not_know(
    left: ServerConfig, start_server: StartServer, tmp_path: Path
) -> None:
    """Weights, requests and results: every sweep moves strangers to the trash."""
    before = sorted(_files(left.data_dir).values())
    empty = _with(left, database_url=sqlite_url(tmp_path / "another.db"))
    store = open_store(empty)
    await binding.adopt(FolderStorage(DataFolder(empty.data_dir)), store)
    await store.close()
    server = await start_server(database_url=empty.database_url)
    await server.service.tidy()
    await server.service.tidy_results()
    await server.stop()
    after = [data for name, data in _files(left.data_dir).items() if "entry.json" not in name]
    assert sorted(after) == before
    assert not [*(left.data_dir / "weights").iterdir()]


async def test_an_adopted_older_database_finds_the_weights_that_it_knows_in_the_trash(
    left: ServerConfig, start_server: StartServer
) -> None:
    epoch = await _identity(left)
    server = await start_server(database_url=left.database_url)
    store, api = server.service.store, server.api
    checkpoint = (await api.get("/checkpoints")).json()["checkpoints"][0]
    run, _, name = checkpoint["tinker_path"].removeprefix("tinker://").partition("/")
    record = await store.checkpoints.get(run, name)
    assert record is not None
    weights = await store.weights.get(record.weights_id)
    assert weights is not None
    response = await api.http.delete(
        f"/api/v1/training_runs/{run}/checkpoints/{name}", headers=api.headers
    )
    assert response.status_code < 300
    await server.stop()
    folder = left.data_dir / "weights" / record.weights_id
    assert not folder.exists(), "it is in the trash"
    # What the database was before the checkpoint was deleted.
    older = open_store(left)
    audit = AuditRecord(owner="owner", at=0.0, area="checkpoints", event="e")
    await older.checkpoints.restore(record, weights, audit)
    await older.close()
    await _set_epoch(left, epoch)
    await _refused(left, "older copy")
    _, num_missing = await asyncio.to_thread(storage.adopt, left)
    assert folder.exists() and num_missing == 0
    await (await claim_store(left)).close()


async def test_the_trash_is_emptied_by_age_and_by_owner(tmp_path: Path) -> None:
    trash = Trash(tmp_path / "trash")
    for number in range(4):
        file = tmp_path / f"w{number}"
        file.write_bytes(b"x" * 100)
        owner = "a" if number < 3 else "b"
        facts = {"deleted_checkpoint": {"owner": owner}}
        trash.take_in(trash.announce(file, "deleted", facts), file)
    assert trash.empty(0.0) == 0
    assert trash.empty(0.0, max_owner_bytes=250) == 1, "one of the first owner's is beyond"
    assert [e.name for e in trash.entries()] == ["w3", "w2", "w1"], "the oldest went"
    assert trash.empty(time.time() + 1) == 3
    assert trash.entries() == []


async def test_a_move_to_the_trash_that_did_not_end_leaves_nothing(tmp_path: Path) -> None:
    """The facts were written, and the thing itself is where it was."""
    trash = Trash(tmp_path / "trash")
    file = tmp_path / "w"
    file.write_bytes(b"x")
    trash.take_in(trash.announce(file, "deleted"), file)
    (entry,) = trash.entries()
    trash.content(entry).rename(file)
    assert trash.entries() == []
    trash.sweep()
    assert not [*(tmp_path / "trash").iterdir()]


def test_weights_that_are_deleted_while_the_folder_is_read_are_left_out(tmp_path: Path) -> None:
    """A link to nothing: it is in the list, and gone when it is looked at."""
    folder = DataFolder(tmp_path)
    (folder.weights / "here").mkdir(parents=True)
    (folder.weights / "deleted").symlink_to(tmp_path / "nowhere")
    assert folder.names(time.time() + 60) == {"here"}


def test_files_that_were_not_written_to_the_end_are_gone_after_the_next_start(
    tmp_path: Path,
) -> None:
    """Where several servers share the folder only old ones: another may be writing."""
    folder = DataFolder(tmp_path)
    young, old = tmp_path / ".identity.json.01.draft", tmp_path / ".identity.json.02.draft"
    for draft in (young, old):
        draft.write_bytes(b"{")
    os.utime(old, (time.time() - 10_000,) * 2)
    with folder.locked(is_shared=True):
        assert young.exists() and not old.exists()
    with folder.locked():
        assert not young.exists()
