"""The sampler: many requests, continuously batched over one base model.

Time goes by in turns. A turn is one forward pass: the next token of every running sequence, and
beside them a bounded number of prompt tokens, so that a long prompt never holds up those who are
already running. A request waits until the cache has room for its prompt, is prefilled once for all
its samples, and each sample then runs in a slot until it stops. When the cache is full, the
youngest work gives way: it goes back to the queue with the tokens it has, which the seeded choice
continues exactly.

In deterministic mode every sequence goes through the model by itself, prompts are never taken from
the cache, and nothing gives way, so that a request's results cannot depend on any other.

Requests are checked before they come here. The interleaving with training is the caller's: every
`step` is one turn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinsmith.engine.base import Failure, SampleEvent, SampleJob, TokensSampled
from tinsmith.engine.local import kernels
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.foreign import is_foreign
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.choosing import NOT_FINITE
from tinsmith.engine.local.sample.kvcache import CacheShape, KVCache, Span
from tinsmith.engine.local.sample.next_tokens import NextToken
from tinsmith.engine.local.sample.prefixes import Prefixes, shared_prefix
from tinsmith.engine.local.sample.sequences import Prefill, Request, Sequence
from tinsmith.engine.local.sample.turn import Chunk, Turn
from tinsmith.engine.stopping import Detokenize
from tinsmith.errors import ValidationError

if TYPE_CHECKING:
    from tinsmith.engine.local.sample.decode_step import DecodeStep, DecodeTurn

_log = logging.getLogger(__name__)

_WORTH_WAITING_FOR = 32
"""Tokens in common with a prompt that is being read, above which it pays to wait for that one."""

_SLOTS_AHEAD = 8
"""For how many samples of a group there has to be room before its prompt is read."""


class Generator:
    """The sampler of one base model. Not safe for threads: one caller, turn after turn."""

    def __init__(
        self,
        decoder: Decoder,
        config: LocalEngineConfig,
        detokenize: Detokenize | None = None,
        *,
        prefill_tokens: int | None = None,
        use_graphs: bool = True,
    ) -> None:
        """`detokenize` is needed for stop strings only; it must keep special tokens.

        `prefill_tokens` is the most prompt tokens in one turn: 256 on the CPU, where they take
        about as long as a turn should, and 8192 on CUDA. Without `use_graphs` the kernels of a
        step on CUDA are launched one by one.
        """
        self._decoder = decoder
        self._detokenize = detokenize
        self._is_deterministic = config.deterministic
        self._max_running = config.max_running_samples
        is_cuda = decoder.device.type == "cuda"
        self._prefill_tokens = prefill_tokens or (8192 if is_cuda else 256)
        self._prefixes = Prefixes()
        shape = CacheShape.of(decoder.config, decoder.device, decoder.dtype)
        max_bytes = config.kv_cache_bytes or _default_cache_bytes(decoder.device)
        self._cache = KVCache(shape, max_bytes, self._drop_oldest_prefix)
        self._step = _decode_step(decoder, config, use_graphs)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Prefill] = deque()
        self._prefilling: list[Prefill] = []
        self._parked: deque[Sequence] = deque()
        """Sequences with their first token that found no slot yet; they hold on to a span."""
        self._running: list[Sequence] = []
        self._events: list[tuple[str, SampleEvent]] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._events)

    @property
    def num_running(self) -> int:
        """Sequences being decoded."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no place yet, or whose prompt is being read."""
        prefills = (*self._waiting, *self._prefilling)
        return len(self._parked) + sum(len(prefill.sequences) for prefill in prefills)

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take at the moment."""
        return self._cache.nbytes

    def submit(self, job: SampleJob, adapter: Adapter | None) -> None:
        """Queue a job. What is wrong with it comes back as an event of the next step."""
        if job.job_id in self._requests:
            failure = Failure(f"sampling job {job.job_id!r} is running already", "server")
            self._events.append((job.job_id, failure))
            return
        try:
            request = Request(job, adapter, self._decoder.config, self._detokenize)
        except ValidationError as error:
            self._events.append((job.job_id, Failure(str(error), "user")))
            return
        self._requests[job.job_id] = request
        self._waiting.append(Prefill(request, request.sequences))

    def cancel(self, job_id: str) -> None:
        """Give up a job, of which no event follows. Unknown and finished ones are ignored."""
        self._events = [(owner, event) for owner, event in self._events if owner != job_id]
        request = self._requests.get(job_id)
        if request is not None:
            with torch.inference_mode():
                self._remove(request)

    def forget(self, adapter: Adapter) -> None:
        """Drop what the cache remembers of an adapter, before its weights go away or change."""
        if self._step is not None:
            self._step.forget(adapter)
        for span in self._prefixes.forget(adapter):
            self._cache.drop_span(span)

    def step(self) -> list[tuple[str, SampleEvent]]:
        """One turn; the answer is what there is to report, by job."""
        with torch.inference_mode():
            self._admit()
            self._place()
            self._grow()
            for turn in self._turns():
                self._run(turn)
        events, self._events = self._events, []
        return events

    # Who runs

    def _admit(self) -> None:
        """Let waiting prompts into the cache, in order of arrival, as far as there is room."""
        held_back: list[Prefill] = []
        while self._waiting and self._num_admitted < self._max_running:
            prefill = self._waiting.popleft()
            has_started = False
            if self._is_worth_waiting(prefill):
                held_back.append(prefill)
                continue
            with self._failing(prefill.request):
                has_started = self._start(prefill)
            if has_started:
                self._prefilling.append(prefill)
            elif prefill.request.job.job_id in self._requests:
                self._waiting.appendleft(prefill)
                break
        self._waiting.extendleft(reversed(held_back))

    @property
    def _num_admitted(self) -> int:
        prefilling = sum(len(prefill.sequences) for prefill in self._prefilling)
        return len(self._running) + len(self._parked) + prefilling

    def _is_worth_waiting(self, prefill: Prefill) -> bool:
        """Whether a prompt that begins alike is being read at this moment."""
        adapter, tokens = prefill.request.adapter, prefill.tokens
        if self._is_deterministic or prefill.reusable < _WORTH_WAITING_FOR:
            return False
        for other in self._prefilling:
            if other.request.adapter is not adapter or other.first_token != prefill.first_token:
                continue
            shared = min(shared_prefix(other.tokens, tokens), prefill.reusable)
            if shared >= _WORTH_WAITING_FOR and 2 * shared >= other.num_left:
                _, num_known = self._prefixes.find(adapter, tokens)
                if shared - num_known >= _WORTH_WAITING_FOR:
                    return True
        return False

    def _start(self, prefill: Prefill) -> bool:
        """Give a prefill its span, with what the cache knows already; False if there is no room."""
        known, num_known = None, 0
        if not self._is_deterministic:
            known, num_known = self._prefixes.find(prefill.request.adapter, prefill.tokens)
            num_known = min(num_known, prefill.reusable)
        if known is not None:
            known.num_users += 1  # so that making room for the new one cannot drop it
        try:
            span = self._cache.new_span(
                len(prefill.tokens),
                num_slots=min(len(prefill.sequences), _SLOTS_AHEAD),
                force=not self._num_admitted,
            )
            if span is None:
                return False
            if known is not None and num_known:
                span.copy_prefix(known, num_known)
        finally:
            if known is not None:
                self._leave(known)
        prefill.span, prefill.num_done = span, num_known
        if prefill.is_fresh:
            prefill.request.num_cache_hits = num_known
        return True

    def _place(self) -> None:
        """Find slots for sequences whose prompt has been read."""
        while self._parked and len(self._running) < self._max_running:
            sequence = self._parked[0]
            is_alone = not self._running and not self._prefilling
            with self._failing(sequence.request):
                if not self._take_slot(sequence, force=is_alone):
                    break
                self._running.append(self._parked.popleft())

    def _take_slot(self, sequence: Sequence, *, force: bool) -> bool:
        span = sequence.prompt_span
        assert span is not None
        shares = len(sequence.request.sequences) > 1 and not self._is_deterministic
        shares = shares and span.num_tokens == len(sequence.request.prompt)
        num_tokens = 0 if shares else span.num_tokens
        reserved = num_tokens
        if self._is_deterministic:
            reserved += sequence.request.rule.max_tokens - 1
        slot = self._cache.new_slot(reserved, force=force)
        if slot is None:
            return False
        sequence.slot = slot
        if not shares:
            self._cache.fill_slot(slot, span, num_tokens)
            sequence.prompt_span = None
            self._leave(span)
        return True

    def _grow(self) -> None:
        """Make sure every running sequence has room for one more token."""
        for sequence in list(self._running):
            if sequence.slot is not None and sequence.slot.is_full:
                with self._failing(sequence.request):
                    self._grow_one(sequence)

    def _grow_one(self, sequence: Sequence) -> None:
        while sequence.slot is not None:
            grown = self._cache.grow(sequence.slot, force=self._num_admitted == 1)
            if grown is not None:
                sequence.slot = grown
                return
            self._give_way()

    def _give_way(self) -> None:
        """Send the youngest work back to the queue, so that older work can go on."""
        if self._parked:
            self._requeue(self._parked.pop())
        elif self._prefilling:
            prefill = self._prefilling.pop()
            self._abandon(prefill)
            self._waiting.appendleft(prefill)
        else:
            self._requeue(self._running.pop())

    def _requeue(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self._waiting.appendleft(Prefill(sequence.request, [sequence]))

    # One turn

    def _turns(self) -> Iterator[Turn | DecodeTurn]:
        if self._is_deterministic:
            for sequence in list(self._running):
                if sequence.slot is not None:
                    yield Turn(self._decoder, [], [sequence])
            for chunk in self._chunks()[:1]:
                yield Turn(self._decoder, [chunk], [])
        elif self._step is None:
            if self._running or self._prefilling:
                yield Turn(self._decoder, self._chunks(), list(self._running))
        else:
            if self._running:
                yield self._step.turn(list(self._running))
            if self._prefilling:
                yield Turn(self._decoder, self._chunks(), [])

    def _chunks(self) -> list[Chunk]:
        """Which prompt tokens are read in this turn.

        Half of the budget is the oldest prompt's, so that it gets done; the rest goes to the
        shortest, so that a small request does not wait behind large ones.
        """
        if not self._prefilling:
            return []
        budget = self._prefill_tokens
        oldest, *others = self._prefilling
        if self._is_deterministic:
            return [Chunk(oldest, min(oldest.num_left, budget))]
        others.sort(key=lambda prefill: prefill.num_left)
        chunks = {oldest: min(oldest.num_left, max(1, budget // 2))}
        budget -= chunks[oldest]
        for prefill in others:
            chunks[prefill] = min(prefill.num_left, budget)
            budget -= chunks[prefill]
        chunks[oldest] += min(oldest.num_left - chunks[oldest], budget)
        return [Chunk(prefill, num_tokens) for prefill, num_tokens in chunks.items() if num_tokens]

    def _run(self, turn: Turn | DecodeTurn) -> None:
        with self._failing(*turn.requests):
            turn.run()
            if isinstance(turn, Turn):
                for chunk in turn.chunks:
                    self._score(turn, chunk)
            for choice in turn.next_tokens():
                self._take(choice)
            self._settle(turn)

    def _score(self, turn: Turn, chunk: Chunk) -> None:
        """Hand a prompt the logits it has to score."""
        request = chunk.prefill.request
        try:
            for first, logits in turn.prompt_logits(chunk):
                request.scores.add(first, logits)
        except FloatingPointError as error:
            self._fail(request, str(error))

    def _take(self, choice: NextToken) -> None:
        """Give a sequence its next token."""
        request = choice.sequence.request
        if not choice.is_finite:
            self._fail(request, NOT_FINITE)
        elif request.job.job_id in self._requests:
            choice.sequence.add(choice.token, choice.logprob, choice.top)
            self._report(choice.sequence)

    def _report(self, sequence: Sequence) -> None:
        job = sequence.request.job
        if job.stream:
            event = TokensSampled(
                sequence.index,
                np.array(sequence.tokens[-1:], dtype=np.int32),
                np.array(sequence.logprobs[-1:], dtype=np.float32),
            )
            self._events.append((job.job_id, event))

    def _settle(self, turn: Turn | DecodeTurn) -> None:
        """Move on what the turn has finished."""
        for chunk in turn.chunks:
            if not chunk.prefill.num_left and chunk.prefill in self._prefilling:
                self._end_prefill(chunk.prefill)
        for sequence in turn.running:
            if sequence.stop_reason is not None and sequence.slot is not None:
                self._running.remove(sequence)
                self._vacate(sequence)
        for request in turn.requests:
            if request.is_finished and request.job.job_id in self._requests:
                del self._requests[request.job.job_id]
                self._events.append((request.job.job_id, request.response()))

    def _end_prefill(self, prefill: Prefill) -> None:
        span = prefill.span
        assert span is not None
        self._prefilling.remove(prefill)
        for sequence in prefill.sequences:
            if not prefill.request.rule.max_tokens:
                sequence.stop_reason = "length"
            if sequence.stop_reason is None:
                span.num_users += 1
                sequence.prompt_span = span
                self._parked.append(sequence)
        if prefill.is_fresh and not self._is_deterministic:
            for old in self._prefixes.remember(prefill.request.adapter, prefill.tokens, span):
                self._cache.drop_span(old)
        prefill.span = None
        self._leave(span)

    # Leaving

    @contextmanager
    def _failing(self, *requests: Request) -> Iterator[None]:
        """What goes wrong inside, memory above all, fails these requests and no others."""
        try:
            yield
        except Exception as error:
            _log.exception("sampling failed for %d requests", len(requests))
            for request in requests:
                self._fail(request, f"sampling failed: {error}")

    def _fail(self, request: Request, message: str) -> None:
        if request.job.job_id in self._requests:
            self._remove(request, wipe=True)
            self._events.append((request.job.job_id, Failure(message, "server")))

    def _remove(self, request: Request, *, wipe: bool = False) -> None:
        """Free everything a request holds."""
        del self._requests[request.job.job_id]
        self._waiting = deque(p for p in self._waiting if p.request is not request)
        for prefill in [p for p in self._prefilling if p.request is request]:
            self._prefilling.remove(prefill)
            self._abandon(prefill)
        for sequence in request.sequences:
            self._vacate(sequence, wipe=wipe)
        self._parked = deque(s for s in self._parked if s.request is not request)
        self._running = [s for s in self._running if s.request is not request]

    def _abandon(self, prefill: Prefill) -> None:
        if prefill.span is not None:
            self._leave(prefill.span)
        prefill.span, prefill.num_done = None, 0

    def _vacate(self, sequence: Sequence, *, wipe: bool = False) -> None:
        """Free the slot and the span of a sequence."""
        if sequence.slot is not None:
            self._cache.free_slot(sequence.slot, wipe=wipe)
            sequence.slot = None
        if sequence.prompt_span is not None:
            self._leave(sequence.prompt_span)
            sequence.prompt_span = None

    def _leave(self, span: Span) -> None:
        """One user less; a span that nobody uses or remembers is freed."""
        span.num_users -= 1
        if not span.num_users and span not in self._prefixes:
            self._cache.drop_span(span)

    def _drop_oldest_prefix(self) -> bool:
        span = self._prefixes.evict()
        if span is None:
            return False
        self._cache.drop_span(span)
        return True


def _decode_step(
    decoder: Decoder, config: LocalEngineConfig, use_graphs: bool
) -> DecodeStep | None:
    """The quick way to decode, where it can be used."""
    is_usable = kernels.are_usable(decoder.head.weight) and not is_foreign(decoder.config)
    if not is_usable or config.deterministic:
        return None
    from tinsmith.engine.local.sample.decode_step import DecodeStep

    use_graphs = use_graphs and decoder.device.type == "cuda"
    return DecodeStep(decoder, config.max_running_samples, use_graphs=use_graphs)


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 3
    return 1 << 30
