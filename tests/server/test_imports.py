"""Uploads in pieces, and the checkpoints that become of them: whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.death import Death, KilledError
from tests.support.in_process_server import MODEL
from tinsmith import disk
from tinsmith.engine.base import Failure, ImportedAdapter, SavedKind
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.checkpoints import Checkpoints
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.auth import create_key
from tinsmith.server.edge.workers import Workers
from tinsmith.server.imports import Imports
from tinsmith.server.metadata import MetadataRoom
from tinsmith.server.serving import claim_store
from tinsmith.server.storage.folder import FolderStorage
from tinsmith.server.uploads import Uploads
from tinsmith.server.weights import WeightsFolders
from tinsmith.types import LoraConfig
from tinsmith.types.imports import ADAPTER_FILES, ImportWeightsRequest, UploadedFile

if TYPE_CHECKING:
    import httpx

    from tests.support.in_process_server import Api, StartServer, TestServer
    from tinsmith.server.config import ServerConfig

CONFIG, WEIGHTS = ADAPTER_FILES
WRITES = [name for name in disk.WRITES if name != "mark"]
"""All but the note of a commit, which the store's own thread makes: a commit is one moment."""

FILES = {CONFIG: [b'{"r": 4}'], WEIGHTS: [b"first", b"second", b"third"]}


class Importing(FakeEngine):
    """Takes any two files for an adapter of rank 4, unless the description says "bad"."""

    num_imports = 0

    async def import_adapter(
        self, base_model: str, source: Path, folder: Path, kind: SavedKind
    ) -> ImportedAdapter | Failure:
        type(self).num_imports += 1
        if b"bad" in (source / CONFIG).read_bytes():
            return Failure("adapter_config.json.r: is bad", "user")
        assert (source / WEIGHTS).read_bytes() == b"firstsecondthird"
        lora = LoraConfig(rank=4, seed=0)
        name = uuid.uuid4().hex
        assert await self.create_adapter(name, base_model, lora) is None
        info = await self.save(name, folder, kind)
        assert not isinstance(info, Failure)
        await self.unload_adapter(name)
        return ImportedAdapter(lora=lora, size_bytes=info.size_bytes)


@pytest.fixture
async def server(start_server: StartServer) -> TestServer:
    return await start_server(engine=Importing)


async def put(api: Api, upload_id: str, name: str, number: object, data: bytes) -> httpx.Response:
    return await api.http.put(
        f"/api/v1/uploads/{upload_id}/{name}/{number}", content=data, headers=api.headers
    )


async def upload(
    api: Api, files: dict[str, list[bytes]] = FILES, upload_id: str | None = None
) -> str:
    upload_id = upload_id or uuid.uuid4().hex
    for name, pieces in files.items():
        for number, piece in enumerate(pieces):
            response = await put(api, upload_id, name, number, piece)
            assert response.status_code == 204, response.text
    return upload_id


def request(
    upload_id: str, sent: dict[str, list[bytes]] = FILES, /, **fields: Any
) -> dict[str, Any]:
    described = [
        UploadedFile(
            name=name, num_pieces=len(pieces), sha256=hashlib.sha256(b"".join(pieces)).hexdigest()
        )
        for name, pieces in sent.items()
    ]
    message = ImportWeightsRequest(
        upload_id=upload_id, files=described, base_model=MODEL, name="start"
    )
    return message.to_wire() | fields


def left_over(server: TestServer) -> list[Path]:
    return [path for path in server.service.folder.uploads.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["training", "sampler"])
async def test_an_upload_becomes_a_checkpoint_to_load_and_to_sample_from(
    server: TestServer, kind: str
) -> None:
    api = server.api
    imported = await api.ok("/import_weights", request(await upload(api), kind=kind))
    path = imported["tinker_path"]
    segment = "weights" if kind == "training" else "sampler_weights"
    assert path.startswith("tinker://import-") and path.endswith(f"/{segment}/start")
    assert imported["lora_rank"] == 4
    assert left_over(server) == []
    session = await api.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "path": path,
        "optimizer": kind == "training",
    }
    promise = await api.ok("/load_weights", body)
    loaded = await api.result(promise["request_id"])
    await api.loss(loaded["model_id"], 1)
    sampler = await api.ok(
        "/create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
    )
    await api.sample(sampler["sampling_session_id"])


async def test_the_same_request_finds_the_same_checkpoint(server: TestServer) -> None:
    """At the same time, as after a lost answer, and later."""
    api, before = server.api, Importing.num_imports
    body = request(await upload(api))
    first, second = await asyncio.gather(
        api.ok("/import_weights", body), api.ok("/import_weights", body)
    )
    assert first == second == await api.ok("/import_weights", body)
    assert Importing.num_imports == before + 1
    assert len((await api.get("/checkpoints")).json()["checkpoints"]) == 1


class Waiting(Importing):
    """Imports when told to."""

    has_begun = asyncio.Event()
    release = asyncio.Event()

    async def import_adapter(
        self, base_model: str, source: Path, folder: Path, kind: SavedKind
    ) -> ImportedAdapter | Failure:
        self.has_begun.set()
        await self.release.wait()
        return await super().import_adapter(base_model, source, folder, kind)


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"kind": "sampler"}, {"user_metadata": {"a": "b"}}]
)
async def test_another_import_of_an_upload_gets_no_checkpoint_that_it_did_not_ask_for(
    start_server: StartServer, change: dict[str, Any]
) -> None:
    """Meanwhile, and with files of the same id that are sent again later."""
    server = await start_server(engine=Waiting)
    api, upload_id = server.api, await upload(server.api)
    Waiting.has_begun, Waiting.release = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(api.ok("/import_weights", request(upload_id)))
    await Waiting.has_begun.wait()
    asked = api.post("/import_weights", request(upload_id, **change))
    refused = await asyncio.wait_for(asked, 60)
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith("upload_id: this upload is just being imported")
    Waiting.release.set()
    imported = await first
    await upload(api, upload_id=upload_id)
    again = await api.ok("/import_weights", request(upload_id, **change))
    assert again["tinker_path"] != imported["tinker_path"]
    shown = (await api.get("/checkpoints")).json()["checkpoints"]
    assert {each["tinker_path"] for each in shown} == {
        imported["tinker_path"],
        again["tinker_path"],
    }


async def test_an_owner_whose_name_ends_as_an_upload_begins_gets_no_others_import(
    start_server: StartServer,
) -> None:
    server = await start_server(engine=Waiting)
    store = server.service.store
    Waiting.has_begun, Waiting.release = asyncio.Event(), asyncio.Event()
    mine = server.client((await create_key(store, "team", "k"))[0])
    theirs = server.client((await create_key(store, "team/their", "k"))[0])
    upload_id = await upload(theirs)
    importing = asyncio.create_task(theirs.ok("/import_weights", request(upload_id)))
    await Waiting.has_begun.wait()
    asked = asyncio.create_task(
        mine.post("/import_weights", request(f"their/{upload_id}") | {"files": []})
    )
    await asyncio.sleep(0.2)
    Waiting.release.set()
    await importing
    assert (await asked).status_code == 400
    copies = []
    for api, key in ((mine, "their/k"), (theirs, "k")):
        body = {"source_path": await _published(theirs), "destination_project_id": "p"}
        copies.append(await api.ok("/copy_weights", body, **{"x-idempotency-key": key}))
    assert copies[0] != copies[1]


async def _published(api: Api) -> str:
    """The path of the owner's one import, for everybody to read."""
    listed = (await api.get("/checkpoints")).json()["checkpoints"]
    path = next(c["tinker_path"] for c in listed if "//import-" in c["tinker_path"])
    run, place = path.removeprefix("tinker://").split("/", 1)
    published = f"/training_runs/{run}/checkpoints/{place}/publish"
    assert (await api.post(published, b"")).status_code == 204
    return str(path)


async def test_what_was_deleted_can_be_imported_and_copied_again_by_the_same_request(
    server: TestServer,
) -> None:
    api, body = server.api, request(await upload(server.api))
    path = (await api.ok("/import_weights", body))["tinker_path"]
    copy = {"source_path": path, "destination_project_id": "p"}
    key = {"x-idempotency-key": "k"}
    copied = (await api.ok("/copy_weights", copy, **key))["tinker_path"]
    for change in ({"ttl_seconds": 3600}, {"destination_project_id": "q"}):
        other = await api.ok("/copy_weights", copy | change, **key)
        assert other["tinker_path"] != copied, "another request"
    await _delete(api, copied)
    assert (await api.ok("/copy_weights", copy, **key))["tinker_path"] == copied
    await _delete(api, path)
    await upload(api, upload_id=body["upload_id"])
    assert (await api.ok("/import_weights", body))["tinker_path"] == path


async def _delete(api: Api, path: str) -> None:
    run, place = path.removeprefix("tinker://").split("/", 1)
    url = f"/api/v1/training_runs/{run}/checkpoints/{place}"
    assert (await api.http.delete(url, headers=api.headers)).status_code == 204


async def test_a_piece_that_comes_again_replaces_itself(server: TestServer) -> None:
    api = server.api
    upload_id = await upload(api, {CONFIG: FILES[CONFIG], WEIGHTS: [b"first", b"SECOND", b"third"]})
    assert (await put(api, upload_id, WEIGHTS, 1, b"second")).status_code == 204
    await api.ok("/import_weights", request(upload_id))


async def test_an_adapter_that_the_engine_refuses_leaves_nothing(server: TestServer) -> None:
    api = server.api
    files = {**FILES, CONFIG: [b"bad"]}
    response = await api.post("/import_weights", request(await upload(api, files), files))
    assert response.status_code == 400
    assert response.json()["detail"] == "adapter_config.json.r: is bad"
    assert left_over(server) == []
    assert (await api.get("/checkpoints")).json()["checkpoints"] == []


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"name": "a/b"}, "cannot be a checkpoint's name"),
        ({"base_model": "gpt-17"}, "no base model called 'gpt-17'"),
        ({"ttl_seconds": 1}, "must be between"),
        ({"upload_id": "0" * 32}, "there is no such upload"),
        ({"files": []}, "files: must be adapter_config.json and adapter_model.safetensors"),
    ],
    ids=["name", "base", "ttl", "upload", "files"],
)
async def test_what_does_not_fit_is_refused_by_name(
    server: TestServer, change: dict[str, Any], detail: str
) -> None:
    response = await server.api.post("/import_weights", request(await upload(server.api), **change))
    assert response.status_code == 400
    assert detail in response.json()["detail"]


async def test_files_that_did_not_arrive_whole_are_refused(server: TestServer) -> None:
    api = server.api
    more = {**FILES, WEIGHTS: [*FILES[WEIGHTS], b"fourth"]}
    response = await api.post("/import_weights", request(await upload(api), more))
    assert response.status_code == 400
    assert "piece 3 of adapter_model.safetensors is missing" in response.json()["detail"]
    other = {**FILES, WEIGHTS: [b"first", b"secret", b"third"]}
    response = await api.post("/import_weights", request(await upload(api), other))
    assert response.status_code == 400
    assert "adapter_model.safetensors has another checksum" in response.json()["detail"]


@pytest.mark.parametrize(
    ("upload_id", "name", "number", "detail"),
    [
        ("x" * 32, WEIGHTS, 0, "upload_id: must be 32 hexadecimal digits"),
        ("0" * 32, "model.bin", 0, "name: 'model.bin' is not one of"),
        ("0" * 32, WEIGHTS, 16_384, "number: must be between 0 and 16383"),
        ("0" * 32, WEIGHTS, "-1", "number: must be a number"),
    ],
)
async def test_pieces_have_names_of_ours_only(
    server: TestServer, upload_id: str, name: str, number: object, detail: str
) -> None:
    response = await put(server.api, upload_id, name, number, b"data")
    assert response.status_code == 400
    assert detail in response.json()["detail"]


async def test_uploads_are_their_owners(server: TestServer) -> None:
    upload_id = await upload(server.api)
    other = await server.other_user()
    response = await other.post("/import_weights", request(upload_id))
    assert response.status_code == 400
    assert "there is no such upload" in response.json()["detail"]


async def test_an_owners_uploads_have_bounds(start_server: StartServer) -> None:
    server = await start_server(engine=Importing, key_max_upload_bytes=10)
    first, second = "0" * 32, "1" * 32
    assert (await put(server.api, first, WEIGHTS, 0, b"12345678")).status_code == 204
    refused = await put(server.api, second, WEIGHTS, 0, b"123")
    assert refused.status_code == 413
    assert "would have 11 bytes; at most 10" in refused.json()["detail"]
    other = await server.other_user()
    for number in range(8):
        assert (await put(other, f"{number:032x}", WEIGHTS, 0, b"1")).status_code == 204
    refused = await put(other, "f" * 32, WEIGHTS, 0, b"1")
    assert "8 of your uploads are under way" in refused.json()["detail"]


async def test_large_uploads_of_one_owner_keep_no_thread_from_another(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To put gigabytes together takes the disk many seconds."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    rude, kind = await server.other_user(), server.api
    ids = [await upload(rude) for _ in range(6)]
    begun, is_over, write = threading.Semaphore(0), threading.Event(), disk.write_file

    def slow(*arguments: Any) -> Any:
        begun.release()
        assert is_over.wait(60)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_file", slow)
        imports = [asyncio.create_task(rude.post("/import_weights", request(i))) for i in ids]
        for _ in range(2):
            await server.until(lambda: begun.acquire(blocking=False))
        try:
            async with asyncio.timeout(20):
                assert (await kind.get("/training_runs")).status_code == 200
                piece = await put(kind, uuid.uuid4().hex, CONFIG, 0, b"mine")
                assert piece.status_code == 204
        finally:
            is_over.set()
            answers = await asyncio.gather(*imports)
    assert [answer.status_code for answer in answers] == [200] * 6


async def test_an_import_beyond_the_quota_is_refused_and_leaves_nothing(
    start_server: StartServer,
) -> None:
    server = await start_server(engine=Importing, key_max_stored_bytes=100)
    response = await server.api.post("/import_weights", request(await upload(server.api)))
    assert response.status_code == 403
    assert "at most 100 may be" in response.json()["detail"]
    assert [*server.service.folder.weights.iterdir()] == []


async def test_uploads_of_an_earlier_server_are_gone(start_server: StartServer) -> None:
    server = await start_server(engine=Importing)
    upload_id = await upload(server.api)
    assert left_over(server)
    await server.stop()
    server = await start_server(engine=Importing)
    assert left_over(server) == []
    response = await server.api.post("/import_weights", request(upload_id))
    assert "if the server was restarted meanwhile, send it again" in response.json()["detail"]


class _Engines:
    """One engine that lives as long as the process."""

    async def first(self) -> FakeEngine:
        from tinsmith.engine.fake import FakeEngineConfig, FakeModel

        return Importing(FakeEngineConfig(models=(FakeModel(name=MODEL),)))


async def _import_and_die(config: ServerConfig, moment: int) -> None:
    folder = DataFolder(config.data_dir)
    store = await claim_store(config)
    try:
        weights = WeightsFolders(FolderStorage(folder), store)
        uploads = Uploads(folder.uploads, 1000, Workers("disk"))
        engines: Any = _Engines()
        metadata = MetadataRoom(store, 1000)
        checkpoints = Checkpoints(store, weights, metadata)
        imports = Imports(store, uploads, weights, checkpoints, engines, metadata)
        upload_id = f"{moment:032x}"
        with pytest.MonkeyPatch.context() as patch:
            Death(patch, moment, WRITES)
            for name, pieces in FILES.items():
                for number, piece in enumerate(pieces):
                    await uploads.put("owner", upload_id, name, number, piece)
            message = ImportWeightsRequest.model_validate(request(upload_id, name=f"n{moment}"))
            await imports.run("owner", message)
    finally:
        await store.close()


async def test_an_import_that_was_cut_is_there_whole_or_not_at_all(
    start_server: StartServer,
) -> None:
    """The process dies before and after every write of an upload and its import."""
    server = await start_server(engine=Importing)
    await server.stop()
    config, num_cut = server.service.config, 0
    for moment in range(100):
        try:
            await _import_and_die(config, moment)
        except KilledError:
            num_cut += 1
        else:
            break
    assert num_cut > 20, "every moment of an import was tried"
    server = await start_server(engine=Importing)
    api = server.api
    page = (await api.get("/checkpoints")).json()["checkpoints"]
    paths = {each["tinker_path"] for each in page}
    assert 2 <= len(paths) < num_cut, "some came after the commit, most before"
    folders = [path for path in server.service.folder.weights.iterdir() if path.is_dir()]
    assert len(folders) == len(paths), "what has no record is not among the weights"
    assert left_over(server) == []
    session = await api.session()
    for number, path in enumerate(sorted(paths)):
        body = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True}
        await api.result((await api.ok("/load_weights", body))["request_id"])


async def test_a_server_that_is_late_removes_no_upload_of_the_one_that_took_over(
    tmp_path: Path,
) -> None:
    earlier, later = (Uploads(tmp_path, 1000, Workers("disk"), epoch) for epoch in (4, 5))
    await earlier.put("owner", "0" * 32, CONFIG, 0, b"old")
    later.clear()
    assert contents(tmp_path) == [], "nobody goes on with it"
    await later.put("owner", "0" * 32, CONFIG, 0, b"new")
    earlier.clear()
    assert contents(tmp_path) == [b"new"]


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def _slow_disk(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Whether a piece is being written; pieces are written when the second event says so."""
    is_writing, release, create = threading.Event(), threading.Event(), disk.create_folder

    def wait(folder: Path) -> None:
        is_writing.set()
        assert release.wait(60)
        create(folder)

    monkeypatch.setattr(disk, "create_folder", wait)
    return is_writing, release


async def test_a_piece_that_is_still_being_written_is_missing(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place was known before its file was there: a server error."""
    api, upload_id = server.api, await upload(server.api, {CONFIG: FILES[CONFIG]})
    is_writing, release = _slow_disk(monkeypatch)
    sent = [
        asyncio.create_task(put(api, upload_id, WEIGHTS, number, piece))
        for number, piece in enumerate(FILES[WEIGHTS])
    ]
    await server.until(is_writing.is_set)
    early = await api.post("/import_weights", request(upload_id))
    assert early.status_code == 400 and "is missing" in early.json()["detail"]
    release.set()
    await asyncio.gather(*sent)
    await api.ok("/import_weights", request(upload_id))


async def test_a_piece_that_could_not_be_written_is_missing(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, upload_id = server.api, await upload(server.api, {CONFIG: FILES[CONFIG]})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk_full:
        disk_full.setattr(disk, "publish_file", full)
        await put(api, upload_id, WEIGHTS, 0, b"firstsecondthird")
    refused = await api.post("/import_weights", request(upload_id))
    assert refused.status_code == 400 and "piece 0" in refused.json()["detail"]


async def test_a_piece_that_comes_while_its_upload_is_discarded_leaves_nothing(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = await upload(server.api)
    is_writing, release = _slow_disk(monkeypatch)
    late = asyncio.create_task(put(server.api, upload_id, WEIGHTS, 3, b"late"))
    await server.until(is_writing.is_set)
    await server.service.uploads.discard("owner", upload_id)
    release.set()
    await late
    assert left_over(server) == []


async def test_a_late_piece_of_a_discarded_upload_does_nothing_to_the_next_of_its_id(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = await upload(server.api)
    with monkeypatch.context() as patched:
        is_writing, release = _slow_disk(patched)
        late = asyncio.create_task(put(server.api, upload_id, WEIGHTS, 0, b"late"))
        await server.until(is_writing.is_set)
    await server.service.uploads.discard("owner", upload_id)
    for name, pieces in FILES.items():
        for number, piece in enumerate(pieces):
            await put(server.api, upload_id, name, number, piece)
    release.set()
    await late
    await server.api.ok("/import_weights", request(upload_id))


@pytest.mark.parametrize("count", [-1, 2**40])
async def test_a_file_of_impossibly_many_pieces_is_refused_with_the_limit(
    server: TestServer, count: int
) -> None:
    body = request(await upload(server.api))
    body["files"][1]["num_pieces"] = count
    refused = await server.api.post("/import_weights", body)
    assert refused.status_code == 400 and "16384" in refused.json()["detail"]
