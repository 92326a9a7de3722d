"""The checker believes a right service, and finds each fault that is planted in one.

The service is a toy: a model's state is the list of what was done to it, and a pass answers with a
checksum of that list. Its clients send again what they got no answer to, and it restarts.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from history.calls import Answer, Call, Submission
from history.checker import violations

NUM_OPERATIONS = 12
FAULTS = (
    "a repeat is done again",
    "a repeat gets another promise",
    "an old holder does one more",
    "an answer is another's",
    "an operation is lost at a restart",
    "two change places",
    "a sampler goes on learning",
    "a later one ends first",
    "an outcome changes",
    "a number is taken twice",
)


@dataclass
class Model:
    state: list[str]
    promises: dict[int, str] = field(default_factory=dict)
    sampler: list[str] | None = None


class Toy:
    """What clients see of a service with a fault, or of one without (`fault` is None)."""

    def __init__(self, seed: int, fault: str | None) -> None:
        self.calls: list[Call] = []
        self._chance = random.Random(seed)
        self._fault = fault
        self._clock = itertools.count(1.0)
        self._ids = (f"request-{number}" for number in itertools.count())
        self._is_done = False
        """Whether the fault has shown itself; it does once."""

    def run(self) -> list[Call]:
        """Two clients with the same program; the fault comes over the second."""
        for name in ("first", "second"):
            self._program(name, may_fail=name == "second")
        return self.calls

    def _program(self, name: str, *, may_fail: bool) -> None:
        program = random.Random(7)  # the same for both
        moment = self._chance.randrange(2, NUM_OPERATIONS - 2)
        self._submit("create_model", "session", 0, "rank 4", made=name)
        model = Model(["rank 4"])
        held: list[Callable[[], None]] = []
        for seq_id in range(1, NUM_OPERATIONS + 1):
            kind = program.choice(("forward", "forward_backward", "optim_step"))
            asks = f"{kind} {program.random()}"
            fault = self._fault if may_fail and seq_id >= moment else None
            self._operate(name, model, seq_id, kind, asks, fault, held)
            if seq_id == NUM_OPERATIONS // 2:
                self._save(name, model)
        for end in held:
            end()
        self._forward(name, model, NUM_OPERATIONS + 2, "probe")
        sampled = model.state if self._shows("a sampler goes on learning", may_fail) else None
        state = sampled or model.sampler
        assert state is not None
        self._submit("asample", f"sampler of {name}", 1, "prompt", value=_checksum(state))

    def _operate(
        self,
        name: str,
        model: Model,
        seq_id: int,
        kind: str,
        asks: str,
        fault: str | None,
        held: list[Callable[[], None]],
    ) -> None:
        if seq_id > NUM_OPERATIONS // 2:
            seq_id += 1  # the save has one
        before = list(model.state)
        self._apply(model, kind, asks, fault)
        value = _checksum(before) if kind != "optim_step" else None
        if self._shows("an answer is another's", fault, kind != "optim_step"):
            value = _checksum(before[:-1])
        repeats = self._shows("a repeat gets another promise", fault)
        request_id = self._send(name, seq_id, kind, asks)
        if repeats or self._chance.random() < 0.3:
            self._send(name, seq_id, kind, asks, None if repeats else request_id)
        if self._shows("a number is taken twice", fault):
            self._send(name, seq_id, kind, asks + " of another", request_id)
        if self._shows("a later one ends first", fault):
            held.append(lambda: self._ask(request_id, value, kind, waits=True))
            return
        self._ask(request_id, value, kind, waits=self._chance.random() < 0.3)
        if self._chance.random() < 0.3:
            self._ask(request_id, value, kind)
        if self._shows("an outcome changes", fault, kind != "optim_step"):
            self._ask(request_id, _checksum([*before, "late"]), kind)

    def _apply(self, model: Model, kind: str, asks: str, fault: str | None) -> None:
        if kind == "forward":
            return
        if self._shows("an operation is lost at a restart", fault):
            return
        model.state.append(asks)
        if self._shows("a repeat is done again", fault):
            model.state.append(asks)
        if self._shows("an old holder does one more", fault):
            model.state.append("what another server had in its hands")
        if len(model.state) > 2 and self._shows("two change places", fault):
            model.state[-2:] = reversed(model.state[-2:])

    def _save(self, name: str, model: Model) -> None:
        model.sampler = list(model.state)
        seq_id = NUM_OPERATIONS // 2 + 1
        self._submit("save_weights_for_sampler", name, seq_id, "save", made=f"sampler of {name}")

    def _forward(self, name: str, model: Model, seq_id: int, asks: str) -> None:
        self._submit("forward", name, seq_id, asks, value=_checksum(model.state))

    def _submit(
        self,
        kind: str,
        whose: str,
        seq_id: int,
        asks: str,
        *,
        value: str | None = None,
        made: str | None = None,
    ) -> None:
        body = f"{asks} {made}"
        request_id = self._send(whose, seq_id if made != "second" else 1, kind, asks, body=body)
        self._ask(request_id, value, kind, made=made)

    def _send(
        self,
        whose: str,
        seq_id: int,
        kind: str,
        asks: str,
        request_id: str | None = None,
        *,
        body: str | None = None,
    ) -> str:
        request_id = request_id or next(self._ids)
        self.calls.append(
            Submission(
                started=next(self._clock),
                ended=next(self._clock),
                kind=kind,
                whose=whose,
                seq_id=seq_id,
                body=body or asks,
                asks=asks,
                request_id=request_id,
            )
        )
        return request_id

    def _ask(
        self,
        request_id: str,
        value: str | None,
        kind: str,
        *,
        waits: bool = False,
        made: str | None = None,
    ) -> None:
        for outcome in [None, "done"] if waits else ["done"]:
            self.calls.append(
                Answer(
                    started=next(self._clock),
                    ended=next(self._clock),
                    request_id=request_id,
                    outcome=outcome,
                    value=value if outcome else None,
                    made=made if outcome else None,
                )
            )

    def _shows(self, fault: str, present: str | bool | None, is_fit: bool = True) -> bool:
        """Whether the planted fault is this one, and now is the moment."""
        is_it = (present is True and self._fault == fault) or present == fault
        if not is_it or not is_fit or self._is_done:
            return False
        self._is_done = True
        return True


def _checksum(state: list[str]) -> str:
    return hashlib.sha256("\0".join(state).encode()).hexdigest()[:16]


@pytest.mark.parametrize("seed", range(50))
def test_a_right_service_is_believed(seed: int) -> None:
    assert violations(Toy(seed, None).run()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    found = {seed: violations(Toy(seed, fault).run()) for seed in range(50)}
    assert all(found.values()), [seed for seed in found if not found[seed]]
