"""One long poll for all requests of a sampling session, instead of one for each.

Where the service offers it, waiting for thousands of samples costs one open request. The poller
learns which have finished; each waiter then fetches its own result.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tinsmith.errors import TinkerError
from tinsmith.transport.retry import NO_RETRY, RetryPolicy
from tinsmith.types import (
    FutureFailed,
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)
from tinsmith.wire import endpoints

if TYPE_CHECKING:
    from tinsmith.client.uplink.api import Api

logger = logging.getLogger(__name__)

POLL_TIMEOUT_SECONDS = 45.0
POLICY = RetryPolicy(
    initial_delay_seconds=1.0,
    max_delay_seconds=1.0,
    give_up_after_seconds=None,
    bad_request_retries=3,
)

Completion = FutureFinished | FutureFailed


class CompletionPoller:
    """Long-polls the completions of one sampling session. Runs on the I/O loop."""

    def __init__(
        self,
        api: Api,
        sampling_session_id: str,
        clone_id: int,
        keep: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`keep` is given the background task, to be cancelled when the uplink ends."""
        self._api = api
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._cursor = 0
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._early: dict[str, tuple[Completion, int]] = {}
        """Completions that came before their promise, each with the number of the next
        submission."""
        self._submissions = itertools.count()
        self._submitting: dict[int, None] = {}
        """Submissions under way, the oldest first."""
        self._retrieved: set[str] = set()
        self._failure: str | None = None
        self._has_work = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="tinsmith-poller")
        keep(self._task)

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Around a submission: its request may end before its promise is here. The caller that gets
        the promise waits for it at once."""
        number = next(self._submissions)
        self._submitting[number] = None
        try:
            yield
        finally:
            del self._submitting[number]

    async def wait_for(self, request_id: str) -> Completion:
        """How the request ended, as soon as the poller knows."""
        early = self._early.pop(request_id, None)
        if early is not None:
            return early[0]
        if self._failure is not None:
            raise TinkerError(self._failure)
        waiter: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiter
        self._has_work.set()
        try:
            return await waiter
        finally:
            self._waiting.pop(request_id, None)

    def mark_retrieved(self, request_id: str) -> None:
        """The service may forget this result; it is told with the next poll."""
        self._retrieved.add(request_id)
        self._has_work.set()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._poll()
        except asyncio.CancelledError:
            self._fail("the client was closed while a sample was pending")
            raise
        except Exception as error:
            # Whatever it was: those who wait must hear of it.
            logger.error("waiting for samples failed: %s", error)
            self._fail(
                f"waiting for samples of {self._target.sampling_session_id} failed: "
                f"{type(error).__name__}: {error}"
            )

    async def _poll(self) -> None:
        while True:
            if not self._waiting and not self._retrieved:
                self._has_work.clear()
                await self._has_work.wait()
            answer = await self._api.repeater.run(lambda _: self._ask(), POLICY)
            self._cursor = answer.cursor
            for completion in answer.completions:
                self._hand_over(completion)
            self._forget_unwanted()

    async def _ask(self) -> FuturesRetrieveResponse:
        retrieved = sorted(self._retrieved)
        answer = await self._api.call(
            endpoints.RETRIEVE_FUTURES,
            FuturesRetrieveRequest(
                target=self._target,
                prev_cursor=self._cursor,
                retrieved_request_ids=retrieved,
            ),
            timeout_seconds=POLL_TIMEOUT_SECONDS,
            retry=NO_RETRY,
        )
        self._retrieved.difference_update(retrieved)
        return answer

    def _hand_over(self, completion: Completion) -> None:
        waiter = self._waiting.pop(completion.request_id, None)
        if waiter is None:
            # The promise may still be on its way to us.
            next_number = next(self._submissions)
            self._early[completion.request_id] = (completion, next_number)
        elif not waiter.done():
            waiter.set_result(completion)

    def _forget_unwanted(self) -> None:
        """Drop completions whose waiter was cancelled: those that belong to none of the submissions
        that were under way when they came. The service may forget their results at once."""
        oldest = next(iter(self._submitting), None)
        for request_id, (_, number) in list(self._early.items()):
            if oldest is None or oldest > number:
                del self._early[request_id]
                self.mark_retrieved(request_id)

    def _fail(self, message: str) -> None:
        self._failure = message
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(TinkerError(message))
