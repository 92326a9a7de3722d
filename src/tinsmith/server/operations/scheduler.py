"""What runs next.

Within a model, operations run in the order of their numbers. Between models, passes take turns by
tokens: the one that has had the fewest goes first. The passes of all models of one base model that
are ready go to the engine together, up to a budget; while a batch runs the next gathers. Each pass
is answered as soon as its own part is done, and a model's optimizer step starts the moment its
last pass is, whatever else of the batch is still running.

An engine that dies takes nothing with it: what was under way goes back to its place in the queue,
and the models are rebuilt in the next engine. What was under way at several deaths in a row, an
operation or the rebuilding of a model, is suspected of being their cause: it runs by itself, so
that nothing else is blamed for it, and is finally given up.

While the store cannot be used, operations wait where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tinsmith.engine.base import Engine, Failure, Pass, Step
from tinsmith.errors import EngineError, TinkerError
from tinsmith.server.config import ServerConfig
from tinsmith.server.engines import EngineSupervisor
from tinsmith.server.metrics import Metrics
from tinsmith.server.operations.endings import Endings
from tinsmith.server.operations.execution import (
    DiskTroubleError,
    Executor,
    failed,
    pass_done,
    step_done,
)
from tinsmith.server.operations.kinds import Operation
from tinsmith.server.operations.live_models import LiveModel, LiveModels
from tinsmith.server.operations.recovery import RebuildError, Recovery
from tinsmith.server.operations.snapshots import Snapshots
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.records import Finish
from tinsmith.server.store.store import Store

logger = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 1.0
_SAVING_AT_ONCE = 2
"""Snapshots under way at a time: the disk is also what every request waits for."""

_STORE_PAUSE_SECONDS = 1.0
"""How long an operation waits before it asks a store again that could not be used."""

Claim = tuple[LiveModel, Operation]


class Scheduler:
    def __init__(
        self,
        *,
        store: Store,
        engines: EngineSupervisor,
        models: LiveModels,
        endings: Endings,
        executor: Executor,
        recovery: Recovery,
        snapshots: Snapshots,
        metrics: Metrics,
        config: ServerConfig,
        give_up: Callable[[LiveModel, list[int]], Coroutine[Any, Any, None]],
    ) -> None:
        """`give_up` records numbers of a model that were waited for in vain."""
        self._store = store
        self._engines = engines
        self._models = models
        self._endings = endings
        self._executor = executor
        self._recovery = recovery
        self._snapshots = snapshots
        self._metrics = metrics
        self._config = config
        self._give_up = give_up
        self._wake = asyncio.Event()
        self._awake: dict[LiveModel, None] = {}
        """Models that may have something to do; all others are left out of the search for it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_batch_running = False
        self._is_suspect_running = False
        self._num_saving = 0
        self._turn_tokens = 0.0
        engines.on_start(self.wake_all)

    def wake(self, model: LiveModel) -> None:
        """Something of this model may have become ready."""
        self._awake[model] = None
        self._wake.set()

    def wake_all(self) -> None:
        self._awake.update(dict.fromkeys(self._models))
        self._wake.set()

    async def run(self) -> None:
        watched_at = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HOUSEKEEPING_SECONDS):
                    await self._wake.wait()
            if time.monotonic() - watched_at >= _HOUSEKEEPING_SECONDS:
                watched_at = time.monotonic()
                self._watch_gaps()
                self.wake_all()  # time alone makes snapshots due
            self._wake.clear()
            if self._engines.is_up:
                self._start_ready()

    async def drain(self) -> None:
        """Wait for what is under way; nothing new starts once `run` is cancelled."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    # Choosing

    def _start_ready(self) -> None:
        if self._is_suspect_running:
            return
        ready = [model for model in self._awake if not model.is_busy]
        suspects = [model for model in ready if self._is_suspect(model)]
        if suspects:
            # Nothing new starts until what is under way is done and the suspects have run alone.
            if not self._tasks:
                self._start_suspect(suspects[0])
            return
        steps: list[LiveModel] = []
        passes: list[LiveModel] = []
        for model in ready:
            head = model.queue.head()
            if model.failure is not None:
                self._fail_all(model, model.failure)
            elif (work := self._work_of(model)) is not None:
                self._start(work, model)
            elif head is not None and head.is_pass:
                passes.append(model)
            elif head is not None:
                steps.append(model)
        if steps:
            claims = [(model, self._take(model)) for model in steps]
            self._start(self._run_steps(claims), *steps)
        if passes and not self._is_batch_running:
            claims = self._claim_passes(passes)
            self._is_batch_running = True
            self._start(self._run_passes(claims), *{model for model, _ in claims})
        self._awake = {model: None for model in ready if self._is_waiting(model)}

    def _is_waiting(self, model: LiveModel) -> bool:
        """Whether the model has something to do that could not start yet."""
        if model.is_busy:
            return False
        is_loaded = model.generation == self._engines.generation
        return model.queue.head() is not None or (
            is_loaded and (model.wants_unload or self._snapshots.is_due(model))
        )

    def _work_of(self, model: LiveModel) -> Coroutine[Any, Any, None] | None:
        """What the model needs that concerns no other; None for a pass, a step, or nothing."""
        is_loaded = model.generation == self._engines.generation
        may_save = is_loaded and self._num_saving < _SAVING_AT_ONCE
        head = model.queue.head()
        if may_save and self._snapshots.is_due(model):
            return self._save(self._take_snapshot(model))
        if head is None:
            is_leaving = may_save and model.wants_unload and not len(model.queue)
            return self._save(self._unload(model)) if is_leaving else None
        if head.seq_id > 0 and not is_loaded:
            return self._load(model)
        if head.is_pass or head.record.kind == "optim_step":
            return None
        return self._run_single(model, self._take(model))

    def _is_suspect(self, model: LiveModel) -> bool:
        """Whether the model's next move was under way at all but one of the deaths allowed."""
        head = model.queue.head()
        if head is None or model.failure is not None:
            return False
        return max(head.attempts, model.rebuild_attempts) >= self._config.engine_attempts - 1 > 0

    def _start_suspect(self, model: LiveModel) -> None:
        work = self._work_of(model)
        if work is None:
            claim = (model, self._take(model))
            if claim[1].is_pass:
                self._is_batch_running = True
                model.num_claimed += 1
                work = self._run_passes([claim])
            else:
                work = self._run_steps([claim])
        self._is_suspect_running = True
        self._start(self._alone(work), model)

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._engines.alone():
                await work
        finally:
            self._is_suspect_running = False

    def _claim_passes(self, ready: list[LiveModel]) -> list[Claim]:
        """Passes for one batch, in fair turns, in order within each model."""
        for model in ready:
            # A model that was idle does not save up turns.
            model.tokens_served = max(model.tokens_served, self._turn_tokens)
        claims: list[Claim] = []
        budget = self._config.max_gathered_tokens
        base_model = min(ready, key=lambda m: m.tokens_served).record.base_model
        ready = [m for m in ready if m.record.base_model == base_model]
        while ready:
            model = min(ready, key=lambda m: m.tokens_served)
            head = model.queue.head()
            if head is None or not head.is_pass:
                ready.remove(model)
                continue
            if claims and (head.num_tokens > budget or head.attempts):
                break
            claims.append((model, self._take(model)))
            self._turn_tokens = model.tokens_served
            model.tokens_served += max(1, head.num_tokens)
            model.num_claimed += 1
            budget -= head.num_tokens
            if head.attempts:
                break
        self._metrics.observe("batch_passes", len(claims))
        self._metrics.observe("batch_tokens", self._config.max_gathered_tokens - budget)
        return claims

    def _take(self, model: LiveModel) -> Operation:
        operation = model.queue.take()
        self._metrics.observe("wait_seconds", time.time() - operation.record.created_at)
        return operation

    # Running

    def _start(self, work: Coroutine[Any, Any, None], *models: LiveModel) -> None:
        for model in models:
            model.is_busy = True
            model.last_used_at = time.time()
            model.gap_since = None
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake.set()

    def _free(self, model: LiveModel) -> None:
        """Nothing of the model is under way any more."""
        model.is_busy = False
        self.wake(model)

    async def _run_passes(self, claims: list[Claim]) -> None:
        unfinished = dict(enumerate(claims))
        engine, generation = await self._engines.get()
        try:
            claims = self._still_loaded(claims, generation)
            items: list[Pass] = []
            runnable: list[Claim] = []
            unfinished = dict(enumerate(claims))
            for index, (model, operation) in enumerate(claims):
                item = await self._executor.pass_of(model, operation)
                if isinstance(item, Failure):
                    del unfinished[index]
                    self._end_pass(model, operation, failed(operation, item))
                else:
                    items.append(item)
                    runnable.append((model, operation))
            unfinished = dict(enumerate(runnable))
            if items:
                async for finished in engine.run_passes(items):
                    model, operation = unfinished.pop(finished.index)
                    if isinstance(finished.result, Failure):
                        finish = failed(operation, finished.result)
                    else:
                        finish = pass_done(operation, finished.result)
                    self._end_pass(model, operation, finish)
        except EngineError as error:
            self._engines.report(generation, error)
            # Models whose passes are all done may be busy with something else by now.
            for model, operation in unfinished.values():
                self._put_back(model, operation, error)
                model.num_claimed = 0
                self._free(model)
        except StoreUnavailableError as error:
            await self._wait_for_store(error)
            for model, operation in unfinished.values():
                model.queue.put(operation)
                model.num_claimed = 0
                self._free(model)
        except Exception as error:
            for model, operation in unfinished.values():
                self._end_pass(model, operation, self._broken(model, operation, error))
        finally:
            self._is_batch_running = False

    def _still_loaded(self, claims: list[Claim], generation: int) -> list[Claim]:
        """The claims whose models are in this engine; the others go back, it died meanwhile."""
        kept = []
        for model, operation in claims:
            if model.generation == generation:
                kept.append((model, operation))
            else:
                model.queue.put(operation)
                model.num_claimed = 0
                self._free(model)
        return kept

    def _end_pass(self, model: LiveModel, operation: Operation, finish: Finish) -> None:
        self._endings.end(model, operation, finish)
        model.num_claimed -= 1
        if model.num_claimed <= 0:
            # Its part of the batch is done: the step behind it need not wait for the others.
            self._free(model)

    async def _run_steps(self, claims: list[Claim]) -> None:
        engine, generation = await self._engines.get()
        unfinished = claims
        try:
            unfinished = self._still_loaded(claims, generation)
            steps: list[Step] = [await self._executor.step_of(m, o) for m, o in unfinished]
            started = time.perf_counter()
            results = await engine.step(steps) if steps else []
            self._metrics.observe("step_seconds", time.perf_counter() - started)
            for (model, operation), result in zip(unfinished, results, strict=True):
                if isinstance(result, Failure):
                    self._doubt(model, result.category)
                    self._endings.end(model, operation, failed(operation, result))
                else:
                    self._endings.end(model, operation, step_done(operation, result))
        except EngineError as error:
            self._engines.report(generation, error)
            for model, operation in unfinished:
                self._put_back(model, operation, error)
        except StoreUnavailableError as error:
            await self._wait_for_store(error)
            for model, operation in unfinished:
                model.queue.put(operation)
        except Exception as error:
            for model, operation in unfinished:
                self._endings.end(model, operation, self._broken(model, operation, error))
        finally:
            for model, _ in unfinished:
                self._free(model)

    async def _run_single(self, model: LiveModel, operation: Operation) -> None:
        engine, generation = await self._engines.get()
        try:
            if operation.seq_id > 0 and model.generation != generation:
                model.queue.put(operation)
                return
            finish = await self._executor.run(engine, model, operation)
            if operation.seq_id == 0:
                if finish.status == "done":
                    model.generation = generation
                    await self._make_room(engine, model)
                else:
                    model.failure = Failure(
                        f"model {model.model_id} was not created: {finish.error}", "user"
                    )
            elif finish.status == "failed":
                self._doubt(model, finish.category)
            self._endings.end(model, operation, finish)
        except EngineError as error:
            self._engines.report(generation, error)
            self._put_back(model, operation, error)
        except (StoreUnavailableError, DiskTroubleError) as error:
            await self._wait_for_store(error)
            operation.disk_troubles += isinstance(error, DiskTroubleError)
            if operation.disk_troubles * _STORE_PAUSE_SECONDS >= self._config.disk_patience_seconds:
                self._endings.end(
                    model, operation, failed(operation, Failure(str(error), "server"))
                )
                return
            if operation.seq_id == 0:
                # It may have been made by now; it is made again.
                with contextlib.suppress(EngineError):
                    await engine.unload_adapter(model.model_id)
            model.queue.put(operation)
        except Exception as error:
            self._endings.end(model, operation, self._broken(model, operation, error))
        finally:
            self._free(model)

    async def _load(self, model: LiveModel) -> None:
        engine, generation = await self._engines.get()
        try:
            await self._make_room(engine, model)
            await self._recovery.rebuild(engine, model)
            model.generation = generation
            model.rebuild_attempts = 0
        except EngineError as error:
            self._engines.report(generation, error)
            model.rebuild_attempts += 1
            if model.rebuild_attempts >= self._config.engine_attempts:
                logger.error("model %s is set aside: %s", model.model_id, error)
                problem = f"the engine died each time model {model.model_id} was rebuilt"
                model.failure = Failure(
                    f"{problem}, so it is set aside until the server starts again: {error}",
                    "server",
                )
        except StoreUnavailableError as error:
            await self._wait_for_store(error)
        except RebuildError as error:
            logger.exception("model %s cannot be rebuilt", model.model_id)
            model.failure = Failure(f"model {model.model_id} is lost: {error}", "server")
            await self._store.models.update(model.model_id, {"is_corrupted": True})
        except Exception as error:
            logger.exception("rebuilding model %s failed", model.model_id)
            problem = f"model {model.model_id} could not be loaded: {type(error).__name__}"
            self._fail_all(model, Failure(problem, "server"))
        finally:
            self._free(model)

    def _save(self, work: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        """That work, counted among what is being saved from now until it ends."""
        self._num_saving += 1

        async def save() -> None:
            try:
                await work
            finally:
                self._num_saving -= 1

        return save()

    async def _take_snapshot(self, model: LiveModel) -> None:
        engine, generation = await self._engines.get()
        try:
            if model.generation == generation:
                await self._snapshots.take(engine, model)
        except EngineError as error:
            self._engines.report(generation, error)
        except Exception:
            # The log goes on growing; another attempt is made when the next snapshot is due.
            logger.exception("a snapshot of %s failed", model.model_id)
            model.wants_snapshot = False
            model.oldest_since_snapshot = time.time()
            model.steps_since_snapshot = model.bytes_since_snapshot = 0
        finally:
            self._free(model)

    async def _unload(self, model: LiveModel) -> None:
        """Put a model on disk and out of the engine's memory."""
        engine, generation = await self._engines.get()
        try:
            model.wants_unload = False
            if model.generation == generation:
                if model.is_changed:
                    await self._snapshots.take(engine, model)
                await engine.unload_adapter(model.model_id)
                logger.info("unloaded %s", model.model_id)
            model.generation = 0
        except EngineError as error:
            self._engines.report(generation, error)
        except Exception:
            logger.exception("unloading %s failed", model.model_id)
        finally:
            self._free(model)

    async def _make_room(self, engine: Engine, incoming: LiveModel) -> None:
        """Mark idle models for the disk, the longest idle first, where there are too many.

        While the engine holds more memory than it should, one goes for each that comes.
        """
        loaded = [m for m in self._models if m.generation == self._engines.generation]
        excess = len(loaded) + 1 - self._config.max_loaded_models
        limit = self._config.max_engine_bytes
        if limit is not None and (await engine.health()).memory_bytes > limit:
            excess = max(excess, 1)
        idle = [m for m in loaded if not m.is_busy and not len(m.queue) and m is not incoming]
        for model in sorted(idle, key=lambda m: m.last_used_at)[: max(0, excess)]:
            model.wants_unload = True
            self.wake(model)

    # Ending

    def _put_back(self, model: LiveModel, operation: Operation, error: EngineError) -> None:
        operation.attempts += 1
        if operation.attempts < self._config.engine_attempts:
            model.queue.put(operation)
            return
        problem = f"the engine died {operation.attempts} times while this was under way: {error}"
        self._endings.end(model, operation, failed(operation, Failure(problem, "server")))

    async def _wait_for_store(self, error: TinkerError) -> None:
        logger.warning("%s; trying again in %g s", error, _STORE_PAUSE_SECONDS)
        await asyncio.sleep(_STORE_PAUSE_SECONDS)

    def _doubt(self, model: LiveModel, category: str | None) -> None:
        """A failure of the engine's own may have left the model half changed: rebuild it."""
        if category == "server":
            model.generation = 0

    def _broken(self, model: LiveModel, operation: Operation, error: Exception) -> Finish:
        model.generation = 0
        logger.exception("operation %s failed", operation.record.request_id, exc_info=error)
        problem = f"an internal error ended this request ({type(error).__name__}: {error})"
        return failed(operation, Failure(problem, "server"))

    def _fail_all(self, model: LiveModel, failure: Failure) -> None:
        for operation in model.queue.drop_all():
            self._endings.end(model, operation, failed(operation, failure))

    def _watch_gaps(self) -> None:
        now = time.time()
        for model in self._models:
            if model.is_busy or not len(model.queue) or model.queue.head() is not None:
                model.gap_since = None
            elif model.gap_since is None:
                model.gap_since = now
            elif now - model.gap_since >= self._config.gap_timeout_seconds:
                self._start(self._end_gap(model, model.queue.missing()), model)

    async def _end_gap(self, model: LiveModel, missing: list[int]) -> None:
        try:
            await self._give_up(model, missing)
            numbers = ", ".join(str(n) for n in missing[:10])
            waited = self._config.gap_timeout_seconds
            problem = f"waited {waited:g} s for operation {numbers}, which never arrived"
            self._fail_all(model, Failure(problem, "user"))
            for number in missing:
                model.queue.use_up(number)
        except StoreUnavailableError as error:
            await self._wait_for_store(error)
        finally:
            self._free(model)
