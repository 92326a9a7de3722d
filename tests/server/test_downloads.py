"""Files and archives of weights: any range of one version, or everything, and never a mixture."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.in_process_server import Api, TestServer
from tinsmith.server.downloads import archive_content


async def save(api: Api, model: str, seq_id: int) -> dict[str, str]:
    """The addresses of a new checkpoint's archive and of one of its files."""
    body = {"model_id": model, "seq_id": seq_id, "path": "x", "overwrite": True}
    await api.result((await api.ok("/save_weights", body))["request_id"])
    checkpoint = f"/training_runs/{model}/checkpoints/weights/x"
    archive = (await api.get(f"{checkpoint}/archive")).json()["url"]
    files = (await api.get(f"{checkpoint}/external_weights_urls")).json()["urls"]
    largest = max(files, key=len)
    return {"archive": archive, "file": files[largest]}


async def fetch(api: Api, url: str, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await api.http.get(url, headers=names)


async def test_digests_of_one_owners_files_keep_no_thread_from_another(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take seconds each."""
    rude, kind = await server.other_user(), server.api
    urls = [(await save(rude, await rude.model(), 1))["file"] for _ in range(6)]
    mine = (await save(kind, await kind.model(), 1))["file"]
    begun, is_over, slow = threading.Semaphore(0), threading.Event(), set[int]()
    sha256 = hashlib.sha256

    def hashing(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("disk") and len(slow) < 2:
            slow.add(threading.get_ident())
            begun.release()
            assert is_over.wait(60)
        return sha256(*arguments, **options)

    monkeypatch.setattr(hashlib, "sha256", hashing)
    wanted = {"want_repr_digest": "sha-256=10"}
    fetching = [asyncio.create_task(fetch(rude, url, **wanted)) for url in urls]
    try:
        for _ in range(2):
            await server.until(lambda: begun.acquire(blocking=False))
        async with asyncio.timeout(20):
            answer = await fetch(kind, mine, **wanted)
    finally:
        is_over.set()
        answers = await asyncio.gather(*fetching)
    assert answer.status_code == 200 and "repr-digest" in answer.headers
    assert all(each.status_code == 200 for each in answers)


@pytest.mark.parametrize("kind", ["archive", "file"])
async def test_every_range_is_a_part_of_the_whole(api: Api, kind: str) -> None:
    url = (await save(api, await api.model(), 1))[kind]
    whole = await fetch(api, url, want_repr_digest="sha-256=10")
    content, etag = whole.content, whole.headers["etag"]
    assert whole.status_code == 200 and etag.startswith('"')
    assert whole.headers["content-length"] == str(len(content))
    digest = b64encode(hashlib.sha256(content).digest()).decode()
    assert whole.headers["repr-digest"] == f"sha-256=:{digest}:"
    for start in {0, 1, 511, 512, 513, len(content) // 2, len(content) - 1}:
        if start < len(content):
            rest = await fetch(api, url, range=f"bytes={start}-", if_range=etag)
            assert rest.status_code == 206 and rest.content == content[start:], start
            assert rest.headers["etag"] == etag
            place = f"bytes {start}-{len(content) - 1}/{len(content)}"
            assert rest.headers["content-range"] == place
    some = await fetch(api, url, range="bytes=3-9")
    assert some.content == content[3:10]
    beyond = await fetch(api, url, range=f"bytes={len(content)}-")
    assert beyond.status_code == 416
    assert beyond.headers["content-range"] == f"bytes */{len(content)}"
    same = await fetch(api, url, if_none_match=etag)
    assert (same.status_code, same.content) == (304, b"")


@pytest.mark.parametrize("kind", ["archive", "file"])
@pytest.mark.parametrize("range_", ["bytes=1-", "bytes=1-2,4-5", "bytes=-5", "lines=1-", "bytes=x"])
async def test_a_range_of_another_version_or_that_is_not_understood_gives_everything(
    api: Api, kind: str, range_: str
) -> None:
    model = await api.model()
    old = await fetch(api, (await save(api, model, 1))[kind])
    url = (await save(api, model, 2))[kind]
    new = await fetch(api, url)
    assert new.headers["etag"] != old.headers["etag"]
    again = await fetch(api, url, range=range_, if_range=old.headers["etag"])
    assert (again.status_code, again.content) == (200, new.content)


def test_an_archive_of_files_with_other_times_is_another_version(tmp_path: Path) -> None:
    """As after a folder was put back from a backup: the rest of one is no rest of the other."""
    (tmp_path / "a").write_bytes(b"weights")
    contents = []
    for seconds in (1_000_000, 1_000_000, 2_000_000):
        os.utime(tmp_path / "a", (seconds, seconds))
        contents.append(archive_content("w", tmp_path, ["a"]))
    first, same, other = contents
    assert first.parts == same.parts and first.version == same.version
    assert first.parts != other.parts and first.version != other.version


async def test_an_archive_is_a_tar_of_the_files(api: Api) -> None:
    content = (await fetch(api, (await save(api, await api.model(), 1))["archive"])).content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names: list[Any] = tar.getnames()
    assert "adapter_config.json" in names
