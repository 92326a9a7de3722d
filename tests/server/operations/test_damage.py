"""Damaged files and full disks: what can be used is used, and other models go on."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.engine.base import Failure
from tinsmith.engine.fake import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.in_process_server import Api, StartServer, TestServer


async def _train(api: Api, model: str, first: int, count: int) -> None:
    for index in range(count):
        await api.result(await api.send_pass(model, first + 2 * index))
        await api.result(await api.send_step(model, first + 2 * index + 1))


async def _expected(api: Api, count: int) -> float:
    model = await api.model()
    await _train(api, model, 1, count)
    return await api.loss(model, 2 * count + 1)


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [_flip_a_bit, _cut, _remove])
@pytest.mark.parametrize("name", ["state.npz", "adapter_config.json"])
@pytest.mark.parametrize("num_snapshots", [1, 2])
async def test_a_damaged_snapshot_is_noticed_and_the_previous_one_is_used(
    start_server: StartServer,
    tmp_path: Path,
    damage: Callable[[Path], None],
    name: str,
    num_snapshots: int,
) -> None:
    """With one snapshot, what is previous is the whole log."""
    server = await start_server(snapshot_steps=3)
    steps = 3 * num_snapshots
    expected = await _expected(server.api, steps + 1)
    model = await server.api.model()
    await _train(server.api, model, 1, steps)
    await server.api.loss(model, 2 * steps + 1)  # runs behind the snapshot
    record = await server.service.store.models.get(model)
    assert record is not None and record.snapshot_weights_id is not None
    assert (record.previous_snapshot_weights_id is None) == (num_snapshots == 1)
    damage(tmp_path / "data" / "weights" / record.snapshot_weights_id / name)
    server.kill_engine()
    await _train(server.api, model, 2 * steps + 2, 1)
    assert await server.api.loss(model, 2 * steps + 4) == expected
    after = await server.service.store.models.get(model)
    assert after is not None
    assert after.snapshot_weights_id not in (None, record.snapshot_weights_id)


async def test_a_model_without_a_good_snapshot_is_lost_and_the_others_go_on(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = await start_server(snapshot_steps=1)
    models = [await server.api.model(), await server.api.model()]
    for model in models:
        await _train(server.api, model, 1, 3)
    losses = [await server.api.loss(model, 7) for model in models]
    record = await server.service.store.models.get(models[0])
    assert record is not None
    for weights_id in (record.snapshot_weights_id, record.previous_snapshot_weights_id):
        _cut(tmp_path / "data" / "weights" / str(weights_id) / "state.npz")
    server.kill_engine()
    error, category = await server.api.failure(await server.api.send_pass(models[0], 8))
    assert "is lost" in error and "damaged" in error and category == "server"
    assert await server.api.loss(models[1], 8) == losses[1]


async def test_a_damaged_checkpoint_is_refused_by_name_and_changes_nothing(
    server: TestServer, tmp_path: Path
) -> None:
    api = server.api
    model = await api.model()
    await _train(api, model, 1, 1)
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 3, "path": "a"})
    path = (await api.result(saved["request_id"]))["path"]
    before = await api.loss(model, 4)
    (folder,) = (tmp_path / "data" / "weights").iterdir()
    _flip_a_bit(folder / "state.npz")
    body = {"model_id": model, "seq_id": 5, "path": path, "optimizer": True}
    error, _ = await api.failure((await api.ok("/load_weights", body))["request_id"])
    assert "state.npz is damaged" in error
    assert await api.loss(model, 6) == before


async def test_weights_stay_when_their_checkpoint_is_deleted_while_they_are_loaded(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is in the log and will be replayed; what it loaded has to be there then."""
    api = server.api
    model = await api.model()
    await _train(api, model, 1, 2)
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 5, "path": "a"})
    path = (await api.result(saved["request_id"]))["path"]
    restore = FakeEngine.restore
    deleted: list[int] = []

    async def interrupted(engine: FakeEngine, *arguments: Any) -> Any:
        if not deleted:
            url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
            deleted.append((await api.http.delete(url, headers=api.headers)).status_code)
        return await restore(engine, *arguments)

    monkeypatch.setattr(FakeEngine, "restore", interrupted)
    body = {"model_id": model, "seq_id": 6, "path": path, "optimizer": True}
    await api.result((await api.ok("/load_weights", body))["request_id"])
    assert deleted == [204]
    before = await api.loss(model, 7)
    server.kill_engine()
    assert await api.loss(model, 8) == before


async def test_a_save_waits_for_a_disk_that_is_full(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = server.api
    model = await api.model()
    await _train(api, model, 1, 1)
    save = FakeEngine.save
    tries: list[int] = []

    async def full(engine: FakeEngine, *arguments: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            return Failure("no space left on device", "server")
        return await save(engine, *arguments)

    monkeypatch.setattr(FakeEngine, "save", full)
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 3, "path": "a"})
    async with asyncio.timeout(60):
        assert (await api.result(saved["request_id"]))["path"].endswith("/weights/a")
    assert len(tries) == 3


async def test_a_model_that_could_not_be_saved_when_its_session_ended_goes_to_disk_later(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for it again, so that it stayed in the engine for good."""
    server = await start_server(snapshot_seconds=2.0)
    api, save = server.api, FakeEngine.save
    model = await api.model()
    await _train(api, model, 1, 1)
    tries: list[float] = []

    async def full(engine: FakeEngine, *arguments: Any) -> Any:
        tries.append(time.monotonic())
        if len(tries) < 3:
            return Failure("no space left on device", "server")
        return await save(engine, *arguments)

    monkeypatch.setattr(FakeEngine, "save", full)
    live = await server.service.models.get(model)
    assert live is not None
    session = model.partition(":")[0]
    end = {"reason": {"type": "success"}, "detail": None}
    assert (await api.post(f"/sessions/{session}/finish", end)).status_code == 204
    await server.until(lambda: not live.generation)
    assert len(tries) == 3 and tries[2] - tries[0] > 2.0, "it is not tried all the time"
    assert not live.wants_unload


async def test_what_an_engine_was_writing_when_it_died_is_swept_before_the_next(
    server: TestServer, tmp_path: Path
) -> None:
    draft = tmp_path / "data" / "weights" / ".0123.draft"
    draft.mkdir()
    server.kill_engine()
    await server.until(lambda: server.service.engines.slots[0].generation == 2, 10)
    assert not draft.exists()
