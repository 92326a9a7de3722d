"""Promises: what a request id stands for until, and for a while after, its result is there.

Waiting costs one future per waiter and no polling, so thousands of open questions are cheap. The
results held here are bounded in bytes; the oldest are let go first, fetched ones before others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

ResultType = Literal["output", "sample", "json", "dropped"]
"""How a result's bytes are to be read: a pass's output or samples (protobuf), or JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended: with a result, or with an error."""

    result_type: ResultType = "json"
    body: bytes = b""
    error: str | None = None
    category: str = "unknown"

    @property
    def nbytes(self) -> int:
        return len(self.body) + len(self.error or "")


@dataclass(slots=True, eq=False)
class Promise:
    request_id: str
    owner: str
    outcome: Outcome | None = None
    finished_at: float = 0.0
    retrieved_at: float | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)


class Promises:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._promises: dict[str, Promise] = {}
        self._finished: dict[str, Promise] = {}
        self._bytes = 0
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._promises)

    @property
    def num_waiting(self) -> int:
        return len(self._promises) - len(self._finished)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def open(self, request_id: str, owner: str) -> Promise:
        return self._promises.setdefault(request_id, Promise(request_id, owner))

    def get(self, request_id: str) -> Promise | None:
        return self._promises.get(request_id)

    def resolve(self, request_id: str, outcome: Outcome, at: float) -> None:
        """Answer everybody who waits. A promise resolves once; later outcomes are ignored."""
        promise = self._promises.get(request_id)
        if promise is None or promise.outcome is not None:
            return
        promise.outcome = outcome
        promise.finished_at = at
        self._finished[request_id] = promise
        self._bytes += outcome.nbytes
        _wake(promise.waiters)
        self._make_room()

    async def wait(
        self, promise: Promise, seconds: float, leaving: asyncio.Future[None] | None = None
    ) -> Outcome | None:
        """The outcome, or None when it does not come in time, or once `leaving` is done."""
        if promise.outcome is None and not self._is_closing:
            waiter = asyncio.get_running_loop().create_future()
            promise.waiters.add(waiter)
            if leaving is not None:
                leaving.add_done_callback(lambda _: _wake([waiter]))
            try:
                async with asyncio.timeout(seconds):
                    await waiter
            except TimeoutError:
                pass
            finally:
                promise.waiters.discard(waiter)
        return promise.outcome

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._promises.pop(request_id, None)
            gone = self._finished.pop(request_id, None)
            if gone is not None and gone.outcome is not None:
                self._bytes -= gone.outcome.nbytes

    def expire(self, *, retrieved_before: float, finished_before: float) -> None:
        self.forget(
            [
                promise.request_id
                for promise in self._finished.values()
                if promise.finished_at < finished_before
                or (promise.retrieved_at is not None and promise.retrieved_at < retrieved_before)
            ]
        )

    def close(self) -> None:
        """Let everybody who waits go, and hold nobody from now on."""
        self._is_closing = True
        for promise in self._promises.values():
            _wake(promise.waiters)

    def _make_room(self) -> None:
        if self._bytes <= self._max_bytes:
            return
        fetched_first = sorted(
            self._finished.values(), key=lambda p: (p.retrieved_at is None, p.finished_at)
        )
        for promise in fetched_first:
            if self._bytes <= self._max_bytes:
                return
            self.forget([promise.request_id])


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
