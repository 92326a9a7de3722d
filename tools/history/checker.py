"""Whether a history can be true of a service that does each operation exactly once and in order.

Nothing is known of the service but what clients saw. Five things must hold:

- A number stands for one request: sent twice it is promised once, and never taken for another.
- A promise has one outcome, however often and by whom it is asked for.
- What has ended stays ended, and nothing ends before what came before it: once a client knows the
  outcome of an operation, no later question finds an earlier one of that model unfinished.
- A result is determined by the state it meets, and that by the operations before it: wherever the
  same operations have led to the same state, the same question gets the same numbers.
- Samplers do not change: they answer as the state that they were made of.

The state is a name: a checksum of how the model was made and of all that changed it, in order. An
operation that was done twice, left out, or done in other order has another effect than its name
says, which shows as soon as any other model has gone the same way.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

from history.calls import CREATIONS, PASSES, Answer, Call, Submission

_NUMBERED_ELSEWHERE = (*CREATIONS, "asample")
"""Creations are numbered within their session, samples within their sampler."""

_CHANGING = ("forward_backward", "optim_step", "load_weights")


def violations(history: Iterable[Call]) -> list[str]:
    """What cannot be, in sentences; nothing where all is as it should be."""
    calls = list(history)
    submitted = [call for call in calls if isinstance(call, Submission)]
    answers: dict[str, list[Answer]] = defaultdict(list)
    for call in calls:
        if isinstance(call, Answer):
            answers[call.request_id].append(call)
    return [
        *_promises(submitted),
        *_outcomes(answers),
        *_order(submitted, answers),
        *_States(submitted, answers).violations(),
    ]


def _promises(submitted: list[Submission]) -> Iterator[str]:
    first: dict[tuple[str, str, int], Submission] = {}
    for each in submitted:
        if each.seq_id is None:
            continue
        room = each.kind if each.kind in _NUMBERED_ELSEWHERE else ""
        known = first.setdefault((room, each.whose, each.seq_id), each)
        where = f"number {each.seq_id} of {each.whose}"
        if known.body != each.body:
            yield f"{where} was taken for a {known.kind} and for another {each.kind}"
        elif known.request_id != each.request_id and each.kind != "asample":
            yield f"{where}, sent again, got another promise: a {each.kind} is done twice"


def _outcomes(answers: dict[str, list[Answer]]) -> Iterator[str]:
    for request_id, told in answers.items():
        # A client may ask for one result in two forms: then only the numbers can be compared.
        values = {a.value for a in told if a.value is not None}
        failures = {a.outcome for a in told if a.is_failed}
        has_both = failures and any(a.outcome is not None and not a.is_failed for a in told)
        if len(values) > 1 or len(failures) > 1 or has_both:
            yield f"{request_id} had several outcomes: {sorted(values | failures)}"


def _order(submitted: list[Submission], answers: dict[str, list[Answer]]) -> Iterator[str]:
    models: dict[str, dict[int, Submission]] = defaultdict(dict)
    for each in submitted:
        if each.kind not in _NUMBERED_ELSEWHERE and each.seq_id is not None:
            models[each.whose].setdefault(each.seq_id, each)
    for model_id, operations in models.items():
        known_at = float("inf")
        later = 0
        for seq_id in sorted(operations, reverse=True):
            told = answers.get(operations[seq_id].request_id, [])
            late = [a for a in told if a.outcome is None and a.started > known_at]
            if late:
                yield f"operation {later} of {model_id} had ended while {seq_id} had not"
            ended = min((a.ended for a in told if a.outcome is not None), default=float("inf"))
            if ended < known_at:
                known_at, later = ended, seq_id


class _States:
    """Follows each model from state to state, and compares what was said of the same states."""

    def __init__(self, submitted: list[Submission], answers: dict[str, list[Answer]]) -> None:
        self._submitted = submitted
        self._ends = {
            request_id: ended[0]
            for request_id, told in answers.items()
            if (ended := [a for a in told if a.outcome is not None])
        }
        self._of_path: dict[str, str] = {}
        """The states that checkpoints and samplers hold, by path or id."""
        self._said: dict[tuple[str, str, str], tuple[str, str]] = {}

    def violations(self) -> Iterator[str]:
        created = {
            end.made: each
            for each in self._submitted
            if each.kind in CREATIONS
            and (end := self._ends.get(each.request_id)) is not None
            and end.made is not None
        }
        operations: dict[str, dict[int, Submission]] = defaultdict(dict)
        for each in self._submitted:
            if each.seq_id is not None and each.kind not in _NUMBERED_ELSEWHERE:
                operations[each.whose].setdefault(each.seq_id, each)
        # By time, so that what a model loads was saved by one that is known already.
        for model_id, creation in sorted(created.items(), key=lambda item: item[1].started):
            yield from self._follow(creation, operations[str(model_id)])
        for each in self._submitted:
            if each.kind == "asample":
                state = self._of_path.get(each.whose) or self._of_path.get(each.path or "")
                yield from self._compare(state, each)

    def _follow(self, creation: Submission, operations: dict[int, Submission]) -> Iterator[str]:
        state = _name("new", creation.asks) if creation.path is None else self._loaded(creation)
        for seq_id in sorted(operations):
            each = operations[seq_id]
            if seq_id > 1 and seq_id - 1 not in operations:
                state = None  # one came by a way that nobody listened to, or never
            end = self._ends.get(each.request_id)
            if each.kind in PASSES:
                yield from self._compare(state, each)
            if end is None:
                state = None if each.kind in _CHANGING else state
            elif state is not None:
                state = self._after(state, each, end)
            elif each.kind == "load_weights" and not end.is_failed:
                state = self._loaded(each)

    def _after(self, state: str, each: Submission, end: Answer) -> str | None:
        if end.is_failed:
            # What fails may have had an effect (a step drops its gradient), but always the same.
            return _name(state, each.kind, each.asks, str(end.outcome))
        if end.made is not None and each.kind.startswith("save"):
            self._of_path.setdefault(end.made, state)
        if each.kind == "load_weights":
            return self._loaded(each)
        if each.kind in _CHANGING:
            return _name(state, each.kind, each.asks) if each.is_repeatable else None
        return state

    def _loaded(self, each: Submission) -> str | None:
        saved = self._of_path.get(each.path or "")
        return None if saved is None else _name("loaded", saved, each.asks)

    def _compare(self, state: str | None, each: Submission) -> Iterator[str]:
        end = self._ends.get(each.request_id)
        if state is None or end is None or end.value is None or not each.is_repeatable:
            return
        known, who = self._said.setdefault((state, each.kind, each.asks), (end.value, _where(each)))
        if known != end.value:
            yield (
                f"{_where(each)} got {end.value}, but after the same operations {who} got {known}"
            )


def _where(each: Submission) -> str:
    return f"{each.kind} {each.seq_id} of {each.whose}"


def _name(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
