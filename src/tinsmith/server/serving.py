"""Running the application: the data folder and its store, the first key, the HTTP server."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn

from tinsmith.engine.base import Capabilities
from tinsmith.engine.cluster import Cluster
from tinsmith.errors import TinkerError
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.answer_headers import FIXED_HEADERS
from tinsmith.server.edge.app import build_app
from tinsmith.server.edge.auth import create_key
from tinsmith.server.edge.connections import Connection
from tinsmith.server.engines.slot import EngineFactory
from tinsmith.server.garbage import collected_rarely
from tinsmith.server.metrics import Metrics
from tinsmith.server.service import Service
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.losses import LossBounds
from tinsmith.server.store.store import Store
from tinsmith.server.tracing import exporting_spans
from tinsmith.wire.endpoints import CONSOLE_LOGIN_LINK

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 35
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FIRST_OWNER = "owner"

_SILENT_SECONDS = 60
"""How long a client may leave what was sent to it unread before its connection is closed."""

Announce = Callable[[str, str | None, str | None], None]
"""Hears the server's URL, at the first start the key that was made, and a link that lets one
browser into the console."""

ReportModels = Callable[[Capabilities], None]
"""Hears which models are served and which are refused, when the engine knows and it is news."""


async def serve(
    config: ServerConfig,
    engine_factory: EngineFactory,
    announce: Announce,
    report_models: ReportModels,
    cluster: Cluster | None = None,
) -> None:
    """Serve until told to stop (SIGTERM, SIGINT)."""
    # What is written is for this user alone, whoever creates it: us, the database, the engine.
    os.umask(0o077)
    _raise_file_limit()
    with DataFolder(config.data_dir).locked():
        metrics = Metrics()
        store = await claim_store(config, metrics)
        secret = await store.keys.secret("signing")
        key = None
        if config.auth and not await store.keys.list():
            key, _ = await create_key(store, FIRST_OWNER, "first key", "made at the first start")
        spans = exporting_spans(config.trace_endpoint)
        service = Service(config, store, secret, engine_factory, metrics, spans, cluster)
        _report_changes(service, report_models)
        listener = _listen(config)
        url = config.public_url or _url(config, listener)
        service.url = url
        settings = uvicorn.Config(
            build_app(service),
            http=cast(
                "type[Connection]",
                partial(Connection, sockets=service.sockets, head_seconds=config.head_seconds),
            ),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            # Nothing here asks who called from where, so nobody's word for it is taken.
            proxy_headers=False,
            server_header=False,
            headers=list(FIXED_HEADERS.items()),
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            # As many as the system allows: who does not fit waits for seconds before trying again.
            backlog=65_535,
        )
        link = await console_link(service)
        server = _Server(settings, service, lambda: announce(url, key, link))
        with _quiet_signals(server):
            async with collected_rarely():
                await server.serve(sockets=[listener])


async def console_link(service: Service) -> str | None:
    """A link that works once, for the oldest key that is good; None when there is none. Without
    authentication the console is open to whoever reaches the server."""
    if not service.config.auth:
        return f"{service.url}/"
    good = [key for key in await service.store.keys.list() if key.is_good(time.time())]
    if not good:
        return None
    token = service.browsers.new_link(good[0].key_id)
    return f"{service.url}{CONSOLE_LOGIN_LINK.full_path}?token={token}"


async def claim_store(config: ServerConfig, metrics: Metrics | None = None) -> Store:
    """The store of a data folder, for the one server that works on them.

    Others are kept out, and a database that does not belong to the folder is refused.
    """
    store = open_store(config, metrics)
    folder = DataFolder(config.data_dir)
    try:
        await store.keep_others_out()
        await folder.check(store)
        await folder.bind(store)
    except BaseException:
        await store.close()
        raise
    return store


def open_store(config: ServerConfig, metrics: Metrics | None = None) -> Store:
    """The store of a data folder."""
    folder = DataFolder(config.data_dir)
    folder.create()
    url = config.database_url or sqlite_url(folder.database)

    def on_commit(seconds: float, num_writes: int) -> None:
        if metrics is not None:
            metrics.observe("store_commit_seconds", seconds)
            metrics.observe("store_commit_writes", num_writes)

    return Store(
        url,
        folder.blobs,
        on_commit,
        max_owner_bytes=config.key_max_stored_bytes,
        max_example_bytes=config.key_max_example_bytes,
        loss_bounds=LossBounds(config.key_max_losses, config.key_max_loss_bytes),
    )


def _report_changes(service: Service, report: ReportModels) -> None:
    told: Capabilities | None = None

    def tell() -> None:
        nonlocal told
        if service.engines.capabilities is not None and service.engines.capabilities != told:
            told = service.engines.capabilities
            report(told)

    service.engines.on_start(tell)


class _Server(uvicorn.Server):
    """Says when it is up, and lets go of held questions as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, service: Service, on_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._on_up = on_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_up()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.begin_drain()
        await super().shutdown(sockets)


@contextmanager
def _quiet_signals(server: uvicorn.Server) -> Iterator[None]:
    """Exit with 0 when asked to stop: uvicorn repeats the signal at the end."""

    def handler(number: int, frame: object) -> None:
        if not server.should_exit:
            raise SystemExit(0)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _raise_file_limit() -> None:
    """As many open files as the system lets us have: every held question is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit these. A client that is gone, or that reads nothing any more, is let go
    # by the system; otherwise its answer, and what the answer holds, would stay for ever.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise TinkerError(f"cannot listen on {config.host}:{config.port}: {error}") from None
    return listener


def _url(config: ServerConfig, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{port}"
