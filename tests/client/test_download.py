"""Downloads: streamed, continued, checked, and confined to their folder."""

from __future__ import annotations

import hashlib
import io
import tarfile
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import rest_client
from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.downloads.archive import confined
from tinsmith.client.downloads.download import unfinished
from tinsmith.client.downloads.file import Progress, stated_sha256
from tinsmith.client.rest import RestClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import APIStatusError, TinkerError, ValidationError

PATH = "tinker://r/external_weights/x"
URLS = "/api/v1/training_runs/r/checkpoints/external_weights/x/external_weights_urls"
CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def rest(stub: Any, service: ServiceClient) -> RestClient:
    files = {"model.safetensors": f"{stub.url}/files/model", "a/config.json": f"{stub.url}/files/c"}
    stub.on(URLS, Answer(200, {"urls": files, "expires": "2030-01-01T00:00:00Z"}))
    stub.on("/files/c", Answer(200, {"rank": 8}))
    stub.on("/files/model", serve)
    return rest_client(service)


def begun(folder: Path, part: bytes, version: str | None = '"1"') -> None:
    """What an earlier process has left of the same download."""
    beside = unfinished(folder, PATH)
    beside.mkdir()
    (beside / "model.safetensors.part").write_bytes(part)
    if version is not None:
        (beside / "model.safetensors.version").write_text(version)


def serve(request: Recorded, content: bytes = CONTENT, etag: str = '"1"') -> Answer:
    start = int(request.headers.get("range", "bytes=0-")[6:].rstrip("-"))
    if request.headers.get("if-none-match") == etag:
        return Answer(304, b"", {"etag": etag})
    if not start or request.headers.get("if-range", etag) != etag:
        return Answer(200, content, {"etag": etag})
    place = f"bytes {start}-{len(content) - 1}/{len(content)}"
    return Answer(206, content[start:], {"etag": etag, "content-range": place})


def test_files_arrive_where_they_belong(stub: Any, rest: RestClient, tmp_path: Path) -> None:
    seen: list[Progress] = []
    paths = rest.download_checkpoint(PATH, tmp_path, seen.append).result(10)
    assert paths == [tmp_path / "model.safetensors", tmp_path / "a" / "config.json"]
    assert paths[0].read_bytes() == CONTENT
    assert seen[-1].done == seen[-1].total and {p.file for p in seen} == {
        "model.safetensors",
        "a/config.json",
    }
    assert all("x-api-key" not in r.headers for r in stub.requests if "/files/" in r.path)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_broken_download_is_continued(stub: Any, rest: RestClient, tmp_path: Path) -> None:
    half = Answer(200, CONTENT[:500_000], {"etag": '"1"'}, fault="truncate")
    stub.on("/files/model", half, serve)
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT
    _, second = stub.seen("/files/model")
    assert second.headers["range"] == "bytes=500000-"
    assert second.headers["if-range"] == '"1"', "servers give the rest of that version only"


def test_a_part_of_an_earlier_process_is_continued(
    stub: Any, rest: RestClient, tmp_path: Path
) -> None:
    begun(tmp_path, CONTENT[:1000])
    stub.on("/files/c", Answer(403), Answer(200, {"rank": 8}))
    with pytest.raises(APIStatusError):
        rest.download_checkpoint(PATH, tmp_path).result(10)
    assert not list(tmp_path.iterdir()), "nothing appears before everything is there"
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT
    assert stub.seen("/files/model")[0].headers["range"] == "bytes=1000-"
    assert stub.seen("/files/model")[1].headers["if-none-match"] == '"1"', "not fetched again"
    with pytest.raises(ValidationError, match="already"):
        rest.download_checkpoint(PATH, tmp_path).result(10)


def test_what_is_left_of_another_checkpoint_is_not_continued(
    stub: Any, rest: RestClient, tmp_path: Path
) -> None:
    other = unfinished(tmp_path, "tinker://r/external_weights/y")
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"the other's weights")
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT


def test_a_server_that_cannot_continue_starts_again(
    stub: Any, rest: RestClient, tmp_path: Path
) -> None:
    begun(tmp_path, b"something else")
    stub.on("/files/model", Answer(416), Answer(200, CONTENT))
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT


@pytest.mark.parametrize("version", ['"0"', 'W/"1"', None])
def test_a_part_of_another_version_is_not_continued(
    stub: Any, rest: RestClient, tmp_path: Path, version: str | None
) -> None:
    """A checkpoint that was overwritten has the same path; so has a part of unknown origin."""
    begun(tmp_path, b"of the checkpoint that was here before", version)
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT


def test_whole_files_of_another_version_are_fetched_anew(
    stub: Any, rest: RestClient, tmp_path: Path
) -> None:
    begun(tmp_path, b"")
    whole = unfinished(tmp_path, PATH) / "model.safetensors"
    whole.write_bytes(b"of the checkpoint that was here before")
    stub.on("/files/model", lambda request: serve(request, etag='"2"'))
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT


def test_files_that_only_another_version_had_do_not_appear(
    stub: Any, rest: RestClient, tmp_path: Path
) -> None:
    """As when a checkpoint was deleted and saved again under its name, encrypted."""
    begun(tmp_path, b"")
    beside = unfinished(tmp_path, PATH)
    (beside / "b").mkdir()
    for name in ("optimizer.safetensors", "b/config.json", "optimizer.part", "b/config.version"):
        (beside / name).write_bytes(b"of the checkpoint that was here before")
    rest.download_checkpoint(PATH, tmp_path).result(10)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert found == {"model.safetensors", "a", "a/config.json"}


def test_a_file_without_a_strong_etag_is_fetched_from_the_start(
    stub: Any, rest: RestClient, tmp_path: Path
) -> None:
    half = Answer(200, CONTENT[:500_000], {"etag": 'W/"1"'}, fault="truncate")
    stub.on("/files/model", half, serve)
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT
    assert "range" not in stub.seen("/files/model")[1].headers


def test_a_checkpoint_that_changes_when_its_addresses_are_renewed_is_fetched_anew(
    stub: Any, rest: RestClient, tmp_path: Path
) -> None:
    """The addresses expire between the two files, and the next ones are of other weights."""

    def urls(place: str, expires: str) -> Answer:
        names = {"a": f"{stub.url}/{place}/a", "b": f"{stub.url}/{place}/b"}
        return Answer(200, {"urls": names, "expires": expires})

    for place in ("old", "new"):
        for name in ("a", "b"):
            stub.on(f"/{place}/{name}", Answer(200, place.encode(), {"etag": f'"{place}{name}"'}))
    soon = datetime.now(UTC) + timedelta(minutes=5, seconds=1)
    stub.on("/old/a", Answer(200, b"old", {"etag": '"olda"'}, delay=1.2))
    stub.on(URLS, urls("old", soon.isoformat()), urls("new", "2030-01-01T00:00:00Z"))
    rest.download_checkpoint(PATH, tmp_path / "x").result(10)
    assert {path.read_text() for path in (tmp_path / "x").iterdir()} == {"new"}


def test_a_damaged_file_is_not_kept(stub: Any, rest: RestClient, tmp_path: Path) -> None:
    good = {"x-checksum-sha256": hashlib.sha256(CONTENT).hexdigest()}
    stub.on("/files/model", Answer(200, b"damaged", good))
    with pytest.raises(TinkerError, match="damaged in transit"):
        rest.download_checkpoint(PATH, tmp_path).result(10)
    assert not list(tmp_path.iterdir())
    stub.on("/files/model", Answer(200, CONTENT, good))
    rest.download_checkpoint(PATH, tmp_path).result(10)


def test_a_refusal_is_not_repeated(stub: Any, rest: RestClient, tmp_path: Path) -> None:
    stub.on("/files/model", Answer(403, b"expired"))
    with pytest.raises(APIStatusError, match="expired"):
        rest.download_checkpoint(PATH, tmp_path).result(10)
    assert stub.count("/files/model") == 1


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "", "a/..", "C:/x", "link/x", "x" * 256]
)
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(ValidationError, match=r"leads out|too long"):
        confined(folder, name)
    assert confined(folder, "a/b.json") == folder / "a" / "b.json"


@pytest.mark.parametrize(("start", "etag"), [(500, '"1"'), (1000, '"2"')])
def test_a_part_that_does_not_fit_is_not_continued(
    stub: Any, rest: RestClient, tmp_path: Path, start: int, etag: str
) -> None:
    """A server that answers with another range or version than the one that was asked for would
    damage the file."""
    begun(tmp_path, CONTENT[:1000])
    end = f"{len(CONTENT) - 1}/{len(CONTENT)}"
    other = {"content-range": f"bytes {start}-{end}", "etag": etag}
    stub.on("/files/model", Answer(206, bytes(len(CONTENT) - start), other), Answer(200, CONTENT))
    rest.download_checkpoint(PATH, tmp_path).result(10)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT
    assert "range" not in stub.seen("/files/model")[1].headers


@pytest.mark.parametrize(
    ("headers", "is_stated"),
    [
        ({"x-checksum-sha256": hashlib.sha256(CONTENT).hexdigest().upper()}, True),
        ({"x-amz-checksum-sha256": b64encode(hashlib.sha256(CONTENT).digest()).decode()}, True),
        (
            {
                "repr-digest": "sha-512=:AA==:, sha-256="
                f":{b64encode(hashlib.sha256(CONTENT).digest()).decode()}:"
            },
            True,
        ),
        ({"x-amz-checksum-sha256": "checksum-of-parts-3"}, False),
        ({}, False),
    ],
)
def test_checksums_are_understood_as_servers_state_them(
    headers: dict[str, str], is_stated: bool
) -> None:
    expected = hashlib.sha256(CONTENT).hexdigest() if is_stated else None
    assert stated_sha256(headers) == expected


ARCHIVE = "/api/v1/training_runs/r/checkpoints/weights/x/archive"


def test_other_checkpoints_come_as_an_archive(stub: Any, rest: RestClient, tmp_path: Path) -> None:
    """Broken off in the middle, continued, unpacked when whole; nothing else is left."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in (("adapter_config.json", b"{}"), ("optimizer/a.bin", CONTENT)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    body = packed.getvalue()
    url = f"{stub.url}/tar"
    stub.on(ARCHIVE, Answer(200, {"url": url, "expires": "2030-01-01T00:00:00Z"}))
    stub.on(
        "/tar",
        Answer(200, body[:700_000], {"etag": '"1"'}, fault="truncate"),
        lambda request: serve(request, body),
    )
    seen: list[Progress] = []
    folder = tmp_path / "run" / "x"
    files = rest.download_checkpoint("tinker://r/weights/x", folder, seen.append).result(10)
    assert files == [folder / "adapter_config.json", folder / "optimizer" / "a.bin"]
    assert files[1].read_bytes() == CONTENT
    assert [path.name for path in folder.parent.iterdir()] == ["x"]
    assert seen[-1].done == len(body)
    with pytest.raises(ValidationError, match="already"):
        rest.download_checkpoint("tinker://r/weights/x", folder).result(10)
    assert stub.count("/tar") == 2, "a folder that is in the way is noticed before anything is sent"


@pytest.mark.parametrize(
    ("error", "is_kept"), [(OSError("disk full"), True), (ValidationError("bad"), False)]
)
def test_an_archive_is_kept_only_if_it_may_still_be_of_use(
    stub: Any,
    rest: RestClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    is_kept: bool,
) -> None:
    def fail(tar: Path, folder: Path) -> None:
        raise error

    monkeypatch.setattr("tinsmith.client.downloads.download.extract", fail)
    stub.on(ARCHIVE, Answer(200, {"url": f"{stub.url}/tar", "expires": "2030-01-01T00:00:00Z"}))
    stub.on("/tar", Answer(200, b"archive"))
    with pytest.raises(type(error)):
        rest.download_checkpoint("tinker://r/weights/x", tmp_path / "x").result(10)
    tar = unfinished(tmp_path / "x", "tinker://r/weights/x")
    assert list(tmp_path.iterdir()) == ([tar] if is_kept else [])
