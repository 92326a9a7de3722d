"""What the clients of one credential at one service share: start-up, calls, limits, the session.

The official client calls this object `holder`; the clients carry it under that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tinsmith.client.futures import AwaitableConcurrentFuture, explain_blocking
from tinsmith.client.uplink.api import Api
from tinsmith.client.uplink.loop import AwaitableFuture, io_loop, submit
from tinsmith.client.uplink.session import (
    Cancellations,
    Switches,
    fetch_switches,
    heartbeat,
    is_alive,
    release_sampler,
)
from tinsmith.client.uplink.telemetry import Telemetry
from tinsmith.client.uplink.tracing import Spans
from tinsmith.errors import ClosedError, NotFoundError, TinkerError
from tinsmith.transport.config import PROTOCOL_VERSION, ClientConfig
from tinsmith.transport.destination import warn_of_strange_destination
from tinsmith.transport.limits import ByteBudget, SampleGate
from tinsmith.transport.tokens import (
    ExchangedToken,
    StaticKey,
    jwt_claims,
    key_to_send,
    raw_tokens,
)
from tinsmith.types import (
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
)
from tinsmith.wire import endpoints

if TYPE_CHECKING:
    from tinsmith.client.calls.custom_loss import LossHandle

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A session that is created when the uplink opens."""

    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingSession:
    """A session that another process created, as that process knows it."""

    session_id: str
    flags: ClientConfigResponse
    switches: ClientDynamicConfigResponse


class Uplink:
    """Opens with the first call that needs it. Any thread may call `submit` and the counters.

    Without a session (`session=None`) it serves the REST calls alone.
    """

    def __init__(
        self, config: ClientConfig, *, session: NewSession | ExistingSession | None = None
    ) -> None:
        warn_of_strange_destination(config)
        self.config = config
        self.api = Api(config, raw_tokens(config))
        self.spans = Spans(config.tracing)
        self._plan = session
        self._session_id = session.session_id if isinstance(session, ExistingSession) else None
        self._client_config = session.flags if isinstance(session, ExistingSession) else None
        self._switches = Switches(
            session.switches
            if isinstance(session, ExistingSession)
            else ClientDynamicConfigResponse()
        )
        self._telemetry: Telemetry | None = None
        self._cancellations = Cancellations(self.api, self._switches)
        self._model_seq_ids = itertools.count()
        self._sampling_session_seq_ids = itertools.count()
        self._custom_loss_seq_ids = itertools.count()
        self.custom_losses: dict[str, LossHandle] = {}
        """The traced losses of this session, by their key."""
        self._session_end = threading.Event()
        self._opening: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_closed = False
        self._close_lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._operations: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        self._loop = io_loop()
        self._size_limits(self._client_config or ClientConfigResponse())
        # Tasks and sockets end with the last client, closed or not.
        weakref.finalize(self, _release, self._loop, self._tasks, self.api).atexit = False

    def __repr__(self) -> str:
        return f"<Uplink to {self.config.base_url}, session {self._session_id}>"

    # --- opening and closing ------------------------------------------------------------------

    async def ready(self) -> Uplink:
        """This uplink, open. Many may ask at once; a failed attempt is repeated by the next."""
        if self._is_closed:
            raise ClosedError("the client is closed; create a new one")
        if not self._is_open:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open(), name="tinsmith-open")
                self._opening.add_done_callback(self._forget_opening)
            await asyncio.shield(self._opening)
        return self

    def open(self) -> Uplink:
        """The same for plain code: blocks."""
        if self._is_open and not self._is_closed:
            return self
        explain_blocking("opening a session", "use an _async method first")
        return submit(self.ready()).result()

    async def aclose(self) -> None:
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._telemetry is not None:
            with contextlib.suppress(Exception):
                await self._telemetry.close()
        self._ended |= self._operations
        tasks = [*self._tasks, *self._operations]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._cancellations.send_rest()
        await self.api.close()

    def close(self) -> None:
        """Start closing and do not wait."""
        submit(self.aclose())

    def _forget_opening(self, opening: asyncio.Task[None]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # the waiters have raised it

    async def _open(self) -> None:
        if self._client_config is None:
            flags = await self.api.call(
                endpoints.CLIENT_CONFIG, ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
            )
            self._size_limits(flags)
            self._client_config = flags
        self._authenticate(self._client_config)
        if not isinstance(self._plan, ExistingSession):
            try:
                self._switches.current = await fetch_switches(self.api)
            except NotFoundError:
                logger.debug("The service has no dynamic config.")
        if isinstance(self._plan, NewSession) and self._session_id is None:
            self._session_id = await self._create_session(self._plan)
        if self._session_id is not None:
            self.keep(heartbeat(self.api, self._session_id, self.config, self._session_end))
            self.keep(self._switches.keep_fresh(self.api, self.config.timing.refresh_seconds))
            self.keep(self._cancellations.run())
        if self.config.telemetry:
            self._telemetry = Telemetry(
                self.api,
                self._session_id,
                self._loop,
                close_seconds=self.config.timing.telemetry_close_seconds,
            )
            self.api.on_failure = self._telemetry.note_failure
            self.keep(self._telemetry.run())
        self._is_open = True

    def _size_limits(self, flags: ClientConfigResponse) -> None:
        self.sample_gate = SampleGate(flags.sample_dispatch_bytes_semaphore_size)
        self.pass_budget = ByteBudget(flags.fwdbwd_dispatch_bytes_semaphore_size)
        self.response_budget = ByteBudget(flags.inflight_response_bytes_semaphore_size)
        self.api.billing.max_seconds = flags.billing_exception_max_pause_duration_sec

    def _authenticate(self, flags: ClientConfigResponse) -> None:
        if flags.pjwt_auth_enabled:
            from_command = flags.credential_default_source == "credential_cmd"
            credential = raw_tokens(self.config, command_only=from_command)
            api = self.api
            self.api.use_tokens(ExchangedToken(lambda: api.exchange(credential)))
            return
        self.api.use_tokens(StaticKey(key_to_send(self.config)))

    async def _create_session(self, plan: NewSession) -> str:
        created = await self.api.call(
            endpoints.CREATE_SESSION,
            CreateSessionRequest(
                tags=list(self.config.tags),
                user_metadata=plan.user_metadata or {},
                sdk_version=PROTOCOL_VERSION,
                project_id=self.config.project_id,
                display_name=plan.display_name,
            ),
        )
        for level, text in (
            (logging.INFO, created.info_message),
            (logging.WARNING, created.warning_message),
            (logging.ERROR, created.error_message),
        ):
            if text:
                logger.log(level, "%s", text)
        logger.info("Session %s is open.", created.session_id)
        return created.session_id

    # --- running operations -------------------------------------------------------------------

    def submit(
        self, operation: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> AwaitableConcurrentFuture[T]:
        """Call `operation` on the I/O thread; its errors are reported before they are raised."""
        return AwaitableConcurrentFuture(self.submit_future(operation, *args, **kwargs))

    def submit_future(
        self, operation: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> AwaitableFuture[T]:
        """The same, for methods that promise a `concurrent.futures.Future`."""
        return submit(self._reported(lambda: operation(*args, **kwargs)))

    def run_coroutine_threadsafe(
        self, coro: Coroutine[Any, Any, T]
    ) -> AwaitableConcurrentFuture[T]:
        """The same for a coroutine that exists already; the official name."""
        return self.submit(lambda: coro)

    async def _reported(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None, "submitted as a task"
        self._operations.add(task)
        try:
            await self.ready()
            return await start()
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise ClosedError("the client was closed while this operation was under way") from None
        except Exception as error:
            if self._telemetry is not None:
                self._telemetry.log_exception(error)
            raise
        finally:
            self._operations.discard(task)
            self._ended.discard(task)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background until the uplink ends."""
        self.keep_task(asyncio.create_task(work))

    def keep_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel_sample(self, request_id: str) -> None:
        """Tell the service that nobody waits for this sample any more."""
        self._cancellations.add(request_id)

    def release_sampler(self, sampler_id: str) -> None:
        """Tell the service that nobody has this unnamed sampler any more. From any thread: it is
        called when a client is collected."""
        with contextlib.suppress(RuntimeError):  # the loop may be gone at interpreter exit
            self._loop.call_soon_threadsafe(self._start_release, sampler_id)

    def _start_release(self, sampler_id: str) -> None:
        if self.is_open:
            self.keep_task(asyncio.create_task(release_sampler(self.api, sampler_id)))

    # --- what clients ask ---------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._is_open and not self._is_closed

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def has_ended(self) -> bool:
        """Whether the service has said that the session is over."""
        return self._session_end.is_set()

    async def check_session(self) -> bool:
        """Ask the service whether the session is over."""
        if self._session_id is not None and not await is_alive(self.api, self._session_id):
            self._session_end.set()
        return self.has_ended

    def get_session_id(self) -> str:
        if self._session_id is None:
            raise TinkerError("this client has no session: it serves REST calls only")
        return self._session_id

    def get_client_config(self) -> ClientConfigResponse:
        """The service's switches, fixed when the uplink opened."""
        return self._client_config or ClientConfigResponse()

    def get_client_dynamic_config(self) -> ClientDynamicConfigResponse:
        """The switches that change; do not keep the answer."""
        return self._switches.current

    def get_telemetry(self) -> Telemetry | None:
        return self._telemetry

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def next_model_seq_id(self) -> int:
        return next(self._model_seq_ids)

    def next_sampling_session_seq_id(self) -> int:
        return next(self._sampling_session_seq_ids)

    def next_custom_loss_seq_id(self) -> int:
        return next(self._custom_loss_seq_ids)

    async def identity_token(self) -> str | None:
        """A JWT that says who the caller is; a plain key is exchanged for one, where the service
        does that."""
        await self.ready()
        tokens = self.api.signer.tokens
        if isinstance(tokens, ExchangedToken):
            return await tokens.token()
        key = self.config.api_key or ""
        with contextlib.suppress(ValueError):
            if key.startswith("eyJ") and str(jwt_claims(key).get("iss", "")).startswith(
                "passport-"
            ):
                return key
        with contextlib.suppress(NotFoundError):
            return await self.api.exchange(tokens)
        return None


def _release(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], api: Api) -> None:
    def end() -> None:
        for task in tuple(tasks):
            task.cancel()
        closing.add(loop.create_task(api.close()))

    closing: set[asyncio.Task[None]] = set()
    # At interpreter exit the loop may be gone, and with it all there is to release.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(end)
