"""The worker: decides what the core does next, one turn at a time.

* A training turn is the next request in order, or the next part of passes under way;
* a sampling turn is one decoding step of the samples under way.

When both have work, the turn goes to the one that has had less time, so neither starves the other;
whoever comes during a turn is owed the time of that turn, for which they waited. Passes of somebody
who has trained little lately wait for one decoding step, though sampling be owed more: it is others
who have had the time.
So it is among several calls for passes, and the requests behind them: a long call is not waited
for, except by requests about adapters whose passes in it are not finished. What is left of a
request when it needs the core no more, such as writing files, is done by threads beside the turns.
A request whose base model has no room in memory, beside those in use, waits for it; those that come
then and need another one wait behind it, so that what is in use ends.
Calls that are answered at once are answered between turns, whatever is queued. Where requests come
from and replies go to is for others: here are a queue and a function.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tinsmith.engine.base import (
    EngineSampleEvent,
    ExpertsChosen,
    Failure,
    Health,
    TokensSampled,
)
from tinsmith.engine.calls import CALLS
from tinsmith.engine.local.boundary.core import Core, Later, PassResults
from tinsmith.engine.local.boundary.frames import Packed
from tinsmith.engine.local.boundary.messages import (
    Abandon,
    Beat,
    Done,
    Item,
    Patience,
    Reply,
    Request,
    Result,
    Trouble,
)
from tinsmith.engine.local.boundary.recent_use import RecentUse
from tinsmith.engine.local.boundary.request_needs import (
    adapters_of,
    base_models_of,
    folders_of,
    num_targets,
)
from tinsmith.types import SampleResponse

logger = logging.getLogger(__name__)

_MANY_SEQUENCES = 256
"""A response with this many takes milliseconds to unpack."""

_LATER_THREADS = 4
_MOST_LATER = 8
"""Most calls that threads finish at a time, each of which holds memory."""


@dataclass(frozen=True, slots=True)
class Written:
    """The rest of a request has been done."""

    number: int


Incoming = Request | Abandon | Written | None
"""What the receiving thread passes on, and the threads beside the turns; None once the socket is
closed."""


@dataclass(slots=True)
class _Passes:
    """A call for passes that is under way."""

    number: int
    results: PassResults
    unfinished: dict[int, str]
    """The adapters of the passes that are not finished, by their index."""
    scopes: list[str]
    """Whose each pass is."""
    patience: float
    had: float
    """Time that it has had, on the scale of `Worker._now`."""

    @property
    def adapter_ids(self) -> frozenset[str]:
        return frozenset(self.unfinished.values())


class Worker:
    """Decides what the core does next. `send` gets the replies of a turn together."""

    def __init__(
        self,
        core: Core,
        inbox: queue.SimpleQueue[Incoming],
        send: Callable[[list[Reply]], None],
        clock: Callable[[], float] = time.monotonic,
        patience: Patience | None = None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_idle` is called when there is nothing to do, before the wait for a message."""
        self._core = core
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._patience = patience or Patience()
        self._on_idle = on_idle
        self._ordered: deque[Request] = deque()
        self._ordered_had = 0.0
        self._passes: dict[int, _Passes] = {}
        self._crowded: deque[Request] = deque()
        """Requests that wait for room in memory, or behind such for another base model."""
        self._now = 0.0
        """The time that the last one served had had: newcomers start with it."""
        self._jobs: dict[str, int] = {}
        self._recent_use = RecentUse()
        self._training_seconds = 0.0
        self._sampling_seconds = 0.0
        self._last_training_turn = 0.0
        self._last_sampling_turn = 0.0
        """How long the turn took that has just ended; 0 for the other kind."""
        self._busy_seconds = 0.0
        self._later = ThreadPoolExecutor(_LATER_THREADS, "later")
        self._written: dict[int, Path] = {}
        """The folders that threads are writing, by the numbers of the requests."""
        self._turn: tuple[float, str, float] | None = None
        """When the turn under way began, what it does, and how long it may take."""

    def beat(self) -> Beat:
        """A sign of life; called by another thread."""
        turn = self._turn
        if turn is None:
            return Beat(0.0, self._patience.turn_seconds, "waiting")
        started, what, patience = turn
        return Beat(self._clock() - started, patience, what)

    def run(self) -> None:
        """Work until the socket closes."""
        while self._receive():
            self._let_in()
            is_training = self._takes_training_turn()
            self._last_training_turn = self._last_sampling_turn = 0.0
            if is_training:
                self._last_training_turn = self._training_turn()
                self._training_seconds += self._last_training_turn
            elif self._core.is_sampling:
                self._last_sampling_turn = self._timed(
                    self._sampling_turn, "sample", self._patience.turn_seconds
                )
                self._sampling_seconds += self._last_sampling_turn

    # What comes in

    @property
    def _has_training(self) -> bool:
        if self._passes or not self._ordered:
            return bool(self._passes)
        return not self._is_held_up() or self._due_passes() is not None

    def _is_held_up(self) -> bool:
        """Whether the next request has to wait for files, or for an adapter of its own: for passes
        that are not finished, or a request that waits for room."""
        adapter_ids = adapters_of(self._ordered[0])
        return (
            self._waits_for_files()
            or any(adapter_ids & each.adapter_ids for each in self._passes.values())
            or any(adapter_ids & adapters_of(request) for request in self._crowded)
        )

    def _waits_for_files(self) -> bool:
        """Whether the next request is about files that one before it is still writing, or too many
        are."""
        if not self._written:
            return False
        wanted = folders_of(self._ordered[0])
        is_full = len(self._written) >= _MOST_LATER
        return bool(wanted) and (is_full or not wanted.isdisjoint(self._written.values()))

    def _receive(self) -> bool:
        """Sort what has arrived, waiting if there is nothing else to do; False at the end."""
        was_training, was_sampling = self._has_training, self._core.is_sampling
        may_wait = not (was_training or was_sampling or self._crowded)
        if may_wait and self._inbox.empty():
            self._on_idle()
        while True:
            try:
                message = self._inbox.get(block=may_wait)
            except queue.Empty:
                break
            if message is None:
                return False
            may_wait = False
            if isinstance(message, Abandon):
                self._abandon(message.number)
            elif isinstance(message, Written):
                del self._written[message.number]
            else:
                self._accept(message)
        # Time not used while there was nothing to do is not saved up for later, except what went by
        # since a newcomer came: the turn that was under way.
        if self._has_training and not was_training:
            before_turn = self._sampling_seconds - self._last_sampling_turn
            self._training_seconds = max(self._training_seconds, before_turn)
        if self._core.is_sampling and not was_sampling:
            before_turn = self._training_seconds - self._last_training_turn
            self._sampling_seconds = max(self._sampling_seconds, before_turn)
        return True

    def _accept(self, request: Request) -> None:
        if request.method == "cancel":
            self._cancel(*request.arguments)
            self._send([Result(request.number, None)])
        elif CALLS[request.method].is_at_once:
            self._call(request)
        elif request.method == "sample" and not self._awaits_sampler(request):
            self._submit(request)
        else:
            if not self._ordered:
                self._ordered_had = max(self._ordered_had, self._now)
            self._ordered.append(request)

    def _awaits_sampler(self, request: Request) -> bool:
        """Whether the job's sampler is yet to be made, or changed, by a request before it."""
        (job,) = request.arguments
        return job.weights_id is not None and any(
            CALLS[earlier.method].argument("weights_id", earlier.arguments) == job.weights_id
            for earlier in self._ordered
        )

    def _abandon(self, number: int) -> None:
        if number in self._passes:
            self._passes.pop(number).results.close()
        for job_id, job_number in self._jobs.items():
            if job_number == number:
                self._core.cancel(job_id)
                del self._jobs[job_id]
                break
        self._ordered = deque(r for r in self._ordered if r.number != number)
        self._crowded = deque(r for r in self._crowded if r.number != number)

    def _cancel(self, job_id: str) -> None:
        number = self._jobs.pop(job_id, None)
        if number is not None:
            self._core.cancel(job_id)
        for waiting in (self._ordered, self._crowded):
            for request in waiting:
                if request.method == "sample" and request.arguments[0].job_id == job_id:
                    number = request.number
                    waiting.remove(request)
                    break
        if number is not None:
            failure = Failure(f"sampling job {job_id!r} was cancelled", "user")
            self._send([Item(number, failure), Done(number)])

    # Room for base models

    def _let_in(self) -> None:
        """Begin what has waited for room and has it now, with all others for the same model; the
        next request in order waits if there is none for it."""
        while self._crowded and self._has_room(self._crowded[0]):
            models = self._models_of(self._crowded[0])
            entering = [r for r in self._crowded if self._models_of(r) <= models]
            self._crowded = deque(r for r in self._crowded if r not in entering)
            for request in entering:
                self._enter(request)
        while self._ordered and not self._is_held_up() and self._is_crowded(self._ordered[0]):
            self._crowded.append(self._ordered.popleft())

    def _enter(self, request: Request) -> None:
        if request.method == "sample":
            self._begin_sample(request)
        elif request.method == "run_passes":
            # With the first part the model is in use, and nothing takes its place any more.
            self._training_seconds += self._first_part(request)
        else:
            turn, patience = partial(self._call, request), self._patience.turn_seconds
            self._training_seconds += self._timed(turn, request.method, patience)

    def _is_crowded(self, request: Request) -> bool:
        """Whether a request has to wait for room, or behind others that do."""
        needs_room = bool(self._models_of(request))
        return needs_room and (bool(self._crowded) or not self._has_room(request))

    def _has_room(self, request: Request) -> bool:
        return all(map(self._core.has_room_for, self._models_of(request)))

    def _models_of(self, request: Request) -> frozenset[str]:
        return base_models_of(request, self._core)

    # Turns

    def _takes_training_turn(self) -> bool:
        if not (self._has_training and self._core.is_sampling):
            return self._has_training
        # At a tie a decoding turn goes first, being the shorter one.
        if self._training_seconds < self._sampling_seconds:
            return True
        return self._last_sampling_turn > 0 and self._light_passes() is not None

    def _training_turn(self) -> float:
        """The next request, or a part of the passes that have had least; how long it took."""
        if (request := self._light_passes() or self._due_passes()) is not None:
            self._ordered.remove(request)
            return self._first_part(request)
        passes = min(self._passes.values(), key=lambda each: each.had, default=None)
        if self._is_next_request_due(passes):
            self._now = max(self._now, self._ordered_had)
            method = self._ordered[0].method
            taken = self._timed(self._request_turn, method, self._patience.turn_seconds)
            self._ordered_had += taken
            return taken
        assert passes is not None, "there is something to train"
        return self._part(passes)

    def _due_passes(self) -> Request | None:
        """The first call for passes that may begin at once; its own time counts from there."""
        return next(self._all_due_passes(), None)

    def _light_passes(self) -> Request | None:
        """The first of them by those who have trained little lately."""
        for request in self._all_due_passes():
            (items,) = request.arguments
            if self._recent_use.is_light({item.scope for item in items}):
                return request
        return None

    def _all_due_passes(self) -> Iterator[Request]:
        """The calls for passes that have no adapter in common with anything before them."""
        if not any(request.method == "run_passes" for request in self._ordered):
            return
        before = {each for passes in self._passes.values() for each in passes.adapter_ids}
        before.update(*map(adapters_of, self._crowded))
        for request in self._ordered:
            adapter_ids = adapters_of(request)
            is_apart = request.method == "run_passes" and before.isdisjoint(adapter_ids)
            if is_apart and not self._is_crowded(request):
                yield request
            before |= adapter_ids

    def _first_part(self, request: Request) -> float:
        return self._part(self._begin_passes(request))

    def _part(self, passes: _Passes) -> float:
        self._now = max(self._now, passes.had)
        taken = self._timed(partial(self._passes_turn, passes), "run_passes", passes.patience)
        passes.had += taken
        return taken

    def _is_next_request_due(self, passes: _Passes | None) -> bool:
        if not self._ordered or self._is_held_up():
            return False
        return passes is None or self._ordered_had <= passes.had

    def _begin_passes(self, request: Request) -> _Passes:
        (items,) = request.arguments
        passes = self._passes[request.number] = _Passes(
            number=request.number,
            results=self._core.run_passes(items),
            unfinished={index: item.adapter_id for index, item in enumerate(items)},
            scopes=[item.scope for item in items],
            patience=self._patience.turn_seconds
            + self._patience.token_seconds * num_targets(items),
            had=self._now,
        )
        return passes

    def _timed(self, turn: Callable[[], None], what: str, patience: float) -> float:
        start = self._clock()
        self._turn = (start, what, patience)
        turn()
        self._turn = None
        taken = self._clock() - start
        self._busy_seconds += taken
        return taken

    def _request_turn(self) -> None:
        request = self._ordered.popleft()
        if request.method == "sample":
            self._submit(request)
        else:
            self._call(request)

    def _passes_turn(self, passes: _Passes) -> None:
        try:
            result = next(passes.results)
        except StopIteration:
            del self._passes[passes.number]
            self._send([Done(passes.number)])
        except Exception as error:
            del self._passes[passes.number]
            self._report([passes.number], "run_passes", error)
        else:
            if result is not None:
                passes.unfinished.pop(result.index, None)
                self._recent_use.add(passes.scopes[result.index], result.seconds)
                self._send([Item(passes.number, result)])

    def _sampling_turn(self) -> None:
        try:
            events = self._core.sampling_turn(ahead=not self._has_training)
        except Exception as error:
            jobs, self._jobs = self._jobs, {}
            for job_id in jobs:
                self._core.cancel(job_id)
            self._report(list(jobs.values()), "sample", error)
            return
        replies: list[Reply] = []
        for job_id, event in events:
            job_number = self._jobs.get(job_id)
            if job_number is None:
                continue
            replies.append(Item(job_number, _packed(event)))
            if not isinstance(event, TokensSampled | ExpertsChosen):
                del self._jobs[job_id]
                replies.append(Done(job_number))
        if replies:
            self._send(replies)

    def _submit(self, request: Request) -> None:
        if self._is_crowded(request):
            self._crowded.append(request)
        else:
            self._begin_sample(request)

    def _begin_sample(self, request: Request) -> None:
        (job,) = request.arguments
        try:
            failure = self._core.submit_sample(job)
        except Exception as error:
            self._report([request.number], "sample", error)
            return
        if failure is None:
            self._jobs[job.job_id] = request.number
        else:
            self._send([Item(request.number, failure), Done(request.number)])

    def _call(self, request: Request) -> None:
        try:
            value = getattr(self._core, request.method)(*request.arguments)
            if isinstance(value, Later):
                self._do_later(request, value)
                return
            if isinstance(value, Health):
                value = dataclasses.replace(value, busy_seconds=self._busy_seconds)
        # One request's failure must not stop the loop; the caller is told.
        except Exception as error:
            self._report([request.number], request.method, error)
        else:
            self._send([Result(request.number, value)])

    def _do_later(self, request: Request, later: Later[object]) -> None:
        self._written[request.number] = later.folder

        def finish() -> None:
            try:
                value = later.finish()
            except Exception as error:
                self._report([request.number], request.method, error)
            else:
                self._send([Result(request.number, value)])
            self._inbox.put(Written(request.number))

        self._later.submit(finish)

    def _report(self, numbers: list[int], method: str, error: Exception) -> None:
        logger.error("%s failed", method, exc_info=error)
        text = f"{method} failed: {describe(error)}"
        self._send([Trouble(number, text) for number in numbers])


def describe(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _packed(event: EngineSampleEvent) -> EngineSampleEvent | Packed:
    is_large = isinstance(event, SampleResponse) and len(event.sequences) >= _MANY_SEQUENCES
    return Packed.of(event) if is_large else event
