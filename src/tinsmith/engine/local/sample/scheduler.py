"""Who runs next: prompts into the cache, sequences into rows of the batch.

A request waits until the cache has room for its prompt (*waiting*), is prefilled once for all its
samples (*prefilling*), and each sample then runs until it stops (*running*); before that it may
have to wait for a row (*parked*).

Scopes with work share the rows of the batch, the tokens of prefill and the cache evenly, whatever
each has asked for. A sequence whose row another scope needs is paused: it keeps its blocks and
goes on later as if nothing had been. When the cache is full, the youngest work of the scope that
holds most gives way: it goes back to the queue with the tokens it has, which the seeded choice
continues exactly. In deterministic mode nothing gives way, since a prompt read again is read with
other roundings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.fair_queue import FairQueue
from tinsmith.engine.local.sample.kvcache import BlockTable, KVCache
from tinsmith.engine.local.sample.mixed_step import Chunk
from tinsmith.engine.local.sample.prefixes import NOTHING, shared_prefix
from tinsmith.engine.local.sample.sequences import Prefill, Request, Sequence

_WORTH_WAITING_FOR = 32
"""Tokens in common with a prompt that is being read, above which it pays to wait for that one."""

_SAMPLES_AHEAD = 8
"""For how many samples of a group there has to be room before its prompt is read."""

Failing = Callable[..., AbstractContextManager[None]]
"""What goes wrong inside fails the given requests, which are then removed, and no others."""


class Scheduler:
    def __init__(
        self,
        cache: KVCache,
        *,
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
        self._cache = cache
        self._waiting: FairQueue[Prefill] = FairQueue(lambda prefill: prefill.request.scope)
        self._parked: FairQueue[Sequence] = FairQueue(lambda sequence: sequence.request.scope)
        """Sequences whose prompt has been read, and without a row: not yet, or paused."""
        self._prefilled_last = ""
        """The scope whose oldest prompt had the first part of the last step's prefill."""
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row yet, or whose prompt is being read."""
        prefills = [*self._waiting, *self.prefilling]
        return len(self._parked) + sum(prefill.num_sequences for prefill in prefills)

    def submit(self, request: Request) -> None:
        self._waiting.append(Prefill(request))

    def schedule(self) -> None:
        """Settle who takes part in the next step."""
        self._admit()
        self._place()
        self._grow()

    def forget(self, adapter: Adapter) -> None:
        """Drop what the cache remembers of an adapter."""
        self._cache.forget(adapter)

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
            shared = self._cache.reusable(shared, len(other.tokens))
            if shared >= _WORTH_WAITING_FOR and 2 * shared >= other.num_left:
                num_known = self._cache.known(realm, tokens[: prefill.reusable]).num_tokens
                if shared - num_known >= _WORTH_WAITING_FOR:
                    return True
        return False

    def _try_start(self, prefill: Prefill) -> bool:
        """Start a prefill; one for which there is no room goes back to the head of its lane."""
        num_samples = min(prefill.num_sequences, _SAMPLES_AHEAD)
        needed = self._cache.bytes_for(len(prefill.tokens), num_samples)
        has_failed, has_started = True, False
        with self._failing(prefill.request):
            has_started = self._start(prefill, num_samples)
            while not has_started and self._make_way(prefill.request.scope, needed):
                has_started = self._start(prefill, num_samples)
            has_failed = False
        if has_started:
            self.prefilling.append(prefill)
        elif not has_failed:
            self._waiting.append_left(prefill)
        return has_started

    def _start(self, prefill: Prefill, num_samples: int) -> bool:
        """Give a prefill its table, with what the cache knows; False if there is no room."""
        known = NOTHING
        if not self._is_deterministic:
            tokens = prefill.tokens[: prefill.reusable]
            known = self._cache.known(prefill.request.realm, tokens)
        is_alone = not (self.running or self._parked or self.prefilling)
        prefill.table = self._cache.new_table(
            len(prefill.tokens), known, num_samples=num_samples, force=is_alone
        )
        if prefill.table is None:
            return False
        prefill.num_done = known.num_tokens
        if prefill.is_fresh:
            prefill.request.num_cache_hits = known.num_tokens
        return True

    def chunks(self) -> list[Chunk]:
        """Which prompt tokens are read in the next step.

        Half of the budget is for the oldest prompt of one scope, each scope after the other, so
        that it gets done; the rest goes to the shortest, so that a small request does not wait
        behind large ones. A token from which many alternatives are drawn counts as several.
        """
        if not self.prefilling:
            return []
        budget = self._prefill_tokens
        oldest = self._next_oldest()
        if self._is_deterministic:
            return [Chunk(oldest, min(oldest.num_left, budget))]
        others = [prefill for prefill in self.prefilling if prefill is not oldest]
        others.sort(key=lambda prefill: prefill.num_left)
        chunks = {oldest: min(oldest.num_left, max(1, budget // 2 // oldest.token_cost))}
        budget -= chunks[oldest] * oldest.token_cost
        for prefill in others:
            chunks[prefill] = min(prefill.num_left, max(0, budget) // prefill.token_cost)
            budget -= chunks[prefill] * prefill.token_cost
        rest = max(0, budget) // oldest.token_cost
        chunks[oldest] += min(oldest.num_left - chunks[oldest], rest)
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
        table = prefill.table
        assert table is not None
        self.prefilling.remove(prefill)
        self._note_choices(prefill.request, table)
        common: tuple[int, ...] = ()
        if prefill.num_sequences > 1 and not self._is_deterministic:
            common = self._cache.full_blocks(table)
        for sequence in prefill.sequences:
            if not prefill.request.rule.max_tokens:
                sequence.stop_reason = "length"
            if sequence.stop_reason is None:
                sequence.table = self._cache.fork(table)
                sequence.table.common = common
                self._parked.append(sequence)
        if prefill.is_fresh and not self._is_deterministic:
            self._cache.remember(prefill.request.realm, prefill.tokens, table)
        self._abandon(prefill)

    def _note_choices(self, request: Request, table: BlockTable) -> None:
        is_wanted = request.job.reports_experts and self._cache.choices is not None
        if is_wanted and request.prompt_choices is None:
            stop = min(table.num_tokens, len(request.prompt))
            request.prompt_choices = self._cache.read_choices(table, 0, stop)

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
                if not self._find_room(sequence):
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
        """Fewer where several scopes have work. Whoever is alone gets more little by little: a
        neighbour may be back for the next step, and would wait for all of its rows."""
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
        """Take the row of the youngest sequence of the scope with the most. It keeps its blocks,
        and goes on later."""
        scope = rows.most_common(1)[0][0]
        places = reversed(range(len(self.running)))
        youngest = self.running.pop(
            next(place for place in places if self.running[place].request.scope == scope)
        )
        rows[scope] -= 1
        self._parked.append_left(youngest)

    def _find_room(self, sequence: Sequence) -> bool:
        """See that a sequence can write its next token; in deterministic mode, all of them."""
        table, request = sequence.table, sequence.request
        assert table is not None
        num_tokens = table.num_tokens + 1
        if self._is_deterministic:
            num_tokens = max(num_tokens, request.num_prefilled + request.rule.max_tokens)
        if self._cache.extend(table, num_tokens):
            return True
        needed = self._cache.bytes_for(num_tokens - table.num_tokens, 0)
        while self._make_way(request.scope, needed):
            if self._cache.extend(table, num_tokens):
                return True
        if self.running or self.prefilling:
            return False
        # Nobody runs who would leave room behind.
        while not self._cache.extend(table, num_tokens, force=not self._may_give_way()):
            self._give_way(self._held_bytes().most_common(1)[0][0])
        return True

    def _may_give_way(self) -> bool:
        return bool(self._parked) and not self._is_deterministic

    def _grow(self) -> None:
        """Make sure every running sequence has room for one more token."""
        size = self._cache.shape.block_tokens
        for sequence in list(self.running):
            table = sequence.table
            if sequence.goes_on and table and table.num_tokens >= len(table.blocks) * size:
                with self._failing(sequence.request):
                    self._grow_one(sequence)

    def _grow_one(self, sequence: Sequence) -> None:
        while (table := sequence.table) is not None:
            is_alone = len(self.running) == 1 and not self._parked and not self.prefilling
            if self._cache.extend(table, table.num_tokens + 1, force=is_alone):
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
        common: dict[int, tuple[str, int]] = {}
        work: list[Sequence | Prefill] = [*self.running, *self._parked, *self.prefilling]
        for item in work:
            table, scope = item.table, item.request.scope
            if table is not None:
                num_own = len(table.blocks) - len(table.common)
                held[scope] += self._cache.bytes_of(num_own, int(table.state is not None))
                common[id(table.common)] = scope, len(table.common)
        for scope, num_blocks in common.values():
            held[scope] += self._cache.bytes_of(num_blocks, 0)
        return held

    def _requeue(self, sequence: Sequence) -> None:
        sequence.note_choices()
        self._vacate(sequence)
        self._waiting.append_left(Prefill(sequence.request, sequence))

    # Leaving

    def end(self, sequence: Sequence) -> None:
        """A sequence has its last token; it may have been paused meanwhile."""
        sequence.note_choices()
        self.running = [other for other in self.running if other is not sequence]
        self._parked.keep(lambda other: other is not sequence)
        self._vacate(sequence)

    def remove(self, request: Request) -> None:
        """Free everything a request holds."""
        self._waiting.keep(lambda prefill: prefill.request is not request)
        for prefill in [p for p in self.prefilling if p.request is request]:
            self.prefilling.remove(prefill)
            self._abandon(prefill)
        for sequence in request.sequences if request.has_sequences else ():
            self._vacate(sequence)
        self._parked.keep(lambda sequence: sequence.request is not request)
        self.running = [s for s in self.running if s.request is not request]

    def _abandon(self, prefill: Prefill) -> None:
        if prefill.table is not None:
            self._cache.free(prefill.table)
        prefill.table, prefill.num_done = None, 0

    def _vacate(self, sequence: Sequence) -> None:
        sequence.attempt, sequence.num_ahead = sequence.attempt + 1, 0
        if sequence.table is not None:
            self._cache.free(sequence.table)
            sequence.table = None
