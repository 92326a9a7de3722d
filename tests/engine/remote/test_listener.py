"""Who is let in where engines connect, and who is not."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.remote_engines import engine_process
from tinsmith import __version__
from tinsmith.engine.local.boundary import frames
from tinsmith.engine.local.boundary.messages import Hello, Trouble
from tinsmith.engine.remote.authority import Authority
from tinsmith.engine.remote.credentials import SERVER_NAME, Credentials, engine_name, secured
from tinsmith.engine.remote.listener import EngineListener
from tinsmith.engine.remote.tls_stream import TlsStream
from tinsmith.errors import EngineError, ValidationError


@pytest_asyncio.fixture
async def listener(tmp_path: Path) -> AsyncIterator[EngineListener]:
    listener = EngineListener("127.0.0.1", 0, tmp_path / "engines")
    await listener.open()
    yield listener
    await listener.close()


def hello(slot: int = 0, epoch: int = 1, version: str = __version__) -> Hello:
    return Hello(slot, epoch, version, "somewhere", 1)


def greet(address: str, context: ssl.SSLContext, first: Any) -> Any:
    """The listener's answer to a first message; blocks."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as plain:
        stream = TlsStream(context.wrap_socket(plain, server_hostname=SERVER_NAME))
        try:
            frames.write(stream, frames.encode(first))
            return next(frames.read(stream), None)
        finally:
            stream.close()


async def answer(credentials: Credentials, first: Any) -> str:
    replies = await asyncio.to_thread(greet, credentials.address, credentials.context(), first)
    (trouble,) = replies
    assert isinstance(trouble, Trouble)
    return trouble.text


async def test_the_engine_that_is_expected_is_let_in(listener: EngineListener) -> None:
    with listener.expecting(0) as expected:
        credentials = Credentials.load(expected.credentials)
        greeting = asyncio.create_task(
            asyncio.to_thread(greet, credentials.address, credentials.context(), hello())
        )
        async with asyncio.timeout(30):
            arrival = await expected.arrival
        assert arrival.hello == hello()
        arrival.channel.close()
        assert await greeting is None


async def test_an_engine_of_a_lower_epoch_is_refused(listener: EngineListener) -> None:
    with listener.expecting(0) as expected:
        zombie = Credentials.load(expected.credentials)
    with listener.expecting(0) as expected:
        assert expected.epoch == 2
        assert "slot 0 is at epoch 2, and this engine is of 1" in await answer(zombie, hello())
        assert not expected.arrival.done()


async def test_nobody_comes_twice(listener: EngineListener) -> None:
    with listener.expecting(3) as expected:
        credentials = Credentials.load(expected.credentials)
    assert "slot 3 has its engine" in await answer(credentials, hello(slot=3))


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (hello(slot=1), "its certificate is for slot 0 epoch 1, not slot 1 epoch 1"),
        (hello(epoch=2), "its certificate is for slot 0 epoch 1, not slot 0 epoch 2"),
        (hello(version="0.0.7"), "it is tinsmith 0.0.7, and the server"),
        ("good evening", "its first message was a str"),
    ],
)
async def test_who_is_not_what_he_says_is_refused(
    listener: EngineListener, first: Any, problem: str
) -> None:
    with listener.expecting(1), listener.expecting(0) as expected:
        assert problem in await answer(Credentials.load(expected.credentials), first)
        assert not expected.arrival.done()


def foreign_context(credentials: Credentials, case: str) -> ssl.SSLContext:
    """What somebody else may come with: he knows the server's certificate, as everybody does."""
    name = engine_name(credentials.slot, credentials.epoch)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if case == "no certificate":
        context.load_verify_locations(cadata=credentials.authority)
        return context
    stranger = Authority()
    assert case == "another authority's certificate"
    return secured(context, credentials.authority, *stranger.issue(name))


@pytest.mark.parametrize("case", ["no certificate", "another authority's certificate"])
async def test_an_unknown_certificate_is_refused_before_a_byte_is_read(
    listener: EngineListener, case: str
) -> None:
    with listener.expecting(0) as expected:
        credentials = Credentials.load(expected.credentials)
        context = foreign_context(credentials, case)
        # How far the client is in TLS 1.3 when it learns of it is a matter of luck.
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert await asyncio.to_thread(greet, credentials.address, context, hello()) is None
        assert not expected.arrival.done()


async def test_an_engine_of_a_server_that_was_started_again_says_so(
    listener: EngineListener, tmp_path: Path
) -> None:
    with listener.expecting(0) as expected:
        now = Credentials.load(expected.credentials)
        old = Authority().credentials(now.address, 0, 1)
        old.save(tmp_path / "old.json")
        process = engine_process(tmp_path / "old.json")
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 1
        assert "has been started again since" in errors
        assert not expected.arrival.done()


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """In memory, until both are through or one objects."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
    ]
    for _ in range(10):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def client_context(authority: Authority, certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return secured(context, authority.pem, certificate, key)


def test_a_certificate_that_has_run_out_is_refused() -> None:
    authority = Authority()
    good = client_context(authority, *authority.issue("slot 0 epoch 1"))
    handshake(authority.context(), good)
    old = authority.issue("slot 0 epoch 1", life=dt.timedelta(minutes=-1))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(authority.context(), client_context(authority, *old))


def test_an_engines_certificate_makes_nobody_a_server() -> None:
    authority = Authority()
    pretender = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured(pretender, authority.pem, *authority.issue(SERVER_NAME))
    engine = client_context(authority, *authority.issue("slot 0 epoch 1"))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(pretender, engine)


async def test_noise_disturbs_nobody(listener: EngineListener) -> None:
    host, _, port = listener.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(30):
            await reader.read()
    writer.close()
    with listener.expecting(0) as expected:
        assert "it is tinsmith 1" in await answer(
            Credentials.load(expected.credentials), hello(version="1")
        )


async def test_an_engine_tells_its_user_why_it_was_refused(
    listener: EngineListener, tmp_path: Path
) -> None:
    with listener.expecting(0) as expected:
        Credentials.load(expected.credentials).save(tmp_path / "old.json")
    process = engine_process(tmp_path / "old.json")
    _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 1
    assert "the server refuses this engine: slot 0 has its engine" in errors


async def test_two_listeners_cannot_have_one_port(listener: EngineListener, tmp_path: Path) -> None:
    port = int(listener.address.rpartition(":")[2])
    with pytest.raises(EngineError, match=f"cannot wait for engines on 127.0.0.1:{port}"):
        await EngineListener("127.0.0.1", port, tmp_path / "other").open()


def test_a_file_without_credentials_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "slot-0.json"
    with pytest.raises(ValidationError, match="cannot read the credentials"):
        Credentials.load(file)
    file.write_text('{"slot": "x"}')
    with pytest.raises(ValidationError, match="holds no credentials of an engine"):
        Credentials.load(file)
