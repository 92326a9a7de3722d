"""An engine's supervisor: starts it, notices its death, starts another.

Each start is a generation. Callers remember the generation of the engine that they use and report
trouble under it, so that many reports of one death cause one restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from tinsmith.engine.base import Capabilities, Engine, Health
from tinsmith.errors import EngineDiedError, EngineError
from tinsmith.server.tuning import TUNING

logger = logging.getLogger(__name__)


async def _nothing() -> None: ...


_LONGEST_PAUSE_SECONDS = 30.0
"""Most time between two attempts to start an engine that does not start."""

_LONGEST_REST_SECONDS = 5.0
"""Most time between the death of an engine that had started and the next one."""

_STEADY_SECONDS = 10.0
"""An engine that lived this long did not die of being started."""


class EngineSupervisor:
    def __init__(
        self,
        factory: Callable[[], Awaitable[Engine]],
        clean_up: Callable[[], Awaitable[None]] = _nothing,
        health_seconds: float = TUNING.health_seconds,
    ) -> None:
        """`clean_up` is called before each start, when the last engine is gone."""
        self._health_seconds = health_seconds
        self._factory = factory
        self._clean_up = clean_up
        self._closing: asyncio.Task[None] | None = None
        self._exclusive = asyncio.Lock()
        self._num_shared = 0
        self._is_unshared = asyncio.Event()
        self._is_unshared.set()
        self._engine: Engine | None = None
        self._is_settled = asyncio.Event()
        """Set when nobody has to wait for an engine any longer: it is up, or lost."""
        self._is_needed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._on_start: list[Callable[[], None]] = []
        self._on_health: list[Callable[[Health], None]] = []
        self.generation = 0
        self.num_restarts = 0
        self.trouble = "the engine is starting"
        self.capabilities: Capabilities | None = None
        self.health = Health(alive=False)
        """As last heard, every few seconds."""
        self.is_lost = False
        """Whether nobody should wait for an engine any longer; false again once one is up after
        all."""
        self.down_since = 0.0
        self._has_failed = False

    def on_start(self, callback: Callable[[], None]) -> None:
        """`callback` is called each time an engine is up."""
        self._on_start.append(callback)

    def on_health(self, callback: Callable[[Health], None]) -> None:
        """`callback` is called each time a living engine has said how it is."""
        self._on_health.append(callback)

    @property
    def is_up(self) -> bool:
        return self._engine is not None

    @property
    def is_expected(self) -> bool:
        """Whether it is up, or is starting for the first time and nothing has gone wrong."""
        return self.is_up or not (self.generation or self._has_failed)

    async def start(self) -> None:
        self.down_since = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def get(self) -> tuple[Engine, int]:
        """The present engine and its generation; waits while there is none, unless it is lost."""
        while self._engine is None:
            if self.is_lost:
                raise EngineError(self.trouble)
            await self._is_settled.wait()
        return self._engine, self.generation

    def give_up(self) -> None:
        """Nobody is to wait for this engine any longer. Attempts to start it go on."""
        if self._engine is None:
            self.is_lost = True
            self._is_settled.set()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """For work that is suspected of killing engines: it begins when nothing shared is under
        way, and nothing else begins meanwhile."""
        async with self._exclusive:
            await self._is_unshared.wait()
            yield

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """For work beside which others may work, too."""
        while self._exclusive.locked():
            async with self._exclusive:
                pass
        self._num_shared += 1
        self._is_unshared.clear()
        try:
            yield
        finally:
            self._num_shared -= 1
            if not self._num_shared:
                self._is_unshared.set()

    def report(self, generation: int, error: BaseException) -> None:
        """Somebody's call to the engine of that generation ended with an exception."""
        if generation == self.generation and self._engine is not None:
            logger.error("engine %d is in trouble: %s", generation, error)
            self._down(str(error))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    def _down(self, reason: str) -> None:
        dead, self._engine = self._engine, None
        self.trouble = f"the engine is restarting after: {reason}"
        self.down_since = asyncio.get_running_loop().time()
        self._is_settled.clear()
        self._is_needed.set()
        if dead is not None:
            self._closing = asyncio.create_task(_close(dead))

    async def _supervise(self) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                if self._closing is not None:
                    # Two at once would share the device's memory and the folder of weights.
                    await self._closing
                await self._clean_up()
                engine = await self._factory()
                try:
                    self.capabilities = await engine.capabilities()
                except BaseException:
                    # Nobody else knows of it yet.
                    await _close(engine)
                    raise
            except Exception as error:
                # Whatever keeps an engine from starting (no torch, no memory) is for people to
                # read; the server stays up and says so.
                self._has_failed = True
                pause = min(max(0.5, pause * 2), _LONGEST_PAUSE_SECONDS)
                self.trouble = f"the engine did not start: {error}"
                logger.exception("the engine did not start; next attempt in %.1f s", pause)
                continue
            self.num_restarts += self.generation > 0
            self.generation += 1
            self._is_needed.clear()
            self._engine = engine
            self.is_lost = False
            self._is_settled.set()
            logger.info("engine %d is up", self.generation)
            for callback in self._on_start:
                callback()
            started = asyncio.get_running_loop().time()
            await self._watch(engine)
            is_short = asyncio.get_running_loop().time() - started < _STEADY_SECONDS
            pause = min(max(0.1, pause * 2), _LONGEST_REST_SECONDS) if is_short else 0.0

    async def _watch(self, engine: Engine) -> None:
        """Return when the engine is no longer in use."""
        generation = self.generation
        while not self._is_needed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._health_seconds):
                    await self._is_needed.wait()
            if self._is_needed.is_set():
                return
            try:
                self.health = await engine.health()
                if not self.health.alive:
                    raise EngineDiedError(self.health.detail)
                for callback in self._on_health:
                    callback(self.health)
            except EngineError as error:
                self.report(generation, error)


async def _close(engine: Engine) -> None:
    try:
        await engine.close()
    except Exception:
        # It is dead or dying; what it says on the way out changes nothing.
        logger.debug("closing a dead engine failed", exc_info=True)
