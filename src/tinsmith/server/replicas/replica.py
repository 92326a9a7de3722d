"""One of several servers. It waits for the lease; with it, it runs the service; without, it passes
requests on to the server that does.

Health and metrics are answered by each server for itself. A request that finds no holder waits here
while the lease moves. A server that lost the lease ends its service: `on_lost` has it begin anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinsmith.server.edge.answer_headers import with_defaults
from tinsmith.server.edge.auth import credential_in, hash_key
from tinsmith.server.edge.connections import CONNECTION
from tinsmith.server.edge.http import WAIT, answer, detail_body, with_pause
from tinsmith.server.metrics import Metrics
from tinsmith.server.replicas.body import Body, ClientGoneError, Memory
from tinsmith.server.replicas.forwarding import (
    HOP,
    NOT_HERE,
    Answered,
    Forwarding,
    saying_whose,
)
from tinsmith.server.replicas.lease import Holder, Lease
from tinsmith.server.service import Service
from tinsmith.types import HealthResponse
from tinsmith.wire import endpoints

logger = logging.getLogger(__name__)

_HELD_SECONDS = 1.0

Lead = Callable[[int], Awaitable[tuple[Service, Starlette]]]
"""Starts the service under an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    patience_seconds: float
    """How long a request waits for a holder of the lease, at most."""

    again_seconds: float = 0.1
    """How often a server looks, for all requests that wait together, whether somebody answers."""

    max_known: int = 10_000
    """Credentials whose owners are known, those used last."""

    kept_bytes: int = 256 * 1024 * 1024
    """Memory for bodies of requests that wait for their answer..."""

    max_body_bytes: int = 16 * 1024 * 1024
    """...of which a larger one is not sent again."""


class Replica:
    def __init__(
        self,
        lease: Callable[[Callable[[], None]], Lease],
        lead: Lead,
        metrics: Metrics,
        config: ReplicaConfig,
        on_lost: Callable[[], None],
    ) -> None:
        """`lease` is given what to call when it changes."""
        self._lease = lease(self._changed)
        self._lead = lead
        self._metrics = metrics
        self._config = config
        self._on_lost = on_lost
        self.forwarding = Forwarding()
        self.memory = Memory(config.kept_bytes, config.max_body_bytes)
        self._known: dict[str, str] = {}
        """The owners of credentials that the holder accepted, by their hashes."""
        self._change = asyncio.Event()
        self._passing_to = 0
        """The epoch of the server that requests were last passed on to."""
        self._silent: Holder | None = None
        """A holder that takes no connections."""
        self._looking: asyncio.Task[None] | None = None
        self._life = Starlette(lifespan=self._living)
        self._taking: asyncio.Task[None] | None = None
        self._given_back = 0
        """The epoch that this server could not take over with: that lease is about to be another's,
        however long the database is away before it can be told."""
        self._app: Starlette | None = None
        self._is_draining = False
        self.service: Service | None = None
        """Runs while this server holds the lease."""
        metrics.gauge("leads", lambda: float(self.service is not None))
        metrics.gauge("lease_epoch", lambda: float(self._epoch))

    # Its life

    async def start(self) -> None:
        """Returns when the server has taken the lease and leads, or knows that another does."""
        await self._lease.start()
        if self._lease.view.epoch is not None:
            # Nobody begins it a second time meanwhile, whatever becomes of the lease.
            self._taking = asyncio.create_task(self._take_over(self._lease.view.epoch))
            try:
                await self._taking
            except BaseException:
                await self._lease.close()
                raise
            finally:
                self._taking = None

    def begin_drain(self) -> None:
        """No longer hold questions open; called when the server has been asked to stop."""
        self._is_draining = True
        self._change.set()
        self.forwarding.drop(only_unanswered=True)
        if self.service is not None:
            self.service.begin_drain()

    async def stop(self) -> None:
        """Finish what is under way, then let another server have the lease at once."""
        self.begin_drain()
        if self._taking is not None:
            await asyncio.gather(self._taking, return_exceptions=True)
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self.service is not None:
            await (self.service.abandon() if self.is_lost else self.service.stop())
        self.forwarding.drop()
        await self._lease.close()

    @contextlib.asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        """The HTTP server says when it is over."""
        try:
            yield
        finally:
            await self.stop()

    @property
    def store_id(self) -> str | None:
        """The identity that the database had when this server began."""
        return self._lease.store_id

    @property
    def _leads(self) -> bool:
        """Whether requests are for this server to answer. While the database is away nobody can
        know; this server then goes on, and what has to be written waits."""
        return self._lease.is_held or (
            self._lease.view.epoch is not None and self._lease.view.trouble is not None
        )

    @property
    def is_lost(self) -> bool:
        """Whether another server has taken over from this one."""
        return self._lease.view.is_lost

    def _changed(self) -> None:
        """The lease has changed hands, or nobody holds it."""
        view = self._lease.view
        if view.is_lost:
            logger.error("another server has taken over; this one begins anew and follows it")
            self._on_lost()
        is_new = view.epoch is not None and view.epoch > self._given_back
        if is_new and self.service is None and self._taking is None:
            self._taking = asyncio.create_task(self._try_to_take_over(self._epoch))
        if self._epoch > self._passing_to:
            # The last holder may never answer: its process may be suspended.
            self._passing_to = self._epoch
            self.forwarding.drop()
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _try_to_take_over(self, epoch: int) -> None:
        try:
            await self._take_over(epoch)
        except Exception:
            logger.exception("this server could not take over; another may")
            self._given_back = epoch
            self._lease.rest()
        finally:
            self._taking = None
            self._wake()

    async def _take_over(self, epoch: int) -> None:
        logger.info("this server leads, with epoch %d", epoch)
        self.service, self._app = await self._lead(epoch)

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._life(scope, receive, send)
            return
        send = saying_whose(scope, send)
        if self._app is not None and self._leads:
            await self._app(scope, receive, send)
            return
        send = with_defaults(send)
        own = self._own_answer(scope)
        if own is not None:
            await own(scope, receive, send)
            return
        body = Body(receive, self.memory)
        try:
            await self._pass_on(scope, body, send)
        except ClientGoneError:
            return
        finally:
            body.forget()

    def _own_answer(self, scope: Scope) -> Response | None:
        """What a server that does not lead says of itself."""
        path = scope["path"]
        if path in (endpoints.HEALTHZ.full_path, endpoints.API_HEALTHZ.full_path):
            return answer(HealthResponse(status="ok"))
        if path == endpoints.METRICS.full_path:
            return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")
        if path == endpoints.READYZ.full_path:
            trouble = self._trouble
            about = {"status": "ready"} if trouble is None else {"status": "not ready"}
            about |= {"role": "follower"} | ({} if trouble is None else {"detail": trouble})
            return answer(about, 200 if trouble is None else 503)
        return None

    @property
    def _trouble(self) -> str | None:
        if self._is_draining:
            return "the server is stopping"
        if self._lease.view.other is None:
            return "no server runs the engines now; one is about to take over"
        return self._lease.view.trouble

    @property
    def _epoch(self) -> int:
        view = self._lease.view
        return view.epoch or (view.other.epoch if view.other is not None else 0)

    async def _pass_on(self, scope: Scope, body: Body, send: Send) -> None:
        headers = Headers(scope=scope)
        loop = asyncio.get_running_loop()
        deadline = None
        while not self._is_draining:
            change = self._change
            other = self._lease.view.other
            if self._app is not None and self._leads:
                body.rewind()
                await self._app(scope, body.receive, send)
                return
            if other is not None and HOP.decode() in headers:
                await _not_here()(scope, body.receive, send)
                return
            if other is not None and other != self._silent:
                if not self._name(scope, headers):
                    detail = "you have too many connections; close some"
                    refusal = _refusal(headers, 429, detail, close=True)
                    await refusal(scope, body.receive, send)
                    return
                sent_at = loop.time()
                answered = await self.forwarding.attempt(other.url, scope, body, send)
                if answered is not None:
                    self._learn(headers, answered)
                    self._metrics.count("forwarded_requests")
                    return
                if not body.is_repeatable:
                    break
                if loop.time() - sent_at > _HELD_SECONDS:
                    deadline = None  # the request was accepted there, and held open
            deadline = deadline or loop.time() + self._config.patience_seconds
            if loop.time() >= deadline:
                break
            self._look_for_somebody()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await change.wait()
        await self._away(headers)(scope, body.receive, send)

    def _look_for_somebody(self) -> None:
        """Thousands may wait. If each tried by itself, this server would do nothing else."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Wake those who wait when there is somebody to answer them: this server, or the holder."""
        while not self._is_draining:
            await asyncio.sleep(self._config.again_seconds)
            other = self._lease.view.other
            if self._app is not None and self._leads:
                break
            if other is not None and await self.forwarding.reaches(other.url):
                break
            if other is not None:
                self._lease.miss(other)
            self._silent = other
        self._silent = None
        self._wake()

    def _away(self, headers: Headers) -> Response:
        other = self._lease.view.other
        if self._is_draining:
            return _refusal(headers, 503, "the server is stopping; send this again", close=True)
        where = "no server runs the engines" if other is None else f"{other.url} does not answer"
        return _refusal(headers, 503, f"{where} now; send this again")

    def _name(self, scope: Scope, headers: Headers) -> bool:
        """Count the connection as that of an owner whose credentials the holder has accepted
        before; of strangers' connections there may be fewer. False if the owner has too many."""
        credential = credential_in(headers)
        connection = scope.get(CONNECTION)
        if credential is None or connection is None:
            return True
        owner = self._known.get(hash_key(credential))
        return owner is None or bool(connection.name(owner))

    def _learn(self, headers: Headers, answered: Answered) -> None:
        """Whose a credential is, as the holder says; where it did not look, nothing is learnt."""
        credential = credential_in(headers)
        if credential is None or (answered.owner is None and answered.status != 401):
            return
        self._known.pop(hash_key(credential), None)
        if answered.owner is not None:
            self._known[hash_key(credential)] = answered.owner
            if len(self._known) > self._config.max_known:
                del self._known[next(iter(self._known))]


def _refusal(asked: Headers, status: int, detail: str, *, close: bool = False) -> Response:
    headers = WAIT | ({"connection": "close"} if close else {})
    return answer(detail_body(status, detail), status, with_pause(asked, headers))


def _not_here() -> Response:
    detail = "this server does not run the engines; ask the one that does"
    return answer(detail_body(503, detail), 503, WAIT | {NOT_HERE.decode(): "1"})
