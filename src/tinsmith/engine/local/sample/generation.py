"""Continuous batching: many sampling requests over one base model.

A step is one forward pass: the next token of every running sequence (decode), and beside them a
bounded number of prompt tokens (prefill), so that a long prompt never holds up those who are
already running. Who takes part is the scheduler's decision; here the step is run, and what it
brought is handed to the sequences and reported.

On CUDA a decoding step is launched before the last one is read, so that the device works while the
program looks at what it brought. A sequence that turns out to have stopped is then in one step too
many, and what that brings for it is dropped.

In deterministic mode every sequence goes through the model by itself, prompts are never taken from
the cache, and nothing gives way, so that a request's results cannot depend on any other.

Requests are checked before they come here. The interleaving with training is the caller's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from tinsmith.detokenizer import Detokenize
from tinsmith.engine.base import (
    EngineSampleEvent,
    Failure,
    FailureCategory,
    SampleJob,
    TokensSampled,
)
from tinsmith.engine.grammar import CompiledGrammar, Tokens
from tinsmith.engine.local import kernels
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.memory_plan import MemoryPlan, plan_memory
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.foreign.config import is_foreign
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.stacked_adapters import AdapterStacks
from tinsmith.engine.local.sample.choosing import NOT_FINITE
from tinsmith.engine.local.sample.compiling import Compiling
from tinsmith.engine.local.sample.kvcache import CacheShape, KVCache
from tinsmith.engine.local.sample.launched import Launched, Launches
from tinsmith.engine.local.sample.mixed_step import Chunk, MixedStep, requests_of
from tinsmith.engine.local.sample.next_tokens import NextToken
from tinsmith.engine.local.sample.scheduler import Failing, Scheduler
from tinsmith.engine.local.sample.sequences import Request, Sequence
from tinsmith.errors import ValidationError

_PATIENCE = 0.002
"""Seconds that a step waits for a grammar where there is nothing else to do."""

_log = logging.getLogger(__name__)

_SHARED_ROWS = 64
"""Rows of a step on the CPU that several scopes share. There a step takes longer by the row, so
that whoever has one would wait for another's 255; and more rows make it little more efficient."""


class Generator:
    """Samples one base model. Not safe for threads: one caller, step after step."""

    def __init__(
        self,
        decoder: Decoder,
        config: LocalEngineConfig,
        detokenize: Detokenize | None = None,
        tokens: Tokens | None = None,
        *,
        prefill_tokens: int | None = None,
        use_graphs: bool = True,
        decode: Launches | None = None,
        cache_bytes: int | None = None,
        adapter_stacks: AdapterStacks | None = None,
    ) -> None:
        """`detokenize` is needed for stop strings only; it must keep special tokens. `tokens`
        are needed for grammars only.

        `prefill_tokens` is the most prompt tokens in one step: 256 on the CPU, where they take
        about as long as a step should, and 8192 on CUDA. Without `use_graphs` the kernels of a
        step on CUDA are launched one by one. `decode` takes the place of that step.
        `cache_bytes` is for keys and values; None plans for this base model alone.
        `adapter_stacks` are used where adapters can be sampled side by side; None, too, plans for
        this base model alone.
        """
        self.num_decoded = 0
        """Tokens that sequences were given so far."""
        self._decoder = decoder
        self._detokenize = detokenize
        self._is_deterministic = config.deterministic
        is_cuda = decoder.device.type == "cuda"
        uses_kernels = _can_use_kernels(decoder, config)
        self._cache = KVCache(
            CacheShape.of(
                decoder.config, decoder.device, decoder.dtype, keeps_choices=config.router_replay
            ),
            cache_bytes or _planned(decoder, config).cache_bytes,
            has_padding=not uses_kernels,
        )
        self._scheduler = Scheduler(
            self._cache,
            max_running=config.max_running_samples,
            max_shared=None if is_cuda else _SHARED_ROWS,
            prefill_tokens=prefill_tokens or (8192 if is_cuda else 256),
            is_deterministic=config.deterministic,
            failing=_weakly(self._failing),
        )
        if decode is None and uses_kernels:
            decode = _decode_step(decoder, self._cache, config, use_graphs)
        self._decode = decode
        self._stacks: AdapterStacks | None = None
        if _can_stack(decoder, config):
            self._stacks = adapter_stacks or AdapterStacks(_planned(decoder, config).stack_bytes)
        self._launched: Launched | None = None
        self._compiling = Compiling(
            tokens or Tokens(None, decoder.config.vocab_size), decoder.ranks
        )
        self._requests: dict[str, Request] = {}
        self._events: list[tuple[str, EngineSampleEvent]] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._events or self._compiling or self._launched)

    @property
    def num_running(self) -> int:
        """Sequences being decoded."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row yet, or whose prompt is being read."""
        return self._scheduler.num_waiting

    @property
    def max_cache_bytes(self) -> int:
        """Most memory that keys and values may take."""
        return self._cache.max_bytes

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take at the moment."""
        return self._cache.nbytes

    @property
    def stack_bytes(self) -> int:
        """Memory that copies of adapters take, made to sample them side by side."""
        return 0 if self._stacks is None else self._stacks.nbytes

    def drop_stacks(self) -> None:
        """Give the memory of these copies back; they are made again when there is room."""
        if self._stacks is not None:
            self._stacks.drop()

    def close(self) -> None:
        """Give the memory of keys and values back. The generator cannot be used afterwards."""
        self._cache.close()
        self._decode = self._stacks = None

    def submit(self, job: SampleJob, adapter: Adapter | None) -> None:
        """Queue a job. What is wrong with it comes back as an event of the next step."""
        if job.job_id in self._requests or job.job_id in self._compiling:
            failure = Failure(f"sampling job {job.job_id!r} is running already", "server")
            self._events.append((job.job_id, failure))
        elif job.shaping is not None and job.shaping.grammar is not None:
            self._compiling.add(job, adapter)
        else:
            self._start(job, adapter)

    def _start(
        self,
        job: SampleJob,
        adapter: Adapter | None,
        grammar: Future[CompiledGrammar] | None = None,
    ) -> None:
        """Queue a job whose grammar, if it has one, is compiled or cannot be."""
        try:
            compiled = None if grammar is None else grammar.result()
            request = Request(job, adapter, self._decoder.config, self._detokenize, compiled)
        except ValidationError as error:
            self._events.append((job.job_id, Failure(str(error), "user")))
            return
        except Exception as error:
            self._broke(error, 1)
            self._events.append((job.job_id, Failure(f"sampling failed: {error}", "server")))
            return
        self._requests[job.job_id] = request
        self._scheduler.submit(request)

    def cancel(self, job_id: str) -> None:
        """Give up a job, of which no event follows. Unknown and finished ones are ignored."""
        self._events = [(other, event) for other, event in self._events if other != job_id]
        self._compiling.cancel(job_id)
        request = self._requests.get(job_id)
        if request is not None:
            with torch.inference_mode():
                self._remove(request)

    def forget(self, adapter: Adapter) -> None:
        """Drop what the cache remembers of an adapter, before its weights go away or change."""
        if self._decode is not None:
            self._decode.forget(adapter)
        if self._stacks is not None:
            self._stacks.forget(adapter)
        self._scheduler.forget(adapter)

    def step(self, *, ahead: bool = True) -> list[tuple[str, EngineSampleEvent]]:
        """Schedule, run, settle; the answer is what there is to report, by job.

        What is launched `ahead` is read by the next step, which should then follow soon.
        """
        if self._compiling:
            is_idle = not (self._requests or self._events)
            for job, adapter, grammar in self._compiling.take(_PATIENCE if is_idle else 0.0):
                self._start(job, adapter, grammar)
        with torch.inference_mode():
            self._scheduler.schedule()
            if self._decode is not None:
                self._decode_turn(self._decode, ahead)
            for step in self._steps():
                self._run(step)
        events, self._events = self._events, []
        return events

    # One step

    def _decode_turn(self, decode: Launches, ahead: bool) -> None:
        """Launch the next token of every sequence, then look at the one before."""
        before, self._launched = self._launched, None
        running = [sequence for sequence in self._scheduler.running if sequence.goes_on]
        launched = None
        if running:
            with self._failing(*requests_of([], running)):
                launched = decode.launch(running)
        if before is not None:
            self._read(before)
        if launched is not None and (launched.has_found or not ahead):
            self._read(launched)
        else:
            self._launched = launched

    def _steps(self) -> Iterator[MixedStep]:
        scheduler = self._scheduler
        if self._is_deterministic:
            for sequence in list(scheduler.running):
                if sequence.table is not None:
                    yield MixedStep(self._decoder, [], [sequence])
            for chunk in self._looked_at(scheduler.chunks()[:1]):
                yield MixedStep(self._decoder, [chunk], [])
        else:
            running = list(scheduler.running) if self._decode is None else []
            chunks = self._looked_at(scheduler.chunks())
            if running or chunks:
                yield MixedStep(self._decoder, chunks, running, self._stacks)

    def _looked_at(self, chunks: list[Chunk]) -> list[Chunk]:
        """With what is seen in them, and with the sequences of their requests; one whose image
        cannot be decoded fails by itself."""
        kept = []
        for chunk in chunks:
            request = chunk.prefill.request
            with self._failing(request):
                request.prepare()
                try:
                    kept.append(chunk.looked_at(self._decoder.vision))
                except ValidationError as error:
                    self._fail(request, str(error), "user")
        return kept

    def _run(self, step: MixedStep) -> None:
        with self._failing(*step.requests), self._decoder.in_order():
            step.run()
            for chunk in step.chunks:
                self._score(step, chunk)
            for choice in step.next_tokens():
                self._take(choice)
            for chunk in step.chunks:
                if not chunk.prefill.num_left and chunk.prefill in self._scheduler.prefilling:
                    self._scheduler.end_prefill(chunk.prefill)
            self._settle(step.running, step.requests)

    def _read(self, launched: Launched) -> None:
        """Wait for what was launched, and hand it out."""
        with self._failing(*launched.requests):
            for choice in launched.next_tokens():
                self._take(choice)
            self._settle(launched.running, launched.requests)

    def _score(self, step: MixedStep, chunk: Chunk) -> None:
        """Hand a prompt the logits it has to score."""
        request = chunk.prefill.request
        try:
            for first, logits in step.prompt_logits(chunk):
                request.scores.add(first, logits)
        except FloatingPointError as error:
            self._fail(request, str(error))
        except Exception as error:
            self._fail_all(error, request)

    def _take(self, choice: NextToken) -> None:
        """Give a sequence its next token. What goes wrong is its own request's."""
        request = choice.sequence.request
        try:
            if not choice.is_finite:
                self._fail(request, NOT_FINITE)
            elif (problem := choice.sequence.problem) is not None:
                self._fail(request, problem, "user")
            elif request.job.job_id in self._requests:
                choice.sequence.add(choice.token, choice.logprob, choice.top)
                self.num_decoded += 1
                self._report(choice.sequence)
        except Exception as error:
            self._fail_all(error, request)

    def _report(self, sequence: Sequence) -> None:
        job = sequence.request.job
        if job.stream:
            event = TokensSampled(
                sequence.index,
                np.array(sequence.tokens[-1:], dtype=np.int32),
                np.array(sequence.logprobs[-1:], dtype=np.float32),
                sequence.topk(job.topk_sample_logprobs, first=-1),
            )
            self._events.append((job.job_id, event))

    def _settle(self, running: list[Sequence], requests: list[Request]) -> None:
        """Move on what a step has finished."""
        for sequence in running:
            if sequence.stop_reason is not None and sequence.table is not None:
                self._scheduler.end(sequence)
        for request in requests:
            if request.job.job_id in self._requests and request.is_finished:
                try:
                    answer = request.experts_chosen(), request.response()
                except Exception as error:
                    self._fail_all(error, request)
                    continue
                del self._requests[request.job.job_id]
                self._events += [(request.job.job_id, each) for each in answer if each is not None]

    # Leaving

    @contextmanager
    def _failing(self, *requests: Request) -> Iterator[None]:
        """What goes wrong inside, memory above all, fails these requests and no others."""
        try:
            yield
        except Exception as error:
            self._fail_all(error, *requests)

    def _fail_all(self, error: Exception, *requests: Request) -> None:
        self._broke(error, len(requests))
        for request in requests:
            self._fail(request, f"sampling failed: {error}")

    def _broke(self, error: Exception, num_requests: int) -> None:
        self._decoder.ranks.give_up(error)
        _log.error("sampling failed for %d requests", num_requests, exc_info=error)

    def _fail(self, request: Request, message: str, category: FailureCategory = "server") -> None:
        if request.job.job_id in self._requests:
            self._remove(request)
            self._events.append((request.job.job_id, Failure(message, category)))

    def _remove(self, request: Request) -> None:
        del self._requests[request.job.job_id]
        self._scheduler.remove(request)


def _weakly(failing: Failing) -> Failing:
    """Without keeping its generator alive, whose memory is then free as soon as nobody needs it."""
    weak = weakref.WeakMethod(failing)

    def call(*requests: Request) -> AbstractContextManager[None]:
        method = weak()
        assert method is not None, "a scheduler without its generator"
        return method(*requests)

    return call


def _can_use_kernels(decoder: Decoder, config: LocalEngineConfig) -> bool:
    """Whether the quick way to decode can be used."""
    is_usable = kernels.are_usable(decoder.head.weight) and not is_foreign(decoder.config)
    # A graph that waits for other ranks is not captured.
    return is_usable and not config.deterministic and decoder.ranks.count == 1


def _decode_step(
    decoder: Decoder, cache: KVCache, config: LocalEngineConfig, use_graphs: bool
) -> Launches:
    from tinsmith.engine.local.sample.decode_step import DecodeStep

    use_graphs = use_graphs and decoder.device.type == "cuda"
    return DecodeStep(decoder, cache, config.max_running_samples, use_graphs=use_graphs)


def _can_stack(decoder: Decoder, config: LocalEngineConfig) -> bool:
    """On the CPU in float32, unless a result's bits must not depend on what is beside it."""
    is_plain = decoder.device.type == "cpu" and decoder.dtype == torch.float32
    is_fixed = config.deterministic or decoder.is_invariant
    return is_plain and not (is_fixed or decoder.ranks.count > 1 or is_foreign(decoder.config))


def _planned(decoder: Decoder, config: LocalEngineConfig) -> MemoryPlan:
    """Where this base model has the device to itself."""
    return plan_memory(config, decoder.device, [decoder.nbytes], decoder.ranks)
