"""Deleting a checkpoint, with a death of the process at each of its writes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.death import Death, KilledError
from tinsmith.cli.server import storage
from tinsmith.server.checkpoints import Checkpoints
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.metadata import MetadataRoom
from tinsmith.server.serving import claim_store
from tinsmith.server.storage.folder import FolderStorage
from tinsmith.server.trash import Trash
from tinsmith.server.weights import WeightsFolders

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer
    from tinsmith.server.config import ServerConfig
    from tinsmith.server.store.records import WeightsRecord

NUM_MOMENTS = 12
"""More than a deletion has: a commit or a function that writes, before and after."""


WRITES = ("create_folder", "publish_file", "move", "discard_folder")


async def _saved(api: Api) -> list[str]:
    model = await api.model()
    paths = []
    for number in range(1, 1 + NUM_MOMENTS):
        body = {"model_id": model, "seq_id": number, "path": f"n{number}"}
        saved = await api.result((await api.ok("/save_weights", body))["request_id"])
        paths.append(saved["path"])
    return paths


async def _delete(config: ServerConfig, path: str) -> None:
    folder = DataFolder(config.data_dir)
    store = await claim_store(config)
    try:
        weights = WeightsFolders(FolderStorage(folder), store)
        checkpoints = Checkpoints(store, weights, MetadataRoom(store, 1000))
        with pytest.MonkeyPatch.context() as patch:
            Death(patch, NUM_MOMENTS - int(path.rpartition("n")[2]), WRITES)
            await checkpoints.delete(await checkpoints.readable(path, "owner"))
    finally:
        await store.close()


async def test_a_checkpoint_has_its_name_in_the_trash_whenever_its_deletion_was_cut(
    start_server: StartServer, database_url: str
) -> None:
    server = await start_server(database_url=database_url)
    paths = await _saved(server.api)
    await server.stop()
    config = server.service.config
    num_cut = 0
    for path in paths:
        try:
            await _delete(config, path)
        except KilledError:
            num_cut += 1
    assert 8 <= num_cut < NUM_MOMENTS, "every moment of a deletion was tried"

    server = await start_server(database_url=database_url)
    await server.service.tidy()
    page = (await server.api.get("/checkpoints")).json()["checkpoints"]
    kept = [checkpoint["tinker_path"] for checkpoint in page]
    await server.stop()
    trash = Trash(DataFolder(config.data_dir).trash)
    entries = {entry.reason.removesuffix(" was deleted"): entry for entry in trash.entries()}
    assert sorted([*kept, *entries]) == sorted(paths), "each is there, or in the trash by name"
    assert len(entries) > 8 and trash.announced() == {}
    for path, entry in entries.items():
        assert entry.owner == "owner"
        assert await asyncio.to_thread(storage.restore, config, entry.entry_id) == path


async def test_a_deletion_that_comes_late_spares_a_new_checkpoint_of_the_same_name(
    start_server: StartServer,
) -> None:
    """The first one was read for deletion; before that went on, another was saved over it."""
    server = await start_server()
    api, service = server.api, server.service
    model = await api.model()

    async def save(number: int) -> str:
        body = {"model_id": model, "seq_id": number, "path": "x", "overwrite": True}
        saved = await api.result((await api.ok("/save_weights", body))["request_id"])
        return str(saved["path"])

    path = await save(1)
    first = await service.checkpoints.readable(path, "owner")
    await save(2)
    second = await service.checkpoints.readable(path, "owner")
    await service.checkpoints.delete(first)
    assert await service.checkpoints.readable(path, "owner") == second


@pytest.mark.parametrize("use", ["copy", "sampler"])
async def test_a_checkpoint_that_is_deleted_while_it_is_being_used_is_not_named_by_anything(
    start_server: StartServer, use: str
) -> None:
    """It is deleted, and its weights with it, after they were found and before that is written."""
    server = await start_server()
    api, service = server.api, server.service
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "path": "x"}
    path = (await api.result((await api.ok("/save_weights_for_sampler", body))["request_id"]))[
        "path"
    ]
    checkpoint = await service.checkpoints.readable(path, "owner")
    session = await api.session()
    plain = service.store.weights.get

    async def get(weights_id: str) -> WeightsRecord | None:
        found = await plain(weights_id)
        await service.checkpoints.delete(checkpoint)
        assert await plain(weights_id) is None, "it was deleted in between"
        return found

    service.store.weights.get = get  # type: ignore[method-assign]  # somebody else, at that moment
    if use == "copy":
        refused = await api.post("/copy_weights", {"source_path": path})
        assert refused.status_code == 400 and "deleted meanwhile" in refused.json()["detail"]
    else:
        asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        refused = await api.post("/create_sampling_session", asked)
        assert refused.status_code == 404 and path in refused.json()["detail"]
    assert (await api.get("/checkpoints")).json()["checkpoints"] == []
    assert await service.store.samplers.of_session(session) == []
