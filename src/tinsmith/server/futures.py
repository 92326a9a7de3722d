"""Promises: what a request id stands for until, and for a while after, its result is there.

Waiting costs one future per waiter and no polling, so thousands of open questions are cheap. The
results held here are bounded in bytes: the owner whose results take most lets go first, of the
oldest, fetched ones before others.
"""

from __future__ import annotations

import asyncio
import itertools
import time
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
    waiters: dict[asyncio.Future[None], None] = field(default_factory=dict)
    """In the order in which they came."""
    waited_at: float = field(default_factory=time.monotonic)
    """When somebody last waited for it, or opened it, by the monotonic clock."""


@dataclass(slots=True)
class _Results:
    """What one owner's results take, and in which order they are let go."""

    nbytes: int = 0
    unfetched: dict[str, Promise] = field(default_factory=dict)
    """In the order in which they finished."""
    fetched: dict[str, Promise] = field(default_factory=dict)
    """In the order in which they were last fetched."""

    def oldest(self) -> Promise:
        return next(iter((self.fetched or self.unfetched).values()))


class Promises:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._promises: dict[str, Promise] = {}
        self._results: dict[str, _Results] = {}
        """By owner; only owners with results."""
        self._num_finished = 0
        self._bytes = 0
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._promises)

    @property
    def num_waiting(self) -> int:
        return len(self._promises) - self._num_finished

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
        results = self._results.setdefault(promise.owner, _Results())
        results.unfetched[request_id] = promise
        results.nbytes += outcome.nbytes
        self._bytes += outcome.nbytes
        self._num_finished += 1
        _wake(promise.waiters)
        self._make_room()

    def mark_retrieved(self, promise: Promise, at: float) -> None:
        """Somebody was given the outcome."""
        promise.retrieved_at = at
        results = self._results.get(promise.owner)
        if results is not None and self._promises.get(promise.request_id) is promise:
            results.unfetched.pop(promise.request_id, None)
            results.fetched.pop(promise.request_id, None)
            results.fetched[promise.request_id] = promise

    async def wait(
        self, promise: Promise, seconds: float, leaving: asyncio.Future[None] | None = None
    ) -> Outcome | None:
        """The outcome, or None when it does not come in time, or once `leaving` is done."""
        if promise.outcome is None and not self._is_closing:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def let_go(_: object = None) -> None:
                _wake([waiter])

            promise.waiters[waiter] = None
            timer = loop.call_later(seconds, let_go)
            if leaving is not None:
                leaving.add_done_callback(let_go)
            try:
                await waiter
            finally:
                timer.cancel()
                if leaving is not None:
                    leaving.remove_done_callback(let_go)
                promise.waiters.pop(waiter, None)
                promise.waited_at = time.monotonic()
        return promise.outcome

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            promise = self._promises.pop(request_id, None)
            if promise is None or promise.outcome is None:
                continue
            results = self._results[promise.owner]
            results.unfetched.pop(request_id, None)
            results.fetched.pop(request_id, None)
            results.nbytes -= promise.outcome.nbytes
            self._bytes -= promise.outcome.nbytes
            self._num_finished -= 1
            if not results.unfetched and not results.fetched:
                del self._results[promise.owner]

    def expire(self, *, retrieved_before: float, finished_before: float) -> None:
        """Forget what was fetched, or finished and never fetched, before these times."""
        for results in list(self._results.values()):
            fetched = itertools.takewhile(
                lambda p: (p.retrieved_at or 0.0) < retrieved_before, results.fetched.values()
            )
            unfetched = itertools.takewhile(
                lambda p: p.finished_at < finished_before, results.unfetched.values()
            )
            self.forget([promise.request_id for promise in (*fetched, *unfetched)])

    def close(self) -> None:
        """Let everybody who waits go, and hold nobody from now on."""
        self._is_closing = True
        for promise in self._promises.values():
            _wake(promise.waiters)

    def _make_room(self) -> None:
        while self._bytes > self._max_bytes:
            most = max(self._results.values(), key=lambda results: results.nbytes)
            self.forget([most.oldest().request_id])


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
