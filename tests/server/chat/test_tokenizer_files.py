"""The server hands out its models' tokenizers, and nothing else of their folders."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.server.conftest import MODEL, StartServer, TestServer
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.types.tokenizers import MAX_TOKENIZER_FILE_BYTES

FILES = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}', "vocab.json": b"[]"}
OTHERS = {"config.json": b"{}\n", "model.safetensors": b"weights", "tokenization.py": b"code"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in {**FILES, **OTHERS}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
async def server(start_server: StartServer, folder: Path) -> TestServer:
    class WithTokenizer(FakeEngine):
        def __init__(self, config: FakeEngineConfig) -> None:
            model = FakeModel(name=MODEL, tokenizer_folder=folder)
            super().__init__(replace(config, models=(model,)))

    return await start_server(engine=WithTokenizer)


async def test_a_tokenizers_files_are_listed_and_fetched_by_hash(server: TestServer) -> None:
    listed = (await server.api.get("/tokenizers", base_model=MODEL)).json()
    assert {each["name"] for each in listed["files"]} == FILES.keys()
    for each in listed["files"]:
        content = (await server.api.get(f"/tokenizers/{each['sha256']}")).content
        assert content == FILES[each["name"]]
        assert each["size"] == len(content)
        assert each["sha256"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
async def test_other_files_of_a_model_are_not_handed_out(
    server: TestServer, content: bytes
) -> None:
    answer = await server.api.get(f"/tokenizers/{hashlib.sha256(content).hexdigest()}")
    assert answer.status_code == 404


async def test_a_tokenizer_is_for_callers_with_a_key(server: TestServer) -> None:
    stranger = server.client("tml-unknown")
    sha256 = hashlib.sha256(FILES["tokenizer.json"]).hexdigest()
    assert (await stranger.get("/tokenizers", base_model=MODEL)).status_code == 401
    assert (await stranger.get(f"/tokenizers/{sha256}")).status_code == 401


async def test_a_changed_file_has_another_hash(server: TestServer, folder: Path) -> None:
    before = (await server.api.get("/tokenizers", base_model=MODEL)).json()
    (folder / "vocab.json").write_bytes(b"[1, 2]")
    after = (await server.api.get("/tokenizers", base_model=MODEL)).json()
    assert before["files"][:2] == after["files"][:2]
    assert before["files"][2]["sha256"] != after["files"][2]["sha256"]


async def test_a_file_above_the_limit_is_left_out(server: TestServer, folder: Path) -> None:
    with (folder / "vocab.json").open("r+b") as file:
        file.truncate(MAX_TOKENIZER_FILE_BYTES + 1)
    listed = (await server.api.get("/tokenizers", base_model=MODEL)).json()
    assert "vocab.json" not in {each["name"] for each in listed["files"]}


async def test_a_model_that_is_not_served_has_no_tokenizer_here(server: TestServer) -> None:
    listed = (await server.api.get("/tokenizers", base_model="another")).json()
    assert listed["files"] == []
    refused = await server.api.get("/tokenizers")
    assert refused.status_code == 400 and "base_model" in refused.text
