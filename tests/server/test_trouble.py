"""Damage, full disks, a store that is away, a model that kills every engine: others go on."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.engine.base import Failure
from tinsmith.engine.fake import FakeEngine
from tinsmith.errors import EngineDiedError
from tinsmith.server.store.database import Database
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.log import Log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from tests.server.conftest import Api, StartServer, TestServer
    from tinsmith.engine.base import Pass


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


async def test_a_model_that_kills_every_engine_is_set_aside_and_the_others_go_on(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server()
    api = server.api
    models = [await api.model() for _ in range(6)]
    for model in models:
        await _train(api, model, 1, 2)
    expected, *_ = [await api.loss(model, 5) for model in models]
    poison = models[0]
    create = FakeEngine.create_adapter

    async def deadly(engine: FakeEngine, adapter_id: str, *rest: Any) -> Failure | None:
        if adapter_id == poison:
            engine.die("poisoned")
            raise EngineDiedError("poisoned")
        await asyncio.sleep(0.02)
        return await create(engine, adapter_id, *rest)

    monkeypatch.setattr(FakeEngine, "create_adapter", deadly)
    server.kill_engine()
    sent = [await api.send_pass(model, 6, forward_only=True) for model in models]
    async with asyncio.timeout(30):
        error, category = await api.failure(sent[0])
        outputs = [await api.output(request_id) for request_id in sent[1:]]
    assert "set aside" in error and "poisoned" in error and category == "server"
    assert [output.metrics["loss:sum"] for output in outputs] == [expected] * 5
    num_engines = len(server.engines)
    error, _ = await api.failure(await api.send_pass(poison, 7))
    assert "set aside" in error
    assert await api.loss(models[2], 7) == expected
    assert len(server.engines) == num_engines, "a model set aside kills no more engines"


async def test_a_pass_that_kills_every_engine_is_given_up_and_the_others_are_not(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(fake_pass_seconds=0.01)
    api = server.api
    models = [await api.model() for _ in range(5)]
    expected = await _expected(api, 1)
    run_passes = FakeEngine.run_passes

    def deadly(engine: FakeEngine, passes: Sequence[Pass]) -> AsyncIterator[Any]:
        if any(item.adapter_id == models[0] for item in passes):
            engine.die("poisoned")
        return run_passes(engine, passes)

    monkeypatch.setattr(FakeEngine, "run_passes", deadly)
    sent = [await api.send_pass(model, 1) for model in models]
    async with asyncio.timeout(30):
        error, category = await api.failure(sent[0])
        for model, request_id in list(zip(models, sent, strict=True))[1:]:
            await api.result(request_id)
            await api.result(await api.send_step(model, 2))
            assert await api.loss(model, 3) == expected
    assert "died 3 times" in error and category == "server"


async def test_a_sample_that_kills_every_engine_is_given_up_and_training_is_not(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(fake_pass_seconds=0.3)
    api = server.api
    model = await api.model()
    body = {
        "session_id": await api.session(),
        "sampling_session_seq_id": 0,
        "base_model": "tinsmith/fake",
    }
    sampler = (await api.ok("/create_sampling_session", body))["sampling_session_id"]

    async def deadly(engine: FakeEngine, job: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.15)
        engine.die("poisoned")
        raise EngineDiedError("poisoned")
        yield

    monkeypatch.setattr(FakeEngine, "sample", deadly)
    passed = await api.send_pass(model, 1)
    async with asyncio.timeout(60):
        for number in range(2):
            sample = await api.ok("/asample", api.sample_body(sampler, number))
            error, category = await api.failure(sample["request_id"])
            assert "died repeatedly" in error and category == "server"
        await api.result(passed)
    assert len(server.engines) == 7


async def test_a_step_that_fails_in_the_engine_leaves_a_model_that_goes_on(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state was in doubt, so it was rebuilt: the pending gradient is there again."""
    api = server.api
    expected = await _expected(api, 1)
    model = await api.model()
    await api.result(await api.send_pass(model, 1))
    take = FakeEngine._take_step

    def broken(engine: FakeEngine, step: Any) -> Any:
        engine._adapter(step.adapter_id).weights += 1.0
        monkeypatch.setattr(FakeEngine, "_take_step", take)
        return Failure("the device has a cramp", "server")

    monkeypatch.setattr(FakeEngine, "_take_step", broken)
    error, category = await api.failure(await api.send_step(model, 2))
    assert ("cramp" in error, category) == (True, "server")
    await api.result(await api.send_step(model, 3))
    assert await api.loss(model, 4) == expected


class Outage:
    """While it lasts, every read and write of a store fails, as when the database is away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self.num_refused = 0
        for name in ("in_thread", "write"):
            monkeypatch.setattr(Database, name, self._refusing(getattr(Database, name)))

    def _refusing(self, call: Any) -> Any:
        async def called(database: Database, *arguments: Any) -> Any:
            if self.is_on:
                self.num_refused += 1
                raise StoreUnavailableError("the store cannot be used now: away")
            return await call(database, *arguments)

        return called


async def test_operations_wait_while_the_store_is_away(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are read back from the store, models rebuilt from it: neither gives up."""
    outage = Outage(monkeypatch)
    server = await start_server(max_queued_memory_bytes=0, fake_pass_seconds=0.05)
    api = server.api
    expected = await _expected(api, 4)
    model = await api.model()
    sent = []
    for number in range(4):
        sent.append(await api.send_pass(model, 1 + 2 * number))
        sent.append(await api.send_step(model, 2 + 2 * number))
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 9, "path": "a"})
    sent.append(saved["request_id"])
    await api.result(sent[0])
    outage.is_on = True
    response = await api.post("/optim_step", {"model_id": model, "seq_id": 10, "adam_params": {}})
    assert response.status_code == 503 and "away" in response.json()["detail"]
    server.kill_engine()
    await asyncio.sleep(1.5)
    outage.is_on = False
    assert outage.num_refused > 2
    for request_id in sent:
        await api.result(request_id)
    assert await api.loss(model, 10) == expected


async def test_a_recording_that_only_seemed_to_fail_is_found_by_the_retry(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection lost in mid-commit: the row is there, and nobody had queued it."""
    api = server.api
    model = await api.model()
    record = Log.record

    async def lost(log: Log, *arguments: Any) -> Any:
        await record(log, *arguments)
        raise StoreUnavailableError("the connection was lost")

    monkeypatch.setattr(Log, "record", lost)
    with pytest.raises(AssertionError, match="connection was lost"):
        await api.send_pass(model, 1)
    body = {"model_id": model, "seq_id": 2, "adam_params": 3}
    assert (await api.post("/optim_step", body)).status_code == 503
    monkeypatch.setattr(Log, "record", record)
    async with asyncio.timeout(5):
        await api.result(await api.send_pass(model, 1))
        assert (await api.post("/optim_step", body)).status_code == 400
        assert await api.loss(model, 3) > 0


async def test_a_save_waits_for_a_disk_that_is_full(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = server.api
    model = await api.model()
    await _train(api, model, 1, 1)
    snapshot = FakeEngine.snapshot
    tries: list[int] = []

    async def full(engine: FakeEngine, *arguments: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            return Failure("no space left on device", "server")
        return await snapshot(engine, *arguments)

    monkeypatch.setattr(FakeEngine, "snapshot", full)
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 3, "path": "a"})
    async with asyncio.timeout(10):
        assert (await api.result(saved["request_id"]))["path"].endswith("/weights/a")
    assert len(tries) == 3


async def test_what_an_engine_was_writing_when_it_died_is_swept_before_the_next(
    server: TestServer, tmp_path: Path
) -> None:
    draft = tmp_path / "data" / "weights" / ".0123.draft"
    draft.mkdir()
    server.kill_engine()
    await server.until(lambda: server.service.engines.generation == 2, 10)
    assert not draft.exists()


async def test_counted_tokens_are_not_lost_with_a_failed_write(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await server.api.model()
    await _train(server.api, model, 1, 1)
    outage = Outage(monkeypatch)
    outage.is_on = True
    with pytest.raises(StoreUnavailableError):
        await server.service.usage.flush()
    outage.is_on = False
    await server.service.usage.flush()
    hours = await server.service.store.account.list_usage("owner", 0, 10**9)
    assert [dataclasses.replace(u, hour=0).count for u in hours if u.kind == "training"] == [4]
