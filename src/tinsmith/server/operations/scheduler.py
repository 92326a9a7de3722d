"""The heart of the server: choose what runs next, run it, and go on when something has ended.

There is one scheduler for each slot, for the models that train there. `chooser` decides, `runner`
guards what runs, `endings` records how it ended. What is kept here is what is under way, and which
models may have something to do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from tinsmith.engine.base import Failure
from tinsmith.server.config import ServerConfig
from tinsmith.server.engines.slot import Slot
from tinsmith.server.metrics import Metrics
from tinsmith.server.operations.batches import PassBatch, Single, StepBatch
from tinsmith.server.operations.chooser import (
    BATCHES_AT_ONCE,
    PASSES_AT_ONCE,
    Candidate,
    Choice,
    Move,
    UnderWay,
    choose,
    expected_seconds,
)
from tinsmith.server.operations.endings import Endings
from tinsmith.server.operations.execution import Executor
from tinsmith.server.operations.gaps import GapWatch
from tinsmith.server.operations.gathering import Gathering
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.recovery import Recovery, TakeHistory
from tinsmith.server.operations.residence import Load, Residents, Save
from tinsmith.server.operations.runner import STORE_PAUSE_SECONDS, Free, Parts, Work, run_guarded
from tinsmith.server.operations.shares import Shares
from tinsmith.server.operations.snapshots import Snapshots
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.store import Store
from tinsmith.server.tuning import TUNING, Tuning

logger = logging.getLogger(__name__)

_EARLY_SECONDS = 0.001
"""A timer may ring so much too early."""


class Scheduler:
    def __init__(
        self,
        *,
        store: Store,
        slot: Slot,
        endings: Endings,
        executor: Executor,
        snapshots: Snapshots,
        metrics: Metrics,
        config: ServerConfig,
        tuning: Tuning = TUNING,
        let_go: Free,
        take_history: TakeHistory,
    ) -> None:
        """`let_go` is called with a model that nothing keeps in this slot any more; `take_history`,
        when one is rebuilt."""
        self._store = store
        self._slot = slot
        self._let_go = let_go
        self._endings = endings
        self._snapshots = snapshots
        self._metrics = metrics
        self._config = config
        self._tuning = tuning
        self._recovery = Recovery(executor, take_history)
        self._residents = Residents(slot, config, self.wake)
        self._shares = Shares()
        self._parts = Parts(
            executor=executor,
            endings=endings,
            shares=self._shares,
            metrics=metrics,
            config=config,
            free=self._free,
            reading=Counter(),
        )
        self._gathering = Gathering()
        self._gaps = GapWatch(config.gap_timeout_seconds, time.monotonic)
        self._wake = asyncio.Event()
        self._awake: dict[LiveModel, None] = {}
        """Models that may have something to do; all others are left out of the search for it."""
        self._works: dict[asyncio.Task[None], Work | None] = {}
        """What is under way; None for the end of a gap."""
        self._is_alone = False
        slot.on_start(self.wake_all)

    def wake(self, model: LiveModel) -> None:
        """Something of this model may have become ready. What is at work is looked at when it is
        free."""
        self._awake[model] = None
        if not model.is_busy:
            self._wake.set()

    def wake_all(self) -> None:
        self._awake.update(self._slot.models)
        self._wake.set()

    def _wake_later(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._wake.set)

    async def run(self) -> None:
        watched_at, timer = 0.0, self._wake_later(self._tuning.models_seconds)
        while True:
            await self._wake.wait()
            if time.monotonic() - watched_at >= self._tuning.models_seconds:
                watched_at = time.monotonic()
                timer.cancel()
                timer = self._wake_later(self._tuning.models_seconds + _EARLY_SECONDS)
                for model in self._gaps.over(self._slot.models):
                    self._end_gap(model)
                self._residents.put_away_excess()
                for model in self._slot.models:  # time alone makes snapshots due
                    if not model.is_held or self._is_waiting(model):
                        self._awake[model] = None
            self._wake.clear()
            self._let_go_of_those_leaving()
            if self._slot.is_up:
                self._start_ready()

    async def drain(self) -> None:
        """Wait for what is under way; nothing new starts once `run` is cancelled."""
        while self._works:
            await asyncio.wait(list(self._works))

    @property
    def is_batch_running(self) -> bool:
        return bool(self._pass_batches())

    def _pass_batches(self) -> list[PassBatch]:
        return [work for work in self._works.values() if isinstance(work, PassBatch)]

    def _may_pass(self) -> bool:
        """Whether a batch of passes may begin, beside those that are under way."""
        batches = self._pass_batches()
        return len(batches) < BATCHES_AT_ONCE and not any(map(self._is_short, batches))

    def ahead_of(self, model: LiveModel) -> tuple[int, int]:
        """How many models are served before one that waits for its turn, and the tokens of what
        they have ready and of what is running."""
        had = self._had(model)
        ahead = [
            other
            for other in self._slot.models
            if other is not model
            and not other.is_busy
            and other.queue.head() is not None
            and self._had(other) < had
        ]
        ready = [each for other in ahead for each in other.queue.front(0, 1)]
        return len(ahead), sum(operation.num_tokens for operation in self.running() + ready)

    def running(self) -> list[Operation]:
        """The operations in the engine's hands."""
        return [
            operation
            for work in self._works.values()
            if isinstance(work, PassBatch | StepBatch | Single)
            for operation in work.unfinished
        ]

    def _had(self, model: LiveModel) -> tuple[float, float]:
        """What the owner and the model have had of the engine: who has had least goes first."""
        shares = self._shares
        return shares.of_owner(model.owner), shares.of_model(model.owner, model.model_id)

    # Choosing

    def _let_go_of_those_leaving(self) -> None:
        """Those that are to go on elsewhere, or have nothing to do, and that the engine does not
        hold."""
        for model in list(self._awake):
            is_done = model.next_slot is not None or not (len(model.queue) or model.num_recording)
            if is_done and not model.is_busy and not model.is_held:
                del self._awake[model]
                self._let_go(model)

    def _start_ready(self) -> None:
        ready = [model for model in self._awake if self._is_waiting(model)]
        if not ready:
            self._awake = {}
            return
        under_way = self._under_way(ready)
        max_tokens = self._config.max_gathered_tokens

        def tokens_of(model: LiveModel) -> int:
            """Where no batch may begin, there is no need to look at all that waits."""
            may_pass = under_way.may_pass and model.owner not in under_way.owners_passing
            return max_tokens if may_pass else 0

        holding = filter(self._holds_steps, self._pass_batches())
        in_batch = {model for batch in holding for model in batch.models}
        choice = choose(
            [self._candidate(model, tokens_of(model), model in in_batch) for model in ready],
            under_way,
            self._shares,
            max_tokens=max_tokens,
            max_seconds=self._config.max_gathered_seconds,
            max_attempts=self._config.engine_attempts,
            max_bytes=self._tuning.batch_bytes,
        )
        self._carry_out(choice)
        self._awake = {model: None for model in ready if self._is_waiting(model)}

    def _candidate(
        self, model: LiveModel, max_tokens: int, is_in_batch: bool
    ) -> Candidate[LiveModel]:
        return Candidate(
            model=model,
            model_id=model.model_id,
            owner=model.owner,
            base_model=model.record.base_model,
            front=model.queue.front(max_tokens, PASSES_AT_ONCE),
            is_failed=model.failure is not None,
            is_loaded=model.is_loaded,
            is_snapshot_due=self._snapshots.is_due(model),
            wants_unload=model.may_unload and not len(model.queue),
            is_leaving=model.next_slot is not None,
            is_in_batch=is_in_batch,
            rebuild_attempts=model.rebuild_attempts,
            seconds_per_token=model.seconds_per_token,
        )

    def _under_way(self, ready: Sequence[LiveModel]) -> UnderWay:
        works = [work for work in self._works.values() if work is not None]
        heads = ((model, model.queue.head()) for model in ready)
        passing = [m.model_id for m, head in heads if head is not None and head.is_pass]
        self._gathering.came(passing, time.monotonic())
        return UnderWay(
            is_idle=not self._works,
            is_alone=self._is_alone,
            may_pass=bool(passing) and self._may_pass() and not self._is_held_back(),
            owners_passing=frozenset(o for batch in self._pass_batches() for o in batch.owners)
            | self._parts.reading.keys(),
            has_steps=any(isinstance(work, StepBatch) for work in works),
            num_saving=sum(isinstance(work, Save) for work in works),
            singles_of=Counter(w.models[0].owner for w in works if isinstance(w, Single | Load)),
        )

    def _is_held_back(self) -> bool:
        """Whether the next batch waits for company; then it is looked at again in time."""
        is_stepping = any(isinstance(work, StepBatch) for work in self._works.values())
        seconds = self._gathering.hold(time.monotonic(), is_stepping=is_stepping)
        if seconds:
            self._wake_later(seconds)
        return seconds > 0

    def _is_waiting(self, model: LiveModel) -> bool:
        """Whether the model has something to do that has not begun."""
        if model.is_busy:
            return False
        if model.queue.head() is not None or (model.failure is not None and len(model.queue)):
            return True
        wants_save = model.may_unload or model.next_slot is not None
        return model.is_loaded and (wants_save or self._snapshots.is_due(model))

    # Running

    def _carry_out(self, choice: Choice[LiveModel]) -> None:
        for candidate, move in choice.moves:
            if (work := self._work_of(candidate.model, move)) is not None:
                self._start_work(work, is_alone=choice.is_alone)
        if choice.steps:
            claims = [(c.model, self._take(c.model)) for c in choice.steps]
            self._start_work(StepBatch(self._parts, claims), is_alone=choice.is_alone)
        if choice.passes:
            self._start_work(self._pass_batch(choice.passes), is_alone=choice.is_alone)
            # By then it is no short one, and others may begin beside it.
            self._wake_later(self._tuning.short_batch_seconds)

    def _work_of(self, model: LiveModel, move: Move) -> Work | None:
        if move is Move.FAIL:
            assert model.failure is not None
            self._endings.end_all(model, model.failure)
            return None
        if move is Move.LOAD:
            return Load(
                model,
                self._free,
                store=self._store,
                recovery=self._recovery,
                residents=self._residents,
                endings=self._endings,
                max_attempts=self._config.engine_attempts,
            )
        if move is Move.SINGLE:
            operation = self._take(model)
            return Single(self._parts, model, operation, self._residents.make_room)
        return Save(model, self._free, self._snapshots, is_leaving=move is Move.UNLOAD)

    def _pass_batch(self, chosen: Sequence[Candidate[LiveModel]]) -> PassBatch:
        self._shares.advance(chosen[0].owner, chosen[0].model_id)
        claims, expected = [], {}
        for candidate in chosen:
            operation = self._take(candidate.model)
            seconds = expected_seconds(candidate, operation, self._shares)
            self._shares.charge(candidate.owner, candidate.model_id, seconds)
            claims.append((candidate.model, operation))
            expected[operation] = seconds
        self._metrics.observe("batch_passes", len(claims))
        self._metrics.observe("batch_tokens", sum(o.num_tokens for _, o in claims))
        return PassBatch(self._parts, claims, expected)

    def _take(self, model: LiveModel) -> Operation:
        operation = model.queue.take()
        operation.started_at = time.time()
        self._metrics.observe("wait_seconds", operation.started_at - operation.record.created_at)
        return operation

    def _start_work(self, work: Work, *, is_alone: bool) -> None:
        self._is_alone |= is_alone
        self._start(work, run_guarded(work, self._slot, is_alone=is_alone), work.models)

    def _start(
        self, work: Work | None, running: Coroutine[Any, Any, None], models: list[LiveModel]
    ) -> None:
        for model in models:
            model.is_busy = True
            model.last_used_at = time.time()
        task = asyncio.create_task(running)
        self._works[task] = work
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        work = self._works.pop(task)
        if isinstance(work, PassBatch):
            now = time.monotonic()
            self._gathering.batch_ended(
                [model.model_id for model in work.models],
                num_tokens=work.num_tokens,
                seconds=now - work.began_at,
                at=now,
            )
        elif isinstance(work, StepBatch):
            self._gathering.steps_ended(time.monotonic())
        if not self._works:
            self._is_alone = False
        if self._awake:
            self._wake.set()

    def _free(self, model: LiveModel) -> None:
        """Nothing of the model is under way any more. Its step waits a moment for those of others
        in its batch, and is looked at when that is over."""
        model.is_busy = False
        self._awake[model] = None
        own = [batch for batch in self._pass_batches() if model in batch.models]
        for batch in own:
            if batch.first_done_at is None:
                batch.first_done_at = time.monotonic()
                self._wake_later(self._tuning.short_batch_seconds)
        head = model.queue.head()
        is_step = head is not None and head.is_step
        if not (is_step and any(map(self._holds_steps, own))):
            self._wake.set()

    def _end_gap(self, model: LiveModel) -> None:
        """Fail what waited in vain. What it waited for is refused from now on, if it comes after
        all: nothing of the model is being recorded, and nothing may begin to be."""
        numbers = ", ".join(str(n) for n in model.queue.missing())
        waited = self._config.gap_timeout_seconds
        problem = f"waited {waited:g} s for operation {numbers}, which never arrived"
        last = model.queue.highest_seq_id
        model.record = dataclasses.replace(model.record, closed_seq_id=last)
        self._endings.end_all(model, Failure(problem, "user"))
        model.queue.close(last)
        self._start(None, self._close_gap(model, last, problem), [model])

    async def _close_gap(self, model: LiveModel, last: int, problem: str) -> None:
        # In this order: an operation that is still pending after a crash waits again, and does
        # not run without those before it.
        await model.recorded()
        while True:
            try:
                await self._store.log.close(model.model_id, last, problem)
                break
            except StoreUnavailableError as error:
                logger.warning("%s; trying again in %g s", error, STORE_PAUSE_SECONDS)
                await asyncio.sleep(STORE_PAUSE_SECONDS)
        self._free(model)

    def _is_short(self, batch: PassBatch) -> bool:
        """Whether a batch is expected to end soon, so that others wait for it and gather."""
        has_run = time.monotonic() - batch.began_at
        return max(has_run, batch.expected_seconds) < self._tuning.short_batch_seconds

    def _holds_steps(self, batch: PassBatch) -> bool:
        """Whether the steps of those whose passes are done wait for the others of the batch: for a
        moment, since one owner's long pass is not another's to wait for."""
        done_at = batch.first_done_at
        return done_at is None or time.monotonic() - done_at < self._tuning.short_batch_seconds
