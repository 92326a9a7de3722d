"""Names from clients, links in the data folder, hostile file lists: nothing leads outside."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.client.downloads.download import confined
from tinsmith.errors import ValidationError
from tinsmith.server.checkpoints import checkpoint_name
from tinsmith.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, TestServer

HOSTILE_NAMES = [
    "",
    ".",
    "..",
    "...",
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "//x",
    "a/b",
    "a\\b",
    "C:\\x",
    "a\x00b",
    "\x00",
    "a\nb",
    " a",
    "~root",
    "%2e%2e%2fx",
    "x" * 201,
    "x" * 100_000,
    "\uff0e\uff0e\uff0fx",  # full-width dots and slash
    "\u2024\u2024/x",  # one dot leaders
    "a\u2215b",  # division slash
    "\u0430dmin",  # a Cyrillic letter that looks Latin
    "a\u202eb",  # turns the direction of writing
    "e\u0301",  # a combining accent
    "\ud800",  # half a surrogate pair
]


def _tree(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*")}


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda n: ascii(n)[:24])
async def test_a_hostile_name_makes_no_file_anywhere(
    server: TestServer, tmp_path: Path, name: str
) -> None:
    api = server.api
    model = await api.model()
    outside = _tree(tmp_path) - {n for n in _tree(tmp_path) if n.startswith("data")}
    for seq_id, kind in enumerate(
        ("save_weights", "save_weights_for_sampler", "save_weights_external"), start=1
    ):
        body = f'{{"model_id": "{model}", "seq_id": {seq_id}, "path": {_json(name)}}}'
        response = await api.post(f"/{kind}", body.encode())
        assert response.status_code == 400, f"{kind} accepted {name!r}"
    await server.service.stop()
    left = {n for n in _tree(tmp_path) if not n.startswith("data")}
    assert left == outside
    assert _tree(tmp_path / "data" / "weights") == set()


def _json(text: str) -> str:
    return '"' + "".join(f"\\u{ord(c):04x}" for c in text) + '"'


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda n: ascii(n)[:24])
async def test_a_hostile_name_reads_nothing(server: TestServer, name: str) -> None:
    api = server.api
    encoded = quote(name.encode(errors="surrogatepass"), safe="")
    for url in (
        f"/training_runs/{encoded}",
        f"/training_runs/{encoded}/checkpoints",
        f"/training_runs/x/checkpoints/weights/{encoded}/external_weights_urls",
        f"/samplers/{encoded}",
        f"/sessions/{encoded}",
    ):
        status, _ = await _raw_get(server, f"/api/v1{url}", api.headers)
        # An empty name makes the URL another one, perhaps that of a list.
        assert status in (404, 405) or name == "", url
    path = f'{{"tinker_path": {_json(f"tinker://{name}/weights/x")}}}'
    assert (await api.post("/weights_info", path.encode())).status_code in (400, 404)


@pytest.mark.parametrize("weights_id", ["..", ".", "%2e%2e", "..%2f..", "x", "a" * 32, "\x00" * 32])
@pytest.mark.parametrize(
    "name", ["tinsmith.db", "..%2ftinsmith.db", "../tinsmith.db", "/etc/passwd"]
)
async def test_a_signature_for_a_hostile_path_fetches_nothing(
    server: TestServer, weights_id: str, name: str
) -> None:
    """Even somebody who could have any path signed would get only files of weights."""
    expires = int(time.time()) + 60
    for path in (f"/files/{weights_id}/{name}", f"/archives/{weights_id}.tar"):
        signature = server.service.auth.sign_path(path, expires)
        query = f"expires={expires}&signature={signature}"
        status, body = await _raw_get(server, f"/api/v1{path}", {}, query)
        assert status == 404, body[:100]


async def _raw_get(
    server: TestServer, path: str, headers: dict[str, str], query: str = ""
) -> tuple[int, bytes]:
    """A request whose path nobody has tidied up on the way."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "app": server.app,
    }
    await server.app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body


async def saved(api: Api, tmp_path: Path) -> tuple[str, Path]:
    """The address of a checkpoint, and the folder that it is kept in."""
    model = await api.model()
    save = await api.ok("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    await api.result(save["request_id"])
    (folder,) = (tmp_path / "data" / "weights").iterdir()
    return f"/training_runs/{model}/checkpoints/weights/a", folder


async def test_a_link_in_the_data_folder_is_not_followed(
    server: TestServer, tmp_path: Path
) -> None:
    api = server.api
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("do not read this")
    url, folder = await saved(api, tmp_path)
    (folder / "link.txt").symlink_to(secret / "key.txt")
    (folder / "linked").symlink_to(secret)
    listed = (await api.get(f"{url}/external_weights_urls")).json()["urls"]
    assert listed and not [name for name in listed if "link" in name]
    expires = int(time.time()) + 60
    for name in ("link.txt", "linked/key.txt"):
        path = f"/files/{folder.name}/{name}"
        signature = server.service.auth.sign_path(path, expires)
        response = await api.http.get(f"/api/v1{path}?expires={expires}&signature={signature}")
        assert response.status_code == 404
    archive = (await api.get(f"{url}/archive")).json()["url"]
    with tarfile.open(fileobj=io.BytesIO((await api.http.get(archive)).content)) as tar:
        assert sorted(tar.getnames()) == sorted(listed)
        assert all(member.isreg() for member in tar)
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            assert content.read() == (folder / member.name).read_bytes()


async def test_deleting_a_folder_that_became_a_link_leaves_its_target(
    server: TestServer, tmp_path: Path
) -> None:
    api = server.api
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    url, folder = await saved(api, tmp_path)
    for file in folder.rglob("*"):
        file.unlink()
    folder.rmdir()
    folder.symlink_to(precious)
    assert (await api.get(f"{url}/external_weights_urls")).json()["urls"] == {}
    response = await api.http.delete(f"/api/v1{url}", headers=api.headers)
    assert response.status_code == 204
    assert (precious / "file").read_text() == "keep"


@given(st.text(max_size=300))
def test_a_checkpoints_name_is_one_plain_file_name(name: str) -> None:
    try:
        accepted = checkpoint_name(name, 1)
    except ValidationError:
        return
    assert accepted == name and accepted.isascii() and accepted.isprintable()
    assert os.path.basename(accepted) == accepted and accepted.strip(".")  # noqa: PTH119
    assert len(accepted) <= 200


@given(
    st.text(max_size=100)
    | st.lists(st.sampled_from(["tinker://", "/", "weights", "..", "a"])).map("".join)
)
def test_a_path_is_three_parts_or_refused(text: str) -> None:
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(text)
    except ValidationError:
        return
    assert f"tinker://{parsed.training_run_id}/{parsed.checkpoint_id}" == text
    assert "/" not in parsed.training_run_id and parsed.checkpoint_id.count("/") == 1


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["..", "/", ".", "a", "\x00", "\\", "C:", "~", "link"])).map("".join)
)
def test_a_downloaded_file_stays_in_its_folder(name: str) -> None:
    folder = Path("/nowhere/downloads")
    try:
        target = confined(folder, name)
    except ValidationError:
        return
    assert target.resolve().is_relative_to(folder) and target != folder


def test_a_downloaded_file_does_not_follow_a_link_out(tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ValidationError, match="leads out"):
        confined(folder, "link/escaped")
