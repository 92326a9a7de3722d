"""What runs next: a pure choice. Lists in, claims out; nothing here waits, writes or remembers.

Within a model, operations run in the order of their numbers. Between owners, and then between the
models of one owner, whoever has had least of the engine's time goes first. The passes of all models
of one base model that are ready go together, up to a budget of tokens; so do the steps that
are ready. A batch that takes long is not waited for by owners who have no part in it: they begin
another beside it. What concerns one model alone (a save, a load, its rebuilding) runs beside
them, a few of one owner at a time.

What was under way at several deaths of the engine in a row is suspected of being their cause: it
runs by itself, so that nothing else is blamed for it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice, zip_longest
from typing import Generic, TypeVar

from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.shares import Shares
from tinsmith.server.tuning import TUNING

SAVING_AT_ONCE = 2
"""Snapshots under way at a time: the disk is also what every request waits for."""

SINGLES_OF_OWNER = 4
"""Operations of one owner that run by themselves, and rebuildings, at a time: enough to keep the
engine busy, and all that another owner's has to wait for."""

BATCHES_AT_ONCE = 4
"""Batches of passes under way at a time, of different owners."""

PASSES_AT_ONCE = 1024
"""Passes in one batch: far more would be no more efficient, and to choose them takes a moment of
everybody's."""

STEPS_AT_ONCE = 32
"""Steps in one call; the answers come together."""

COSTLY = 8.0
"""A pass that takes this many times as long as its tokens usually do keeps to its owner's batch."""

_LEAST_COSTLY_SECONDS = 0.1

_EFFICIENT_TOKENS = 2048
"""What a slow device should get at a time, though it take longer than a batch may otherwise..."""

_LONGEST_SECONDS = 2.0
"""... up to this long."""


class Move(Enum):
    """What a model needs that concerns no other."""

    FAIL = auto()
    """End everything that is queued: nothing can be done with the model any more."""
    SNAPSHOT = auto()
    UNLOAD = auto()
    LOAD = auto()
    """Rebuild it in the present engine."""
    SINGLE = auto()
    """Run its next operation, which runs by itself."""


M = TypeVar("M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[M]):
    """A model that is not busy and may have something to do."""

    model: M
    model_id: str
    owner: str
    base_model: str
    front: Sequence[Operation] = ()
    """The operations that may run now, in order; of passes as many as there are in a row."""
    is_failed: bool = False
    is_loaded: bool = True
    """Whether the present engine holds it."""
    is_snapshot_due: bool = False
    wants_unload: bool = False
    is_leaving: bool = False
    """Whether it is to go on in another slot, whatever it has to do."""
    is_in_batch: bool = False
    """Whether a batch that it had its part in is about to end: its step waits a moment for those
    of the others, and goes with them."""
    rebuild_attempts: int = 0
    """How often the engine died while the model was being rebuilt."""
    seconds_per_token: float | None = None
    """What its passes took lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """What is running."""

    is_idle: bool = True
    """Whether nothing is."""
    is_alone: bool = False
    """Whether something runs that must run by itself."""
    may_pass: bool = True
    """Whether a batch of passes may begin."""
    owners_passing: frozenset[str] = frozenset()
    """Owners with passes under way, or being read for one; they begin no others beside them."""
    has_steps: bool = False
    num_saving: int = 0
    singles_of: Mapping[str, int] = field(default_factory=dict)
    """Operations that run by themselves and rebuildings, by owner."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[M]):
    moves: Sequence[tuple[Candidate[M], Move]] = ()
    steps: Sequence[Candidate[M]] = ()
    passes: Sequence[Candidate[M]] = ()
    """In the order in which they run; a model is here once for each of its passes."""
    is_alone: bool = False
    """Whether nothing else may run until this has ended."""


def choose(
    candidates: Sequence[Candidate[M]],
    under_way: UnderWay,
    shares: Shares,
    *,
    max_tokens: int,
    max_seconds: float,
    max_attempts: int,
    max_bytes: int = TUNING.batch_bytes,
) -> Choice[M]:
    """`max_tokens` and the `max_seconds` that it is expected to take bound a batch of passes; at
    `max_attempts` deaths an operation is given up."""
    if under_way.is_alone:
        return Choice()
    suspects = [c for c in candidates if _is_suspect(c, max_attempts)]
    if suspects:
        return _choose_alone(suspects[0]) if under_way.is_idle else Choice()
    moves: list[tuple[Candidate[M], Move]] = []
    steps: list[Candidate[M]] = []
    passes: list[Candidate[M]] = []
    num_saving = under_way.num_saving
    singles_of = Counter(under_way.singles_of)
    for candidate in candidates:
        move = next_move(candidate, may_save=num_saving < SAVING_AT_ONCE)
        if move in (Move.LOAD, Move.SINGLE):
            if singles_of[candidate.owner] >= SINGLES_OF_OWNER:
                continue
            singles_of[candidate.owner] += 1
        if move is not None:
            num_saving += move in (Move.SNAPSHOT, Move.UNLOAD)
            moves.append((candidate, move))
        elif candidate.front and not candidate.front[0].is_pass:
            if not candidate.is_in_batch:
                steps.append(candidate)
        elif candidate.front and candidate.owner not in under_way.owners_passing:
            passes.append(candidate)
    # Steps that wait for others go before passes: behind a batch they would miss the next one.
    may_pass = under_way.may_pass and not (under_way.has_steps and steps)
    return Choice(
        moves,
        [] if under_way.has_steps else choose_steps(steps, shares),
        choose_passes(passes, shares, max_tokens, max_seconds, max_bytes) if may_pass else [],
    )


def next_move(candidate: Candidate[M], *, may_save: bool = True) -> Move | None:
    """What the model needs that concerns no other; None for a pass, a step, or nothing."""
    head = candidate.front[0] if candidate.front else None
    if candidate.is_failed:
        return Move.FAIL
    if may_save and candidate.is_loaded and candidate.is_leaving:
        return Move.UNLOAD
    if may_save and candidate.is_loaded and candidate.is_snapshot_due:
        return Move.SNAPSHOT
    if head is None:
        is_leaving = may_save and candidate.is_loaded and candidate.wants_unload
        return Move.UNLOAD if is_leaving else None
    if head.seq_id > 0 and not candidate.is_loaded:
        return Move.LOAD
    return None if head.is_pass or head.is_step else Move.SINGLE


def choose_steps(ready: Sequence[Candidate[M]], shares: Shares) -> list[Candidate[M]]:
    """Steps for one call: one of each owner, then a second of each, and so on."""
    of_owner: dict[str, list[Candidate[M]]] = {}
    for candidate in ready:
        of_owner.setdefault(candidate.owner, []).append(candidate)
    rounds = zip_longest(*(of_owner[owner] for owner in sorted(of_owner, key=shares.of_owner)))
    in_turns = (candidate for each in rounds for candidate in each if candidate is not None)
    return list(islice(in_turns, STEPS_AT_ONCE))


def choose_passes(
    ready: Sequence[Candidate[M]],
    shares: Shares,
    max_tokens: int,
    max_seconds: float,
    max_bytes: int = TUNING.batch_bytes,
) -> list[Candidate[M]]:
    """Passes for one batch, in fair turns, in order within each model.

    Its time is bounded, by `max_seconds` or what a batch of an efficient size usually takes: an
    owner who has a part in it, and comes again while it runs, waits for all of it.
    """
    turns = _Turns(ready, shares)
    chosen: list[Candidate[M]] = []
    num_taken: Counter[str] = Counter()
    tokens_left, bytes_left, seconds_left = max_tokens, max_bytes, 0.0
    is_batch_costly = False
    while len(chosen) < PASSES_AT_ONCE and (candidate := turns.take()) is not None:
        position = num_taken[candidate.model_id]
        if position >= len(candidate.front) or not candidate.front[position].is_pass:
            continue
        operation = candidate.front[position]
        seconds = expected_seconds(candidate, operation, shares)
        is_costly = _is_costly(candidate, operation, shares)
        if not chosen:
            efficient = shares.usual_seconds(candidate.base_model, _EFFICIENT_TOKENS)
            seconds_left = max(max_seconds, min(efficient, _LONGEST_SECONDS))
        else:
            first = chosen[0]
            if candidate.base_model != first.base_model:
                continue
            if (is_costly or is_batch_costly) and candidate.owner != first.owner:
                continue
            is_too_large = operation.num_tokens > tokens_left or operation.num_bytes > bytes_left
            if is_too_large or seconds > seconds_left or operation.attempts:
                break
        chosen.append(candidate)
        num_taken[candidate.model_id] += 1
        is_batch_costly |= is_costly
        tokens_left -= operation.num_tokens
        bytes_left -= operation.num_bytes
        seconds_left -= seconds
        if operation.attempts:
            break
        turns.again(candidate, seconds)
    return chosen


def expected_seconds(candidate: Candidate[M], operation: Operation, shares: Shares) -> float:
    if candidate.seconds_per_token is not None:
        return candidate.seconds_per_token * max(1, operation.num_tokens)
    return shares.usual_seconds(candidate.base_model, operation.num_tokens)


def _is_costly(candidate: Candidate[M], operation: Operation, shares: Shares) -> bool:
    seconds = expected_seconds(candidate, operation, shares)
    usual = shares.usual_seconds(candidate.base_model, operation.num_tokens)
    return seconds > max(COSTLY * usual, _LEAST_COSTLY_SECONDS)


def _is_suspect(candidate: Candidate[M], max_attempts: int) -> bool:
    """Whether the model's next move was under way at all but one of the deaths allowed."""
    if not candidate.front or candidate.is_failed:
        return False
    attempts = max(candidate.front[0].attempts, candidate.rebuild_attempts)
    return attempts >= max_attempts - 1 > 0


def _choose_alone(candidate: Candidate[M]) -> Choice[M]:
    move = next_move(candidate)
    if move is not None:
        return Choice([(candidate, move)], is_alone=True)
    if candidate.front[0].is_pass:
        return Choice(passes=[candidate], is_alone=True)
    return Choice(steps=[candidate], is_alone=True)


def _is_at_hand(candidate: Candidate[M]) -> bool:
    return candidate.front[0].request is not None


class _Turns(Generic[M]):
    """Candidates by what their owners have had, those of one owner by what they have had."""

    def __init__(self, candidates: Sequence[Candidate[M]], shares: Shares) -> None:
        self._of_owner: dict[str, list[tuple[float, tuple[bool, int], Candidate[M]]]] = {}
        # Of two that have had as much, one whose request need not be read.
        self._order = {c.model_id: (not _is_at_hand(c), n) for n, c in enumerate(candidates)}
        self._had: dict[str, float] = {}
        for c in candidates:
            self._had[c.model_id] = shares.of_model(c.owner, c.model_id)
            heapq.heappush(self._of_owner.setdefault(c.owner, []), self._entry(c))
        self._owners = [(shares.of_owner(owner), owner) for owner in self._of_owner]
        heapq.heapify(self._owners)

    def take(self) -> Candidate[M] | None:
        """Whose turn it is; it has no other unless it is put in `again`."""
        while self._owners:
            rivals = self._of_owner[self._owners[0][1]]
            if rivals:
                return heapq.heappop(rivals)[2]
            heapq.heappop(self._owners)
        return None

    def again(self, candidate: Candidate[M], seconds: float) -> None:
        """The one just taken may have another turn, after the time that this one takes."""
        had, owner = self._owners[0]
        heapq.heapreplace(self._owners, (had + seconds, owner))
        self._had[candidate.model_id] += seconds
        heapq.heappush(self._of_owner[owner], self._entry(candidate))

    def _entry(self, candidate: Candidate[M]) -> tuple[float, tuple[bool, int], Candidate[M]]:
        """To the microsecond: of what was charged and given back, rounding leaves something."""
        key = candidate.model_id
        return round(self._had[key], 6), self._order[key], candidate
