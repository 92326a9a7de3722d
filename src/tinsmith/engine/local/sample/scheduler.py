"""Who runs next: prompts into the cache, sequences into rows of the batch.

A request waits until the cache has room for its prompt (*waiting*), is prefilled once for all its
samples (*prefilling*), and each sample then runs in a slot until it stops (*running*); before that
it may have to wait for a row (*parked*).

Scopes with work share the rows of the batch, the tokens of prefill and the cache evenly, whatever
each has asked for. A sequence whose row another scope needs is paused: it keeps its slot and goes
on later as if nothing had been. When the cache is full, the youngest work of the scope that holds
most gives way: it goes back to the queue with the tokens it has, which the seeded choice continues
exactly. In deterministic mode nothing gives way, since a prompt read again is read with other
roundings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.fair_queue import FairQueue
from tinsmith.engine.local.sample.kvcache import CacheShape, KVCache, Span
from tinsmith.engine.local.sample.mixed_step import Chunk
from tinsmith.engine.local.sample.prefixes import Prefixes, shared_prefix
from tinsmith.engine.local.sample.sequences import Prefill, Request, Sequence

_WORTH_WAITING_FOR = 32
"""Tokens in common with a prompt that is being read, above which it pays to wait for that one."""

_SLOTS_AHEAD = 8
"""For how many samples of a group there has to be room before its prompt is read."""

Failing = Callable[..., AbstractContextManager[None]]
"""What goes wrong inside fails the given requests, which are then removed, and no others."""


class Scheduler:
    def __init__(
        self,
        shape: CacheShape,
        *,
        cache_bytes: int,
        max_running: int,
        max_shared: int | None = None,
        prefill_tokens: int,
        is_deterministic: bool,
        failing: Failing,
    ) -> None:
        """`max_running` rows make a batch, `max_shared` where several scopes have a part in it: all
        of them wait for all of its rows."""
        self._max_running = max_running
        self._max_shared = min(max_running, max_shared or max_running)
        self._prefill_tokens = prefill_tokens
        self._is_deterministic = is_deterministic
        self._failing = failing
        self._prefixes = Prefixes()
        self._has_states = shape.state is not None
        """A prompt can then be continued only where it ends, not after its first tokens."""
        self._cache = KVCache(shape, cache_bytes, self._drop_oldest_prefix)
        self._waiting: FairQueue[Prefill] = FairQueue(lambda prefill: prefill.request.scope)
        self._parked: FairQueue[Sequence] = FairQueue(lambda sequence: sequence.request.scope)
        """Sequences with their first token and without a row: they hold on to a span, or to the
        slot in which they were paused."""
        self._prefilled_last = ""
        """The scope whose oldest prompt had the first part of the last step's prefill."""
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row yet, or whose prompt is being read."""
        prefills = [*self._waiting, *self.prefilling]
        return len(self._parked) + sum(prefill.num_sequences for prefill in prefills)

    @property
    def max_cache_bytes(self) -> int:
        return self._cache.max_bytes

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    def submit(self, request: Request) -> None:
        self._waiting.append(Prefill(request))

    def schedule(self) -> None:
        """Settle who takes part in the next step."""
        self._admit()
        self._place()
        self._grow()

    def forget(self, adapter: Adapter) -> None:
        """Drop what the cache remembers of an adapter."""
        for span in self._prefixes.forget(adapter):
            self._cache.drop_span(span)

    # Prompts into the cache

    def _admit(self) -> None:
        """Let waiting prompts in as far as there is room, of the scope with the fewest first."""
        admitted = self._admitted()
        held_back: list[Prefill] = []
        scopes = set(self._waiting.scopes)
        share = self._max_running // len(scopes | set(admitted)) if scopes else 0
        while scopes:
            scope = min((s for s in self._waiting.scopes if s in scopes), key=admitted.__getitem__)
            if admitted.total() >= self._max_running and admitted[scope] >= share:
                scopes.discard(scope)
                continue
            prefill = self._waiting.pop_left(scope)
            if self._is_worth_waiting(prefill):
                held_back.append(prefill)
            elif self._try_start(prefill):
                admitted[scope] += prefill.num_sequences
            else:
                scopes.discard(scope)
            scopes &= set(self._waiting.scopes)
        for prefill in reversed(held_back):
            self._waiting.append_left(prefill)

    def _admitted(self) -> Counter[str]:
        """How many sequences of each scope have room in the cache."""
        admitted = self._rows() + Counter(self._parked.counts)
        for prefill in self.prefilling:
            admitted[prefill.request.scope] += prefill.num_sequences
        return admitted

    def _is_worth_waiting(self, prefill: Prefill) -> bool:
        """Whether a prompt that begins alike is being read at this moment."""
        realm, tokens = prefill.request.realm, prefill.tokens
        if self._is_deterministic or prefill.reusable < _WORTH_WAITING_FOR:
            return False
        for other in self.prefilling:
            if other.request.realm != realm or other.first_token != prefill.first_token:
                continue
            shared = min(shared_prefix(other.tokens, tokens), prefill.reusable)
            if self._has_states and shared < len(other.tokens):
                continue
            if shared >= _WORTH_WAITING_FOR and 2 * shared >= other.num_left:
                _, num_known = self._known(prefill)
                if shared - num_known >= _WORTH_WAITING_FOR:
                    return True
        return False

    def _known(self, prefill: Prefill) -> tuple[Span | None, int]:
        """A remembered prompt, and how many of its tokens need not be computed again."""
        realm, tokens = prefill.request.realm, prefill.tokens[: prefill.reusable]
        return self._prefixes.find(realm, tokens, only_whole=self._has_states)

    def _try_start(self, prefill: Prefill) -> bool:
        """Start a prefill; one for which there is no room goes back to the head of its lane."""
        num_slots = min(prefill.num_sequences, _SLOTS_AHEAD)
        needed = self._cache.bytes_for_span(len(prefill.tokens), num_slots)
        has_failed, has_started = True, False
        with self._failing(prefill.request):
            has_started = self._start(prefill, num_slots)
            while not has_started and self._make_way(prefill.request.scope, needed):
                has_started = self._start(prefill, num_slots)
            has_failed = False
        if has_started:
            self.prefilling.append(prefill)
        elif not has_failed:
            self._waiting.append_left(prefill)
        return has_started

    def _start(self, prefill: Prefill, num_slots: int) -> bool:
        """Give a prefill its span, with what the cache knows already; False if there is no room."""
        known, num_known = None, 0
        if not self._is_deterministic:
            known, num_known = self._known(prefill)
        if known is not None:
            known.num_users += 1  # so that making room for the new one cannot drop it
        try:
            is_alone = not (self.running or self._parked or self.prefilling)
            span = self._cache.new_span(len(prefill.tokens), num_slots=num_slots, force=is_alone)
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

    def chunks(self) -> list[Chunk]:
        """Which prompt tokens are read in the next step.

        Half of the budget is for the oldest prompt of one scope, each scope after the other, so
        that it gets done; the rest goes to the shortest, so that a small request does not wait
        behind large ones.
        """
        if not self.prefilling:
            return []
        budget = self._prefill_tokens
        oldest = self._next_oldest()
        if self._is_deterministic:
            return [Chunk(oldest, min(oldest.num_left, budget))]
        others = [prefill for prefill in self.prefilling if prefill is not oldest]
        others.sort(key=lambda prefill: prefill.num_left)
        chunks = {oldest: min(oldest.num_left, max(1, budget // 2))}
        budget -= chunks[oldest]
        for prefill in others:
            chunks[prefill] = min(prefill.num_left, budget)
            budget -= chunks[prefill]
        chunks[oldest] += min(oldest.num_left - chunks[oldest], budget)
        return [
            Chunk(prefill, num_tokens)
            for prefill, num_tokens in chunks.items()
            if num_tokens or not prefill.num_left
        ]

    def _next_oldest(self) -> Prefill:
        """The oldest prompt of the scope that follows the last one."""
        oldest: dict[str, Prefill] = {}
        for prefill in self.prefilling:
            oldest.setdefault(prefill.request.scope, prefill)
        later = [scope for scope in oldest if scope > self._prefilled_last]
        self._prefilled_last = min(later or oldest)
        return oldest[self._prefilled_last]

    def end_prefill(self, prefill: Prefill) -> None:
        """A prompt has been read: its sequences may run, and it is remembered."""
        span = prefill.span
        assert span is not None
        self.prefilling.remove(prefill)
        for sequence in prefill.sequences:
            if not prefill.request.rule.max_tokens:
                sequence.stop_reason = "length"
            if sequence.stop_reason is None:
                span.num_users += 1
                sequence.prompt_span = span
                self._parked.append(sequence)
        if prefill.is_fresh and len(prefill.tokens) and not self._is_deterministic:
            realm, tokens = prefill.request.realm, prefill.tokens
            kept = self._prefixes.remember(realm, tokens, span, only_whole=self._has_states)
            for old in kept:
                self._cache.drop_span(old)
        prefill.span = None
        self._leave(span)

    # Sequences into rows

    def _place(self) -> None:
        """Give rows of the batch to sequences whose prompt has been read, evenly among scopes."""
        scopes = set(self._parked.scopes)
        max_rows = self._max_rows()
        rows = self._rows()
        while len(self.running) > max_rows:
            self._pause(rows)
        while scopes:
            if rows.total() != len(self.running):
                rows = self._rows()  # somebody failed, or gave way
            scope = min((s for s in self._parked.scopes if s in scopes), key=rows.__getitem__)
            if len(self.running) >= max_rows and not self._may_pause(rows, scope):
                return
            sequence = self._parked.pop_left(scope)
            with self._failing(sequence.request):
                if not self._find_slot(sequence):
                    self._parked.append_left(sequence)
                    scopes.discard(scope)
                    continue
                if len(self.running) >= max_rows:
                    self._pause(rows)
                self.running.append(sequence)
                rows[scope] += 1
            scopes &= set(self._parked.scopes)

    def _rows(self) -> Counter[str]:
        """How many rows of the batch each scope has."""
        return Counter(sequence.request.scope for sequence in self.running)

    def _max_rows(self) -> int:
        """Fewer where several scopes have work. Whoever is alone gets more little by little: his
        neighbour may be back for the next step, and moving rows costs as much as a step."""
        scopes = {*self._rows(), *self._parked.scopes, *self._waiting.scopes}
        scopes.update(prefill.request.scope for prefill in self.prefilling)
        if len(scopes) > 1:
            return self._max_shared
        grown = len(self.running) + max(1, self._max_shared // 4)
        return min(self._max_running, max(self._max_shared, grown))

    def _may_pause(self, rows: Counter[str], scope: str) -> bool:
        """Whether another scope has so many rows that it still has as many without one."""
        return rows.most_common(1)[0][1] > rows[scope] + 1

    def _pause(self, rows: Counter[str]) -> None:
        """Take the row of the youngest sequence of the scope with the most. It keeps its slot, and
        goes on later."""
        scope = rows.most_common(1)[0][0]
        places = reversed(range(len(self.running)))
        youngest = self.running.pop(
            next(place for place in places if self.running[place].request.scope == scope)
        )
        rows[scope] -= 1
        assert youngest.slot is not None, "it runs"
        youngest.slot.slab.pause(youngest.slot)
        self._parked.append_left(youngest)

    def _find_slot(self, sequence: Sequence) -> bool:
        """A new slot with the prompt, or the one in which the sequence was paused."""
        if sequence.slot is not None:
            sequence.slot.slab.resume(sequence.slot)
            return True
        shares, num_tokens = self._needs(sequence)
        is_alone = not self.running and not self.prefilling
        needed = self._cache.bytes_for_slot(num_tokens)
        slot = self._cache.new_slot(num_tokens, force=is_alone)
        while slot is None and self._make_way(sequence.request.scope, needed):
            slot = self._cache.new_slot(num_tokens)
        if slot is None:
            return False
        sequence.slot = slot
        span = sequence.prompt_span
        assert span is not None
        self._cache.fill_slot(slot, span, 0 if shares else span.num_tokens)
        if not shares:
            sequence.prompt_span = None
            self._leave(span)
        return True

    def _needs(self, sequence: Sequence) -> tuple[bool, int]:
        """Whether a sequence shares its prompt with its siblings, and what its slot must hold."""
        span = sequence.prompt_span
        assert span is not None
        shares = sequence.request.job.num_samples > 1 and not self._is_deterministic
        shares = shares and 0 < span.num_tokens == sequence.request.num_prefilled
        num_tokens = 0 if shares else span.num_tokens
        if self._is_deterministic:
            num_tokens += sequence.request.rule.max_tokens - 1
        return shares, num_tokens

    def _grow(self) -> None:
        """Make sure every running sequence has room for one more token."""
        for sequence in list(self.running):
            if sequence.goes_on and sequence.slot is not None and sequence.slot.is_full:
                with self._failing(sequence.request):
                    self._grow_one(sequence)

    def _grow_one(self, sequence: Sequence) -> None:
        while sequence.slot is not None:
            is_alone = len(self.running) == 1 and not self._parked and not self.prefilling
            grown = self._cache.grow(sequence.slot, force=is_alone)
            if grown is not None:
                sequence.slot = grown
                return
            self._give_way(self._held_bytes().most_common(1)[0][0])

    # Giving way

    def _make_way(self, scope: str, num_bytes: int) -> bool:
        """Free memory for a scope at the cost of another; whether that is fair.

        It is where the other then still holds as much as this one, so that nobody is sent
        back and forth.
        """
        held = self._held_bytes()
        if self._is_deterministic or not held:
            return False
        most, most_bytes = held.most_common(1)[0]
        if most_bytes - num_bytes < held[scope] + num_bytes:
            return False
        self._give_way(most)
        return True

    def _give_way(self, scope: str) -> None:
        """Send the youngest work of a scope back to the queue."""
        prefilling = [p for p in self.prefilling if p.request.scope == scope]
        if scope in self._parked.scopes:
            self._requeue(self._parked.pop(scope))
        elif prefilling:
            self.prefilling.remove(prefilling[-1])
            self._abandon(prefilling[-1])
            self._waiting.append_left(prefilling[-1])
        else:
            youngest = [s for s in self.running if s.request.scope == scope][-1]
            self.running.remove(youngest)
            self._requeue(youngest)

    def _held_bytes(self) -> Counter[str]:
        """What each scope's work holds of the cache; remembered prompts are not work."""
        held: Counter[str] = Counter()
        spans: dict[Span, str] = {}
        for sequence in [*self.running, *self._parked]:
            scope = sequence.request.scope
            if sequence.slot is not None:
                held[scope] += sequence.slot.slab.bytes_per_row
            if sequence.prompt_span is not None:
                spans[sequence.prompt_span] = scope
        for prefill in self.prefilling:
            if prefill.span is not None:
                spans[prefill.span] = prefill.request.scope
        for span, scope in spans.items():
            held[scope] += span.nbytes
        return held

    def _requeue(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self._waiting.append_left(Prefill(sequence.request, sequence))

    # Leaving

    def end(self, sequence: Sequence) -> None:
        """A sequence has its last token; it may have been paused meanwhile."""
        self.running = [other for other in self.running if other is not sequence]
        self._parked.keep(lambda other: other is not sequence)
        self._vacate(sequence)

    def remove(self, request: Request, *, wipe: bool = False) -> None:
        """Free everything a request holds; `wipe` what may not be finite."""
        self._waiting.keep(lambda prefill: prefill.request is not request)
        for prefill in [p for p in self.prefilling if p.request is request]:
            self.prefilling.remove(prefill)
            self._abandon(prefill)
        for sequence in request.sequences if request.has_sequences else ():
            self._vacate(sequence, wipe=wipe)
        self._parked.keep(lambda sequence: sequence.request is not request)
        self.running = [s for s in self.running if s.request is not request]

    def _abandon(self, prefill: Prefill) -> None:
        if prefill.span is not None:
            self._leave(prefill.span)
        prefill.span, prefill.num_done = None, 0

    def _vacate(self, sequence: Sequence, *, wipe: bool = False) -> None:
        """Free the slot and the span of a sequence."""
        sequence.attempt, sequence.num_ahead = sequence.attempt + 1, 0
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
