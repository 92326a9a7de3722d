"""Sampling requests: from acceptance to a result that waits to be fetched.

Sampling changes nothing, so requests are not recorded: a client whose request is gone (after a
restart, or when its result was not fetched for long) is told so and sends it again. An engine
that dies costs the request a new start, which its client does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinsmith.engine.base import Engine, ExpertsChosen, Failure, SampleEvent, SampleJob
from tinsmith.errors import EngineError, ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.console.sample_examples import SampledExamples
from tinsmith.server.edge.shares import Shares
from tinsmith.server.engines.pool import EnginePool
from tinsmith.server.engines.slot import Slot
from tinsmith.server.futures import Outcome, Promise, Promises
from tinsmith.server.metrics import Metrics
from tinsmith.server.sampling.completions import Completions
from tinsmith.server.sampling.kept_experts import KeptExperts
from tinsmith.server.sampling.stats import SamplerStats
from tinsmith.server.sampling.stream_buffer import Patience, buffered
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.records import SamplerRecord
from tinsmith.server.tracing import Spans
from tinsmith.server.tuning import TUNING, Tuning
from tinsmith.server.usage import Usage
from tinsmith.types import (
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    SampleRequest,
    SampleResponse,
)
from tinsmith.types.protocol import CLONE_BLOCK
from tinsmith.wire import proto

logger = logging.getLogger(__name__)

REQUEST_PREFIX = "sample-"
"""Tells a sampling request id that is no longer known from one that never was."""

JOURNAL = "samples.journal"
"""The file in the data folder with the samples that clients were promised."""

_STORE_PAUSE_SECONDS = 1.0
_MANY_SEQUENCES = 256
"""A response with this many takes milliseconds to write, and is written in a thread."""

_CANCELLED_TOGETHER = 16
"""Jobs of one request that are given up before others have their turn."""


@dataclass(slots=True, eq=False)
class _Running:
    promise: Promise
    sampler: SamplerRecord
    key: tuple[str, int]
    num_bytes: int
    task: asyncio.Task[None] | None = None

    @property
    def client(self) -> tuple[str, int]:
        """The sampling session, and which of its clients has sent this."""
        sampler_id, seq_id = self.key
        return sampler_id, max(0, seq_id) // CLONE_BLOCK


class Sampling:
    def __init__(
        self,
        *,
        engines: EnginePool,
        usage: Usage,
        stats: SamplerStats,
        examples: SampledExamples,
        metrics: Metrics,
        config: ServerConfig,
        tuning: Tuning = TUNING,
        spans: Spans,
        on_sample: Callable[[SamplerRecord], None],
    ) -> None:
        """`on_sample` hears of each answer when it is counted."""
        self._many_cells = tuning.many_cells
        self._spans = spans
        self._on_sample = on_sample
        self._engines = engines
        self._usage = usage
        self._stats = stats
        self._examples = examples
        self._metrics = metrics
        self._config = config
        self.promises = Promises(config.sample_result_bytes)
        self._running: dict[str, _Running] = {}
        self._by_key: dict[tuple[str, int], tuple[Promise, str]] = {}
        """Promises of numbered requests, and the digests of these."""
        journal = Path(config.data_dir) / JOURNAL if config.sample_use_retrieve_futures else None
        self.completions = Completions(journal)
        self.experts: KeptExperts | None = None
        """The experts that sampled tokens went to, where passes are to use them."""
        if config.router_replay:
            self.experts = KeptExperts(config.router_replay_bytes, config.router_replay_seconds)
        self._jobs = Shares(config.max_queued_samples)
        self._prompt_bytes = Shares(config.max_queued_sample_bytes)
        self.patience = Patience()
        """With those who read streams."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_room(self, owner: str, num_jobs: int = 1, num_bytes: int = 0) -> bool:
        """Whether so much more is within the owner's share of what may be under way."""
        return self._jobs.fits(owner, num_jobs) and self._prompt_bytes.fits(owner, num_bytes)

    def find(self, sampler_id: str, seq_id: int, digest: str) -> Promise | None:
        """The promise of a request that was sent before; another one with its number is refused."""
        promise, first = self._by_key.get((sampler_id, seq_id), (None, digest))
        if digest != first:
            raise ValidationError(
                f"number {seq_id} of {sampler_id} was used for another request before; give each "
                "request a number of its own",
                "seq_id",
            )
        return promise

    def submit(self, sampler: SamplerRecord, request: SampleRequest, digest: str = "") -> Promise:
        """`digest` tells it, where it has a number, from others that come with the same one."""
        request_id = REQUEST_PREFIX + uuid.uuid4().hex
        promise = self.promises.open(request_id, sampler.owner)
        key = (sampler.sampler_id, request.seq_id if request.seq_id is not None else -1)
        if request.seq_id is not None:
            self._by_key[key] = promise, digest
        job = sample_job(request_id, sampler, request)
        running = self._running[request_id] = _Running(promise, sampler, key, held_bytes(job))
        self._enter(sampler.owner, running.num_bytes)
        self.completions.promise(running.client, request_id)
        job = replace(job, reports_experts=self.experts is not None)
        running.task = asyncio.create_task(self._run(running, job))
        return promise

    async def cancel(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        if running.task is not None:
            running.task.cancel()
        self._end(running, Outcome(error="the request was cancelled", category="user"))

    def give_up(self, jobs: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel those that still run, a few at a time: a request may have a thousand, and whoever
        has left does not wait for them. Nobody hears of those that fail meanwhile."""

        async def cancel() -> None:
            for number, task in enumerate(running, 1):
                task.cancel()
                if number % _CANCELLED_TOGETHER == 0:
                    await asyncio.sleep(0)

        for task in jobs:
            task.add_done_callback(_look_at_error)
        if running := [task for task in jobs if not task.done()]:
            self._spawn(cancel())

    async def give_up_abandoned(self, silence: Callable[[str], float]) -> None:
        """Cancel what nobody waits for, of sessions that give no sign of life.

        `silence` says for how many seconds a session has given none. A client that comes back
        after all is told that its request is gone, and sends it again.
        """
        now, patience = time.monotonic(), self._config.sample_abandon_seconds
        for request_id, running in list(self._running.items()):
            promise = running.promise
            quiet = min(now - promise.waited_at, silence(running.sampler.session_id))
            if not promise.waiters and quiet >= patience:
                logger.info("sample %s is given up: its client is gone", request_id)
                await self.cancel(request_id)
                self.promises.forget([request_id])

    async def stream(
        self, sampler: SamplerRecord, job: SampleJob
    ) -> AsyncGenerator[SampleEvent, None]:
        """Run a job and pass its events on; leaving the iterator gives the job up, and so does
        reading it too slowly."""
        num_bytes = held_bytes(job)
        self._enter(sampler.owner, num_bytes)
        try:
            slot = self._engines.sampling_slot(job)
            stream = buffered(self._stream(slot, sampler, job), self.patience)
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    yield event
        finally:
            self._leave(sampler.owner, num_bytes)

    def _enter(self, owner: str, num_bytes: int) -> None:
        self._jobs.add(owner)
        self._prompt_bytes.add(owner, num_bytes)

    def _leave(self, owner: str, num_bytes: int) -> None:
        self._jobs.give_back(owner)
        self._prompt_bytes.give_back(owner, num_bytes)

    async def _stream(
        self, slot: Slot, sampler: SamplerRecord, job: SampleJob
    ) -> AsyncGenerator[SampleEvent, None]:
        slot.num_jobs += 1
        try:
            async with contextlib.aclosing(self._in_slot(slot, sampler, job)) as events:
                async for event in events:
                    yield event
        finally:
            slot.num_jobs -= 1

    async def _in_slot(
        self, slot: Slot, sampler: SamplerRecord, job: SampleJob
    ) -> AsyncGenerator[SampleEvent, None]:
        cause, asked_at = self._spans.here(), time.time()
        engine, generation = await slot.get()
        slot.bases.add(sampler.base_model)
        try:
            async with _weights(slot, engine, generation, sampler) as failure:
                if failure is not None:
                    yield failure
                    return
                began_at = time.time()
                self._spans.record(cause, "queue wait", asked_at, began_at)
                try:
                    async with contextlib.aclosing(self._events(engine, sampler, job)) as events:
                        async for event in events:
                            yield event
                finally:
                    self._spans.record(
                        cause,
                        "engine sample",
                        began_at,
                        attributes={
                            "num_samples": job.num_samples,
                            "num_tokens": job.prompt.length,
                        },
                    )
        except EngineError as error:
            slot.report(generation, error)
            raise

    async def _events(
        self, engine: Engine, sampler: SamplerRecord, job: SampleJob
    ) -> AsyncGenerator[SampleEvent, None]:
        is_over = False
        chosen: ExpertsChosen | None = None
        try:
            async for event in engine.sample(job):
                if isinstance(event, ExpertsChosen):
                    chosen = event
                    continue
                is_over = isinstance(event, SampleResponse | Failure)
                if isinstance(event, SampleResponse):
                    self._count(sampler, job, event)
                    if chosen is not None and self.experts is not None:
                        self.experts.keep(sampler.owner, job, event, chosen)
                yield event
        except EngineError:
            is_over = True
            raise
        finally:
            if not is_over:
                # The reader that left may be a cancelled task, in which nothing can be awaited any
                # more.
                self._spawn(_cancel(engine, job.job_id))

    def expire(self) -> None:
        now = time.time()
        if self.experts is not None:
            self.experts.expire()
        self.promises.expire(
            retrieved_before=now - 60.0, finished_before=now - self._config.sample_retention_seconds
        )
        alive = self.promises.get
        known = self._by_key.items()
        self._by_key = {key: (p, d) for key, (p, d) in known if alive(p.request_id) is p}
        retention = self._config.sample_retention_seconds
        self.completions.expire(lambda request_id: alive(request_id) is not None, retention)

    def begin_drain(self) -> None:
        """Let everybody who waits go, and hold nobody from now on."""
        self.promises.close()
        self.completions.begin_drain()

    async def close(self) -> None:
        tasks = [r.task for r in self._running.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        self.completions.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, running: _Running, job: SampleJob) -> None:
        started = time.perf_counter()
        try:
            outcome = await self._outcome(running, job)
        except EngineError as error:
            outcome = Outcome(error=f"the engine died repeatedly: {error}", category="server")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("sampling request %s failed", job.job_id)
            outcome = Outcome(
                error=f"an internal error ended this request ({type(error).__name__})",
                category="server",
            )
        self._metrics.observe("sample_seconds", time.perf_counter() - started)
        self._end(running, outcome)

    async def _outcome(self, running: _Running, job: SampleJob) -> Outcome:
        attempts = self._config.engine_attempts
        last: EngineError | None = None
        slot = self._engines.sampling_slot(job)
        number = 1
        while number <= attempts:
            # After as many deaths as it may survive, the job is suspected of causing them.
            is_suspect = number == attempts > 1
            if not slot.is_open:
                # Otherwise it stays in its slot: what kills one engine must not be tried on all of
                # them.
                slot = self._engines.sampling_slot(job)
            try:
                async with slot.exclusive() if is_suspect else slot.shared():
                    return await self._attempt(slot, running, job)
            except EngineError as error:
                last = error
                number += 1
            except StoreUnavailableError as error:
                logger.warning("a sample waits for its weights: %s", error)
                await asyncio.sleep(_STORE_PAUSE_SECONDS)
        raise last or EngineError("the engine gave no result")

    async def _attempt(self, slot: Slot, running: _Running, job: SampleJob) -> Outcome:
        async with contextlib.aclosing(self._stream(slot, running.sampler, job)) as events:
            async for event in events:
                if isinstance(event, Failure):
                    return Outcome(error=event.message, category=event.category)
                if isinstance(event, SampleResponse):
                    return Outcome(result_type="sample", body=await self._encoded(event))
        raise EngineError("the engine gave no result")

    async def _encoded(self, response: SampleResponse) -> bytes:
        if len(response.sequences) < _MANY_SEQUENCES and _num_cells(response) < self._many_cells:
            return proto.encode_sample(response)
        return await asyncio.to_thread(proto.encode_sample, response)

    def _end(self, running: _Running, outcome: Outcome) -> None:
        request_id = running.promise.request_id
        if self._running.pop(request_id, None) is None:
            return
        self._leave(running.promise.owner, running.num_bytes)
        self._metrics.count("samples", status="failed" if outcome.error else "done")
        self.promises.resolve(request_id, outcome, time.time())
        completion: FutureCompletion = (
            FutureFailed(request_id=request_id)
            if outcome.error is not None
            else FutureFinished(
                request_id=request_id, response_payload_uncompressed_size=len(outcome.body)
            )
        )
        self.completions.add(running.client, completion)

    def _count(self, sampler: SamplerRecord, job: SampleJob, response: SampleResponse) -> None:
        cached = response.prompt_cache_hit_tokens
        sampled = sum(len(s.tokens_np) for s in response.sequences if s.tokens_np is not None)
        for kind, amount in (
            ("sampling_prefill", job.prompt.length - cached),
            ("sampling_prefill_cached", cached),
            ("sampling_sample", sampled),
        ):
            self._usage.count(
                sampler.owner,
                sampler.base_model,
                sampler.session_id,
                kind,
                amount,
                sampler.model_id or "",
            )
        self._stats.count(sampler, job, response)
        self._examples.keep(sampler, job, response)
        self._metrics.count("sampled_tokens", sampled)
        self._metrics.count("prefilled_tokens", job.prompt.length - cached)
        self._on_sample(sampler)


def _num_cells(response: SampleResponse) -> int:
    tops = [response.topk_prompt_logprobs_np, *(s.topk_logprobs_np for s in response.sequences)]
    drawn, targets = response.prompt_alt_tokens, response.target_prompt_logprobs
    return (
        sum(top.token_ids.size for top in tops if top is not None)
        + (0 if drawn is None else drawn.tokens.numpy.size)
        + (0 if targets is None else targets.numpy.size)
    )


def held_bytes(job: SampleJob) -> int:
    """What a request takes while it is under way, about: its prompt, the tokens to score there, and
    what stops its samples."""
    targets, stop = job.target_prompt_logprobs, job.params.stop
    stops = [stop] if isinstance(stop, str) else stop or ()
    return (
        job.prompt.nbytes
        + (0 if targets is None else targets.nbytes)
        + sum(sys.getsizeof(each) for each in stops)
    )


def _weights(
    slot: Slot, engine: Engine, generation: int, sampler: SamplerRecord
) -> contextlib.AbstractAsyncContextManager[Failure | None]:
    """Holds the sampler's weights in the engine, where it has any of its own."""
    if sampler.weights_id is None:
        return contextlib.nullcontext()
    return slot.samplers.hold(
        engine, generation, sampler.weights_id, sampler.base_model, sampler.owner
    )


async def _cancel(engine: Engine, job_id: str) -> None:
    with contextlib.suppress(EngineError):
        await engine.cancel(job_id)


def sample_job(request_id: str, sampler: SamplerRecord, request: SampleRequest) -> SampleJob:
    return SampleJob(
        job_id=request_id,
        base_model=sampler.base_model,
        weights_id=sampler.weights_id,
        prompt=request.prompt,
        params=request.sampling_params,
        num_samples=request.num_samples,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=request.target_prompt_logprobs,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        scope=sampler.owner,
    )


def _look_at_error(task: asyncio.Task[Any]) -> None:
    """asyncio reports an error that nobody has looked at."""
    if not task.cancelled():
        task.exception()
