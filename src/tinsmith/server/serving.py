"""Running the application: the data folder and its store, the first key, the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.types import ASGIApp

from tinsmith.engine.base import Capabilities
from tinsmith.engine.cluster import Cluster
from tinsmith.errors import TinkerError
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.answer_headers import FIXED_HEADERS
from tinsmith.server.edge.app import build_app
from tinsmith.server.edge.auth import create_key
from tinsmith.server.edge.connections import Connection
from tinsmith.server.edge.sockets import Sockets
from tinsmith.server.engines.slot import EngineFactory
from tinsmith.server.garbage import collected_rarely
from tinsmith.server.metrics import Metrics
from tinsmith.server.replicas.lease import Lease
from tinsmith.server.replicas.replica import Replica, ReplicaConfig
from tinsmith.server.service import Service
from tinsmith.server.storage import binding
from tinsmith.server.storage.opening import open_blobs, open_storage
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.errors import ForeignStoreError, LeaseLostError
from tinsmith.server.store.fence import Fence
from tinsmith.server.store.leases import Leases
from tinsmith.server.store.losses import LossBounds
from tinsmith.server.store.store import Store
from tinsmith.server.thread_turns import short_waits
from tinsmith.server.tracing import exporting_spans
from tinsmith.server.tuning import TUNING, Tuning
from tinsmith.wire.endpoints import CONSOLE_LOGIN_LINK

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 35
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FIRST_OWNER = "owner"

_SILENT_SECONDS = 60
"""How long a client may leave what was sent to it unread before its connection is closed."""

Announce = Callable[[str, str | None, str | None], None]
"""Called with the server's URL, the key that was made at the first start, and a link that signs a
browser in to the console."""

NewEngines = Callable[[], tuple[EngineFactory, Cluster | None]]
"""What starts engines, and the cluster that they run in, if any; called once for each service."""

ReportModels = Callable[[Capabilities], None]
"""Called with the models that are served and those that are refused, once the engine knows, and
when they change."""


def run(
    config: ServerConfig, new_engines: NewEngines, announce: Announce, report_models: ReportModels
) -> None:
    """Serve until told to stop (SIGTERM, SIGINT)."""
    # All files are for this user alone, whether we, the database or the engine create them.
    os.umask(0o077)
    _raise_file_limit()
    with DataFolder(config.data_dir).locked(is_shared=config.shares_store):
        if not config.shares_store:
            uvloop.run(serve_alone(config, new_engines, announce, report_models))
            return
        with _listen(config) as listener:
            while True:
                try:
                    serving = _Replica(config, new_engines, listener, announce, report_models)
                    uvloop.run(serving.serve())
                    return
                except LeaseLostError:
                    # As after a restart: everything is read anew. Who connects meanwhile waits.
                    announce = _nobody_listens


async def serve_alone(
    config: ServerConfig,
    new_engines: NewEngines,
    announce: Announce,
    report_models: ReportModels,
    tuning: Tuning = TUNING,
) -> None:
    metrics = Metrics()
    store = await claim_store(config, metrics)
    key = await _first_key(config, store)
    service = await _new_service(config, store, new_engines, metrics, tuning=tuning)
    _report_changes(service, report_models)
    listener = _listen(config)
    service.url = config.public_url or _url(config, listener)
    link = await console_link(service)
    settings = _http_settings(config, build_app(service), service.sockets)
    server = _Server(settings, service.begin_drain, lambda: announce(service.url, key, link))
    await _run_until_told(server, listener)


class _Replica:
    """A server that others may stand in for: its life until it stops or has lost the lease."""

    def __init__(
        self,
        config: ServerConfig,
        new_engines: NewEngines,
        listener: socket.socket,
        announce: Announce,
        report_models: ReportModels,
    ) -> None:
        assert config.database_url is not None
        self._config = config
        self._new_engines = new_engines
        self._listener = listener
        self._announce = announce
        self._report_models = report_models
        self._metrics = Metrics()
        self._sockets = Sockets(config.max_connections)
        self._holder = uuid.uuid4().hex
        self._address = (config.advertise or _url(config, listener)).rstrip("/")
        self._url = config.public_url or _url(config, listener)
        self._key: str | None = None
        self._is_announced = False
        """Afterwards no key is made: nobody would be told."""
        self._leases = Leases(
            config.database_url, self._holder, _place(listener), self._address, config.lease_seconds
        )

    async def serve(self) -> None:
        replica = Replica(
            lambda on_change: Lease(self._leases, self._config.lease_seconds, on_change),
            self._lead,
            self._metrics,
            ReplicaConfig(patience_seconds=self._config.hold_seconds),
            lambda: server.leave(),
        )
        server = _Server(
            _http_settings(self._config, replica, self._sockets),
            replica.begin_drain,
            lambda: self._announce(self._url, self._key, link),
        )
        await replica.start()
        try:
            if replica.service is None:
                await self._check_folder(replica.store_id)
            link = None if replica.service is None else await console_link(replica.service)
        except BaseException:
            await replica.stop()
            raise
        self._is_announced = True
        await _run_until_told(server, self._listener.dup())
        if replica.is_lost:
            raise LeaseLostError("another server has taken over")

    async def _lead(self, epoch: int) -> tuple[Service, Starlette]:
        """Begin where the last holder ended, as after a restart."""
        fence = Fence(holder=self._holder, epoch=epoch, seconds=self._config.lease_seconds)
        store = await claim_store(self._config, self._metrics, fence)
        if not self._is_announced:
            self._key = await _first_key(self._config, store)
        service = await _new_service(
            self._config,
            store,
            self._new_engines,
            self._metrics,
            epoch=epoch,
            sockets=self._sockets,
        )
        service.url = self._url
        _report_changes(service, self._report_models)
        try:
            await service.start()
        except BaseException:
            await service.abandon()
            raise
        return service, build_app(service)

    async def _check_folder(self, store_id: str | None) -> None:
        """A server that follows finds out now, and not when it is needed, that it has a folder
        which is not the others'. The first of them may be about to bind it."""
        storage = open_storage(self._config)
        for pause in (0.2, 0.5, 1.0, 2.0, None):
            try:
                await binding.check_belongs(storage, store_id)
                return
            except ForeignStoreError:
                if pause is None:
                    raise
                await asyncio.sleep(pause)


def _nobody_listens(url: str, key: str | None, link: str | None) -> None:
    pass


async def _first_key(config: ServerConfig, store: Store) -> str | None:
    if not config.auth or await store.keys.list():
        return None
    key, _ = await create_key(store, FIRST_OWNER, "first key", "made at the first start")
    return key


async def _new_service(
    config: ServerConfig,
    store: Store,
    new_engines: NewEngines,
    metrics: Metrics,
    *,
    epoch: int | None = None,
    sockets: Sockets | None = None,
    tuning: Tuning = TUNING,
) -> Service:
    engine_factory, cluster = new_engines()
    return Service(
        config,
        store,
        await store.keys.secret("signing"),
        engine_factory,
        metrics,
        exporting_spans(config.trace_endpoint),
        cluster,
        epoch=epoch,
        sockets=sockets,
        tuning=tuning,
    )


def _http_settings(config: ServerConfig, app: ASGIApp, sockets: Sockets) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(
            "type[Connection]",
            partial(Connection, sockets=sockets, head_seconds=config.head_seconds),
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # Clients' addresses are not used, so headers that state them are not read.
        proxy_headers=False,
        server_header=False,
        headers=list(FIXED_HEADERS.items()),
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        # As many as the system allows: a client that does not fit retries only after seconds.
        backlog=65_535,
    )


async def _run_until_told(server: _Server, listener: socket.socket) -> None:
    with _quiet_signals(server), short_waits():
        async with collected_rarely():
            await server.serve(sockets=[listener])


def _place(listener: socket.socket) -> str:
    """A name for where we listen that no other server has: the machine since it was started, the
    part of its network that is seen from here, the port. Random where the system does not tell."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return uuid.uuid4().hex
    return f"{machine} {network} {listener.getsockname()}"


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


async def claim_store(
    config: ServerConfig, metrics: Metrics | None = None, fence: Fence | None = None
) -> Store:
    """The store of a data folder, for the one server that works on them.

    Others are kept out, by the lease if there is one. A database that does not belong to the
    storage is refused.
    """
    store = await asyncio.to_thread(open_store, config, metrics, fence)
    storage = open_storage(config)
    try:
        if fence is None:
            await store.keep_others_out()
        await binding.check(storage, store)
        await binding.bind(storage, store)
    except BaseException:
        await store.close()
        raise
    return store


def open_store(
    config: ServerConfig, metrics: Metrics | None = None, fence: Fence | None = None
) -> Store:
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
        open_blobs(config),
        on_commit,
        max_owner_bytes=config.key_max_stored_bytes,
        max_example_bytes=config.key_max_example_bytes,
        loss_bounds=LossBounds(config.key_max_losses, config.key_max_loss_bytes),
        fence=fence,
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
    """Says when it is up, and answers held polls as soon as it is told to stop."""

    def __init__(
        self, config: uvicorn.Config, begin_drain: Callable[[], None], on_up: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._begin_drain = begin_drain
        self._on_up = on_up

    def leave(self) -> None:
        """Stop at once; what is under way is of no use to anybody."""
        self.config.timeout_graceful_shutdown = 1
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_up()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._begin_drain()
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
    """As many open files as the system lets us have: every held poll is one."""
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
