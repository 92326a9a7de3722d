"""Weights, large requests and results in object storage: a real S3 server on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.in_process_server import Api, StartServer, TestServer, datum
from tests.support.object_storage import Bucket, bucket, s3_server  # noqa: F401  # fixtures
from tinsmith.cli.server import storage
from tinsmith.errors import ValidationError
from tinsmith.server import backups
from tinsmith.server.config import ServerConfig
from tinsmith.server.config_sources import build_config
from tinsmith.server.serving import claim_store, open_store
from tinsmith.server.storage import binding
from tinsmith.server.storage.objects import Objects
from tinsmith.server.storage.opening import open_storage
from tinsmith.server.store import schema
from tinsmith.server.store.blobs import INLINE_BYTES
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.errors import ForeignStoreError
from tinsmith.server.store.records import IdentityRecord

LARGE = [datum(*([1, 2, 3, 4] * 250))] * (INLINE_BYTES // 2000)
"""A pass whose request is kept outside of the database."""


async def _save(api: Api, model: str, seq_id: int, name: str) -> str:
    body = {"model_id": model, "seq_id": seq_id, "path": name}
    saved = await api.result((await api.ok("/save_weights", body))["request_id"])
    return str(saved["path"])


async def _sampler(api: Api, model: str, seq_id: int) -> str:
    body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
    saved = await api.result((await api.ok("/save_weights_for_sampler", body))["request_id"])
    return str(saved["sampling_session_id"])


async def _delete(api: Api, path: str) -> None:
    run, _, name = path.removeprefix("tinker://").partition("/")
    url = f"/api/v1/training_runs/{run}/checkpoints/{name}"
    assert (await api.http.delete(url, headers=api.headers)).status_code < 300


@pytest.fixture
def place(bucket: Bucket, tmp_path: Path) -> dict[str, Any]:  # noqa: F811  # the fixture
    """The settings of a server whose database is not in the data folder."""
    return {"storage": bucket.url, "database_url": sqlite_url(tmp_path / "store.db")}


async def _trained(server: TestServer) -> tuple[str, float]:
    """A model with a large request in its log, and its loss."""
    api = server.api
    model = await api.model()
    await api.output((await api.post_pass(model, 1, LARGE)).json()["request_id"])
    await api.result(await api.send_step(model, 2))
    return model, await api.loss(model, 3)


async def test_a_large_request_and_weights_are_in_the_bucket_when_they_are_answered(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    model = await server.api.model()
    accepted = await server.api.post_pass(model, 1, LARGE)
    assert accepted.status_code == 200
    assert [n for n in bucket.files() if n.startswith("blobs/") and ".payload." in n]
    path = await _save(server.api, model, 2, "x")
    record = await server.service.checkpoints.readable(path, "owner")
    weights = await server.service.checkpoints.weights_of(record)
    assert weights.files and set(weights.files) == {
        n.split("/")[2] for n in bucket.files() if n.startswith(f"weights/{weights.weights_id}/")
    }
    assert not [*server.service.folder.weights.glob("*")], "nothing is kept in the data folder"


async def test_a_server_that_lost_its_data_folder_goes_on_with_equal_bits(
    start_server: StartServer, place: dict[str, Any]
) -> None:
    server = await start_server(**place)
    model, loss = await _trained(server)
    path = await _save(server.api, model, 4, "kept")
    sampler = await _sampler(server.api, model, 5)
    first = await server.api.sample(sampler, 0)
    await server.stop()
    shutil.rmtree(server.service.config.data_dir)
    server = await start_server(**place)
    assert await server.api.loss(model, 6) == loss
    again = await server.api.sample(sampler, 0)
    assert again.sequences[0].tokens == first.sequences[0].tokens
    other = await server.api.model()
    body = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
    await server.api.result((await server.api.ok("/load_weights", body))["request_id"])
    assert await server.api.loss(other, 2) == loss


@pytest.mark.parametrize("database", ["empty", "foreign", "older"])
async def test_a_database_that_does_not_know_what_is_in_the_bucket_is_refused(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
    tmp_path: Path,
    database: str,
) -> None:
    """And nothing in the bucket changes."""
    server = await start_server(**place)
    await _save(server.api, await server.api.model(), 1, "x")
    await server.stop()
    config = server.service.config
    before = bucket.files()
    if database == "older":
        store = open_store(config)
        await store.database.execute(sa.update(schema.identity).values(epoch=1))
        await store.close()
        reason = "older copy"
    else:
        config = dataclasses.replace(
            config,
            database_url=sqlite_url(tmp_path / "another.db"),
            data_dir=tmp_path / "another",
        )
        reason = "the database is new"
        if database == "foreign":
            elsewhere = dataclasses.replace(config, storage=f"{bucket.url}/elsewhere")
            await (await claim_store(elsewhere)).close()
            before, reason = bucket.files(), "the database belongs to another storage"
    with pytest.raises(ForeignStoreError, match=reason):
        await claim_store(config)
    assert bucket.files() == before


async def test_a_database_with_weights_is_not_bound_to_an_empty_bucket(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    await _save(server.api, await server.api.model(), 1, "x")
    await server.stop()
    mistyped = dataclasses.replace(server.service.config, storage=f"{bucket.url}-mistyped")
    with pytest.raises(ForeignStoreError, match="another data folder or storage"):
        await claim_store(mistyped)


async def test_a_deleted_checkpoint_waits_in_the_trash_of_the_bucket_and_comes_back(
    start_server: StartServer, place: dict[str, Any]
) -> None:
    server = await start_server(**place)
    api, config = server.api, server.service.config
    model, loss = await _trained(server)
    path = await _save(api, model, 4, "precious")
    await _delete(api, path)
    await server.service.tidy_results()
    (entry,) = await asyncio.to_thread(storage.trashed, config)
    assert path in entry.reason and entry.owner == "owner" and entry.size_bytes > 0
    assert await asyncio.to_thread(storage.restore, config, entry.entry_id) == path
    assert await asyncio.to_thread(storage.trashed, config) == []
    # Though its mark had been old, or had been left behind: the store knows it.
    await server.service.storage.empty_trash(time.time() + 1, None, server.service.store.file_names)
    other = await api.model()
    body = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
    await api.result((await api.ok("/load_weights", body))["request_id"])
    assert await api.loss(other, 2) == loss


async def test_the_trash_of_a_bucket_is_emptied_by_age(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    service = server.service
    path = await _save(server.api, await server.api.model(), 1, "x")
    weights_id = (await service.checkpoints.readable(path, "owner")).weights_id
    await _delete(server.api, path)
    known = service.store.file_names
    assert await service.storage.empty_trash(time.time() - 60, None, known) == 0
    assert [name for name in bucket.files() if weights_id in name]
    assert await service.storage.empty_trash(time.time() + 60, None, known) == 1
    assert not [name for name in bucket.files() if weights_id in name or "trash" in name]


async def test_a_mark_on_what_the_store_knows_deletes_nothing(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    """As when another server took weights for strange that got their record late."""
    server = await start_server(**place)
    service = server.service
    path = await _save(server.api, await server.api.model(), 1, "x")
    weights_id = (await service.checkpoints.readable(path, "owner")).weights_id
    await service.storage.put_in_trash([weights_id])
    assert await service.storage.trashed(service.store.file_names) == []
    await service.storage.empty_trash(time.time() + 60, 0, service.store.file_names)
    assert [name for name in bucket.files() if weights_id in name]
    assert not [name for name in bucket.files() if "trash" in name]


async def test_what_is_new_in_a_bucket_is_left_to_whoever_writes_it(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    """Another server may be about to record it; what is old is nobody's."""
    server = await start_server(**place)
    await server.stop()
    objects = Objects(bucket.url)
    new, old = "a" * 32, "b" * 32
    for name in (new, old):
        await objects.put(f"weights/{name}/adapter.bin", b"weights")
    hours_ago = time.time() - 2 * 3600
    os.utime(bucket.folder / "weights" / old / "adapter.bin", (hours_ago, hours_ago))
    await bucket.settled()
    server = await start_server(**place)
    entries = await server.service.storage.trashed(server.service.store.file_names)
    assert [entry.name for entry in entries] == [old]
    assert bucket.files()[f"weights/{new}/adapter.bin"] == b"weights"


async def test_while_the_storage_is_away_large_requests_wait_and_small_ones_do_not(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    api = server.api
    model, loss = await _trained(server)
    bucket.gate.shut()
    assert await api.loss(model, 4) == loss, "a small pass needs the database alone"
    save = (await api.ok("/save_weights", {"model_id": model, "seq_id": 5, "path": "x"}))[
        "request_id"
    ]
    refused = await api.post_pass(model, 6, LARGE)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "cannot be used now" in refused.text
    assert (await api.post("/retrieve_future", {"request_id": save})).status_code == 408
    bucket.gate.open()
    assert (await api.result(save))["path"].endswith("weights/x")
    accepted = await api.post_pass(model, 6, LARGE, forward_only=True)
    await api.output(accepted.json()["request_id"])
    assert await api.loss(model, 7) == loss


async def test_a_sample_waits_for_weights_that_cannot_be_fetched_now(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    sampler = await _sampler(server.api, await server.api.model(), 1)
    first = await server.api.sample(sampler, 0)
    await server.stop()
    shutil.rmtree(server.service.config.data_dir / "cache")
    server = await start_server(**place)
    bucket.gate.shut()
    promise = await server.api.ok("/asample", server.api.sample_body(sampler, 1))
    asked = await server.api.post("/retrieve_future", {"request_id": promise["request_id"]})
    assert asked.status_code == 408, asked.text
    bucket.gate.open()
    await server.api.result(promise["request_id"])
    again = await server.api.sample(sampler, 0)
    assert again.sequences[0].tokens == first.sequences[0].tokens


async def test_weights_that_were_changed_in_the_bucket_are_not_loaded(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    path = await _save(server.api, await server.api.model(), 1, "x")
    weights_id = (await server.service.checkpoints.readable(path, "owner")).weights_id
    await server.stop()
    shutil.rmtree(server.service.config.data_dir / "cache")
    file = bucket.folder / "weights" / weights_id / "state.npz"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    await bucket.settled()
    server = await start_server(**place)
    body = {"model_id": await server.api.model(), "seq_id": 1, "path": path, "optimizer": True}
    loading = (await server.api.ok("/load_weights", body))["request_id"]
    error, _ = await server.api.failure(loading)
    assert "its checksum differs" in error and weights_id in error


async def test_copies_on_the_machine_stay_within_their_bytes(
    start_server: StartServer, place: dict[str, Any]
) -> None:
    server = await start_server(**place, storage_cache_bytes=1)
    model, loss = await _trained(server)
    paths = [await _save(server.api, model, number, f"n{number}") for number in (4, 5, 6)]
    assert [*server.service.folder.cache.iterdir()] == []
    other = await server.api.model()
    for number, path in enumerate(paths, 1):
        body = {"model_id": other, "seq_id": number, "path": path, "optimizer": True}
        await server.api.result((await server.api.ok("/load_weights", body))["request_id"])
    assert await server.api.loss(other, 4) == loss


@pytest.mark.parametrize("url", ["", "bucket", "ftp://bucket", "s3:///prefix", "file://"])
def test_what_is_no_address_of_a_storage_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="expected s3://bucket/prefix"):
        build_config({"storage": url})


async def test_a_folder_may_be_the_object_storage(
    start_server: StartServer, tmp_path: Path
) -> None:
    pytest.importorskip("obstore", reason="the extra `storage` is not installed")
    url = f"file://{tmp_path / 'elsewhere'}"
    server = await start_server(storage=url)
    model, loss = await _trained(server)
    await _delete(server.api, await _save(server.api, model, 4, "x"))
    await server.stop()
    shutil.rmtree(server.service.config.data_dir / "cache")
    server = await start_server(storage=url)
    assert await server.api.loss(model, 5) == loss
    config: ServerConfig = server.service.config
    assert len(await asyncio.to_thread(storage.trashed, config)) == 1


async def test_a_checkpoint_is_fetched_from_the_bucket_itself(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    path = await _save(server.api, await server.api.model(), 1, "x")
    files = await _fetched(server, path)
    assert files and all(f"{bucket.url.removeprefix('s3://')}/weights/" in url for url in files)
    inside = {
        n.rpartition("/")[2]: b for n, b in bucket.files().items() if n.startswith("weights/")
    }
    assert sorted(files.values()) == sorted(inside.values())


async def test_a_server_passes_files_on_where_clients_cannot_reach_the_bucket(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place, storage_urls=False, storage_cache_bytes=1)
    path = await _save(server.api, await server.api.model(), 1, "x")
    files = await _fetched(server, path)
    assert files and all(url.startswith("http://server/") for url in files)
    inside = [data for name, data in bucket.files().items() if name.startswith("weights/")]
    assert sorted(files.values()) == sorted(inside)


async def _fetched(server: TestServer, path: str) -> dict[str, bytes]:
    """The files of a checkpoint by the addresses that a client is given."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    answer = await server.api.get(f"/training_runs/{run}/checkpoints/{name}/external_weights_urls")
    assert answer.status_code == 200, answer.text
    found = {}
    async with httpx.AsyncClient() as outside:
        for url in answer.json()["urls"].values():
            http = server.api.http if url.startswith("http://server/") else outside
            response = await http.get(url)
            assert response.status_code == 200, response.text
            found[url] = response.content
    return found


@pytest.mark.parametrize("where", ["folder", "bucket"])
async def test_what_is_missing_damaged_or_unknown_is_found_and_marked_and_nothing_is_deleted(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
    where: str,
) -> None:
    settings = place if where == "bucket" else {}
    server = await start_server(**settings)
    api, config = server.api, server.service.config
    files = bucket.folder if where == "bucket" else config.data_dir
    model = await api.model()
    paths = {n: await _save(api, model, n, f"n{n}") for n in (1, 2, 3)}
    accepted = await api.post_pass(model, 4, LARGE)
    await api.output(accepted.json()["request_id"])
    ids = {
        n: (await server.service.checkpoints.readable(path, "owner")).weights_id
        for n, path in paths.items()
    }
    await server.stop()
    found = await asyncio.to_thread(storage.check, config)
    assert found.faults == [] and found.num_known >= 4
    shutil.rmtree(files / "weights" / ids[1])
    state = files / "weights" / ids[2] / "state.npz"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + b"?")
    (payload,) = [f for f in files.glob("blobs/*/*") if ".payload." in f.name]
    payload.write_bytes(b"?" + payload.read_bytes()[1:])
    unknown = files / "weights" / ("c" * 32) / "adapter.bin"
    unknown.parent.mkdir()
    unknown.write_bytes(b"somebody's")
    hours_ago = time.time() - 2 * 3600
    for path in (unknown, unknown.parent):
        os.utime(path, (hours_ago, hours_ago))
    if where == "bucket":
        await bucket.settled()
    expected = [
        ("damaged", ids[2]),
        ("damaged", payload.name),
        ("missing", ids[1]),
        ("unknown", "c" * 32),
    ]
    before = _contents(files)
    found = await asyncio.to_thread(storage.check, config)
    assert sorted((f.kind, f.name) for f in found.faults) == sorted(expected)
    quick = await asyncio.to_thread(partial(storage.check, config, reads=False))
    assert {f.name for f in quick.faults} == {ids[1], "c" * 32}
    assert _contents(files) == before, "looking changes nothing"
    await asyncio.to_thread(storage.repair, config)
    assert set(before.values()) <= set(_contents(files).values()), "and repairing deletes nothing"
    assert [e.name for e in await asyncio.to_thread(storage.trashed, config)] == ["c" * 32]
    server = await start_server(**settings)
    other = await server.api.model()
    for number, word in ((1, "missing"), (2, "damaged")):
        body = {"model_id": other, "seq_id": number, "path": paths[number], "optimizer": True}
        loading = (await server.api.ok("/load_weights", body))["request_id"]
        error, _ = await server.api.failure(loading)
        assert f"{paths[number]} are lost" in error and word in error, error
    await server.stop()
    state.write_bytes(whole)
    if where == "bucket":
        await bucket.settled()
    found = await asyncio.to_thread(storage.repair, config)
    assert ("found", ids[2]) in [(f.kind, f.name) for f in found.faults]
    server = await start_server(**settings)
    record = await server.service.checkpoints.readable(paths[2], "owner")
    assert (await server.service.checkpoints.weights_of(record)).lost is None


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file() and "db" not in f.name}


async def test_a_backup_of_a_bucket_fills_another_one_or_a_folder(
    start_server: StartServer,
    bucket: Bucket,  # noqa: F811  # the fixture
    tmp_path: Path,
) -> None:
    server = await start_server(storage=bucket.url)
    model, loss = await _trained(server)
    path = await _save(server.api, model, 4, "kept")
    backup = tmp_path / "backup"
    made = await asyncio.to_thread(backups.create, server.service.config, backup)
    assert await asyncio.to_thread(backups.verify, backup) == made
    assert {name.split("/")[0] for name in made.files} == {"weights", "blobs", "tinsmith.db"}
    await server.stop()
    before = bucket.files()
    for where in (f"{bucket.url}-restored", None):
        settings = {
            "storage": where,
            "data_dir": tmp_path / ("folder" if where is None else "s3"),
        }
        await asyncio.to_thread(backups.restore, backup, build_config(settings))
        server = await start_server(**settings)
        other = await server.api.model()
        body = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
        await server.api.result((await server.api.ok("/load_weights", body))["request_id"])
        assert await server.api.loss(other, 2) == loss
        await server.stop()
    config = build_config({"storage": bucket.url, "data_dir": tmp_path / "no"})
    with pytest.raises(ValidationError, match="is not empty"):
        await asyncio.to_thread(backups.restore, backup, config)
    assert bucket.files() == before
    assert not config.data_dir.exists()


async def test_of_two_that_take_an_empty_bucket_at_once_one_is_refused(
    bucket: Bucket,  # noqa: F811  # the fixture
    tmp_path: Path,
) -> None:
    """Both have seen that it belongs to nobody."""
    stores = [await asyncio.to_thread(open_store, _config(tmp_path, n, bucket)) for n in range(2)]
    storages = [open_storage(_config(tmp_path, n, bucket)) for n in range(2)]
    for storage_, store in zip(storages, stores, strict=True):
        await binding.check(storage_, store)
    await binding.bind(storages[0], stores[0])
    with pytest.raises(ForeignStoreError, match="belongs to another database by now"):
        await binding.bind(storages[1], stores[1])
    noted, first = await storages[0].identity(), await stores[0].identity.get()
    assert noted is not None and first is not None and noted.store_id == first.store_id
    await binding.advance(storages[0], stores[0])
    for store in stores:
        await store.close()


def _config(tmp_path: Path, number: int, bucket: Bucket) -> ServerConfig:  # noqa: F811
    return build_config(
        {
            "data_dir": tmp_path / str(number),
            "storage": bucket.url,
            "database_url": sqlite_url(tmp_path / f"{number}.db"),
        }
    )


async def test_an_object_is_created_once_whoever_comes_later(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra `storage` is not installed")
    objects = Objects(f"file://{tmp_path}/place")
    await asyncio.gather(*(objects.create("a", bytes([n])) for n in range(16)))
    first = await objects.get("a")
    await objects.create("a", b"late")
    assert await objects.get("a") == first


async def test_a_server_whose_bucket_is_anothers_by_now_tidies_nothing_there(
    start_server: StartServer,
    place: dict[str, Any],
    bucket: Bucket,  # noqa: F811  # the fixture
) -> None:
    server = await start_server(**place)
    await server.service.storage.write_identity(IdentityRecord(store_id="another", epoch=0))
    objects = Objects(bucket.url)
    await objects.put("weights/0123456789abcdef0123456789abcdef/a", b"of another")
    before = bucket.files()
    with pytest.raises(ForeignStoreError):
        await server.service.tidy_results()
    assert bucket.files() == before


async def test_a_server_that_comes_late_does_not_set_a_bucket_back(
    start_server: StartServer, place: dict[str, Any]
) -> None:
    server = await start_server(**place)
    noted = await server.service.storage.identity()
    assert noted is not None
    later = IdentityRecord(store_id=noted.store_id, epoch=noted.epoch + 5)
    earlier = IdentityRecord(store_id=noted.store_id, epoch=noted.epoch + 2)
    for identity in (later, earlier):
        await server.service.storage.write_identity(identity)
    found = await server.service.storage.identity()
    assert found is not None and found.epoch == later.epoch
