"""This server's part in the lease: asked for, kept, given back, in a thread of its own.

The event loop may be late; the lease must not be. What the thread learns it tells the loop. A
server that has lost its lease is told once, and asks no more: it begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinsmith.errors import TinkerError
from tinsmith.server.store.errors import StoreTooNewError, StoreUnavailableError
from tinsmith.server.store.leases import Leases

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    url: str
    epoch: int


@dataclass(frozen=True, slots=True)
class View:
    """What a server knows of the lease."""

    epoch: int | None = None
    """Ours; None while another has it, or nobody."""
    other: Holder | None = None
    """Another server that holds it."""
    is_lost: bool = False
    trouble: str | None = None
    """Why this server cannot take the lease, or ask for it."""


class Lease:
    def __init__(
        self,
        leases: Leases,
        seconds: float,
        on_change: Callable[[], None],
        *,
        look_seconds: float = 0.25,
        rest_seconds: float = 5.0,
    ) -> None:
        """`on_change` is called in the event loop whenever `view` is another.

        Who holds the lease is asked, and the lease asked for when nobody does, every
        `look_seconds`. A server that could not take over leaves it to others for `rest_seconds`.
        """
        self._look_seconds = look_seconds
        self._rest_seconds = rest_seconds
        self._leases = leases
        self._seconds = seconds
        self._on_change = on_change
        self._good_until = 0.0
        self._rests_until = 0.0
        self._is_too_old = False
        self._wants_release = False
        self._missing_epoch: int | None = None
        self._hurry = threading.Event()
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.view = View()
        self.store_id: str | None = None
        """The identity of the database when we began; None if it had none yet."""

    @property
    def is_held(self) -> bool:
        """Whether the lease is ours for certain. Where it is not, the database decides."""
        return self.view.epoch is not None and time.monotonic() < self._good_until

    async def start(self) -> None:
        """Ask once, so that `view` is known, and then go on asking."""
        self.view = await asyncio.to_thread(self._first)
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="lease", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """Give the lease back for a while: this server cannot do what its holder has to."""
        self._wants_release = True

    def miss(self, holder: Holder) -> None:
        """The holder is not found at its address: ask at once whether it has ended."""
        self._missing_epoch = holder.epoch
        self._hurry.set()

    async def close(self) -> None:
        """Give the lease back, if it is ours, and ask no more."""
        self._is_ending.set()
        self._hurry.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._end)

    def _first(self) -> View:
        self._leases.make_tables()
        self.store_id = self._leases.store_id()
        view = self._look(self.view)
        if self._is_too_old and view.other is None:
            raise StoreTooNewError(f"{view.trouble}, and there is no server to follow")
        return view

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._hurry.wait(self._pause())
            self._hurry.clear()
            if self._is_ending.is_set() or not self._ask(loop):
                return

    def _ask(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether to ask again."""
        try:
            view = self._look(self.view)
        except StoreUnavailableError as error:
            view = View(self.view.epoch, self.view.other, trouble=str(error))
        except TinkerError as error:
            view = View(self.view.epoch, trouble=str(error))
        except Exception as error:
            logger.exception("asking for the lease failed")
            view = View(self.view.epoch, trouble=f"asking for the lease failed: {error}")
        if view != self.view:
            self.view = view
            loop.call_soon_threadsafe(self._on_change)
        return not view.is_lost

    def _pause(self) -> float:
        return self._look_seconds if self.view.epoch is None else self._seconds / 4

    def _look(self, before: View) -> View:
        began = time.monotonic()
        if before.epoch is not None:
            return self._keep(before.epoch, began)
        trouble = None
        if began >= self._rests_until and not self._is_too_old:
            try:
                epoch = self._take()
            except StoreTooNewError as error:
                self._is_too_old, epoch = True, None
                logger.error("this server can pass requests on, and cannot take over: %s", error)
            if epoch is not None:
                self._good_until = began + self._seconds
                return View(epoch)
        if self._is_too_old:
            trouble = "a later release has written the database; this one cannot take over"
        present = self._leases.present()
        other = None if present is None else Holder(present.url, present.epoch)
        return View(other=other, trouble=trouble)

    def _take(self) -> int | None:
        missing, self._missing_epoch = self._missing_epoch, None
        epoch = self._leases.take()
        if epoch is None and missing is not None:
            epoch = self._leases.take_from_dead(missing)
        return epoch

    def _keep(self, epoch: int, began: float) -> View:
        if self._wants_release:
            self._leases.release(epoch)  # asked again where the database is away
            self._wants_release = False
            self._rests_until = time.monotonic() + self._rest_seconds
            return View()
        if not self._leases.renew(epoch):
            return View(is_lost=True)
        self._good_until = began + self._seconds
        return View(epoch)

    def _end(self) -> None:
        if self.view.epoch is not None:
            try:
                self._leases.release(self.view.epoch)
            except TinkerError as error:
                logger.warning("the lease runs out by itself: %s", error)
        self._leases.close()
