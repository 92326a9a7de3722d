"""Sampling requests: from acceptance to a result that waits to be fetched.

Sampling changes nothing, so requests are not recorded: a client whose request is gone (after a
restart, or when its result was not fetched for long) is told so and sends it again. An engine
that dies costs the request a new start, which its client does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tinsmith.engine.base import Engine, Failure, SampleEvent, SampleJob
from tinsmith.errors import EngineError
from tinsmith.server.config import ServerConfig
from tinsmith.server.engines import EngineSupervisor
from tinsmith.server.futures import Outcome, Promise, Promises
from tinsmith.server.metrics import Metrics
from tinsmith.server.sampling.loaded import LoadedSamplers
from tinsmith.server.store.records import SamplerRecord
from tinsmith.server.usage import Usage
from tinsmith.types import (
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    SampleRequest,
    SampleResponse,
)
from tinsmith.wire import proto

logger = logging.getLogger(__name__)

REQUEST_PREFIX = "sample-"
"""Tells a sampling request id that is no longer known from one that never was."""

CLONE_BLOCK = 10**9
"""Each client of a sampler numbers its requests in a block of this size."""


@dataclass(slots=True, eq=False)
class _Channel:
    """The completions of one client of a sampler, for `retrieve_futures`."""

    completions: list[tuple[int, FutureCompletion]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Running:
    promise: Promise
    sampler: SamplerRecord
    key: tuple[str, int]
    num_bytes: int
    task: asyncio.Task[None] | None = None


class Sampling:
    def __init__(
        self,
        *,
        engines: EngineSupervisor,
        loaded: LoadedSamplers,
        usage: Usage,
        metrics: Metrics,
        config: ServerConfig,
    ) -> None:
        self._engines = engines
        self._loaded = loaded
        self._usage = usage
        self._metrics = metrics
        self._config = config
        self.promises = Promises(config.sample_result_bytes)
        self._running: dict[str, _Running] = {}
        self._by_key: dict[tuple[str, int], Promise] = {}
        self._channels: dict[tuple[str, int], _Channel] = {}
        self._cursor = itertools.count(1)
        self._prompt_bytes = 0
        self.num_streams = 0
        """Jobs in the engine's hands, those that others than `submit` started too."""
        self._is_draining = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_full(self) -> bool:
        return (
            max(len(self._running), self.num_streams) >= self._config.max_queued_samples
            or self._prompt_bytes >= self._config.max_queued_sample_bytes
        )

    def find(self, sampler_id: str, seq_id: int) -> Promise | None:
        """The promise of a request that was sent before."""
        return self._by_key.get((sampler_id, seq_id))

    def submit(self, sampler: SamplerRecord, request: SampleRequest) -> Promise:
        request_id = REQUEST_PREFIX + uuid.uuid4().hex
        promise = self.promises.open(request_id, sampler.owner)
        key = (sampler.sampler_id, request.seq_id if request.seq_id is not None else -1)
        if request.seq_id is not None:
            self._by_key[key] = promise
        running = self._running[request_id] = _Running(promise, sampler, key, request.prompt.nbytes)
        self._prompt_bytes += running.num_bytes
        running.task = asyncio.create_task(
            self._run(running, sample_job(request_id, sampler, request))
        )
        return promise

    async def cancel(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        if running.task is not None:
            running.task.cancel()
        self._end(running, Outcome(error="the request was cancelled", category="user"))

    async def stream(
        self, sampler: SamplerRecord, job: SampleJob
    ) -> AsyncGenerator[SampleEvent, None]:
        """Run a job and pass its events on; leaving the iterator gives the job up."""
        engine, generation = await self._engines.get()
        self.num_streams += 1
        try:
            async with self._weights(engine, generation, sampler) as failure:
                if failure is not None:
                    yield failure
                    return
                async with contextlib.aclosing(self._events(engine, sampler, job)) as events:
                    async for event in events:
                        yield event
        except EngineError as error:
            self._engines.report(generation, error)
            raise
        finally:
            self.num_streams -= 1

    def _weights(
        self, engine: Engine, generation: int, sampler: SamplerRecord
    ) -> contextlib.AbstractAsyncContextManager[Failure | None]:
        """Holds the sampler's weights in the engine, where it has any of its own."""
        if sampler.weights_id is None:
            return contextlib.nullcontext()
        return self._loaded.hold(
            engine, generation, sampler.weights_id, sampler.base_model, sampler.owner
        )

    async def _events(
        self, engine: Engine, sampler: SamplerRecord, job: SampleJob
    ) -> AsyncGenerator[SampleEvent, None]:
        is_over = False
        try:
            async for event in engine.sample(job):
                is_over = isinstance(event, SampleResponse | Failure)
                if isinstance(event, SampleResponse):
                    self._count(sampler, job, event)
                yield event
        except EngineError:
            is_over = True
            raise
        finally:
            if not is_over:
                # Whoever left may be a cancelled task, in which nothing can be awaited any more.
                self._spawn(_cancel(engine, job.job_id))

    async def completions(
        self, sampler_id: str, clone: int, after: int, seconds: float
    ) -> list[tuple[int, FutureCompletion]]:
        """What ended since cursor `after`; waits for the first if nothing did."""
        channel = self._channels.setdefault((sampler_id, clone), _Channel())
        channel.completions = [c for c in channel.completions if c[0] > after]
        if not channel.completions and not self._is_draining:
            channel.arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await channel.arrived.wait()
        return [c for c in channel.completions if c[0] > after]

    def expire(self) -> None:
        now = time.time()
        self.promises.expire(
            retrieved_before=now - 60.0, finished_before=now - self._config.sample_retention_seconds
        )
        alive = self.promises.get
        self._by_key = {k: p for k, p in self._by_key.items() if alive(p.request_id) is p}
        for channel in self._channels.values():
            channel.completions = [c for c in channel.completions if alive(c[1].request_id)]

    def begin_drain(self) -> None:
        """Let everybody who waits go, and hold nobody from now on."""
        self._is_draining = True
        self.promises.close()
        for channel in self._channels.values():
            channel.arrived.set()

    async def close(self) -> None:
        tasks = [r.task for r in self._running.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)

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
        for number in range(1, attempts + 1):
            # Having been there at all deaths but the last allowed one, it is suspected of them.
            is_suspect = number == attempts > 1
            try:
                async with self._engines.exclusive() if is_suspect else self._engines.shared():
                    return await self._attempt(running, job)
            except EngineError as error:
                last = error
        raise last or EngineError("the engine gave no result")

    async def _attempt(self, running: _Running, job: SampleJob) -> Outcome:
        async with contextlib.aclosing(self.stream(running.sampler, job)) as events:
            async for event in events:
                if isinstance(event, Failure):
                    return Outcome(error=event.message, category=event.category)
                if isinstance(event, SampleResponse):
                    return Outcome(result_type="sample", body=proto.encode_sample(event))
        raise EngineError("the engine gave no result")

    def _end(self, running: _Running, outcome: Outcome) -> None:
        request_id = running.promise.request_id
        if self._running.pop(request_id, None) is None:
            return
        self._prompt_bytes -= running.num_bytes
        self._metrics.count("samples", status="failed" if outcome.error else "done")
        self.promises.resolve(request_id, outcome, time.time())
        channel = self._channels.setdefault(
            (running.key[0], max(0, running.key[1]) // CLONE_BLOCK), _Channel()
        )
        completion: FutureCompletion = (
            FutureFailed(request_id=request_id)
            if outcome.error is not None
            else FutureFinished(
                request_id=request_id, response_payload_uncompressed_size=len(outcome.body)
            )
        )
        channel.completions.append((next(self._cursor), completion))
        channel.arrived.set()

    def _count(self, sampler: SamplerRecord, job: SampleJob, response: SampleResponse) -> None:
        cached = response.prompt_cache_hit_tokens
        sampled = sum(len(s.tokens_np) for s in response.sequences if s.tokens_np is not None)
        for kind, amount in (
            ("sampling_prefill", job.prompt.length - cached),
            ("sampling_prefill_cached", cached),
            ("sampling_sample", sampled),
        ):
            self._usage.count(sampler.owner, sampler.base_model, sampler.session_id, kind, amount)
        self._metrics.count("sampled_tokens", sampled)
        self._metrics.count("prefilled_tokens", job.prompt.length - cached)


async def _cancel(engine: Engine, job_id: str) -> None:
    with contextlib.suppress(EngineError):
        await engine.cancel(job_id)


def sample_job(request_id: str, sampler: SamplerRecord, request: SampleRequest) -> SampleJob:
    return SampleJob(
        job_id=request_id,
        base_model=sampler.base_model,
        sampler_id=sampler.weights_id,
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
