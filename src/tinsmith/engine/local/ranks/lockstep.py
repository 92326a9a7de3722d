"""Lockstep: every call that the first rank's core gets is made on all of them.

The first rank is the engine's own process. Its worker decides what is done next, as with one rank;
`LeadingCore` tells the others before it does it, part of a pass by part of a pass, decoding step by
decoding step. Each says how it ended: ranks that end differently no longer have the same model, and
the engine ends.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tinsmith.engine.base import (
    Capabilities,
    Failure,
    FinishedPass,
    Health,
    Pass,
    SampleEvent,
    SampleJob,
    TokensSampled,
)
from tinsmith.engine.calls import CALLS
from tinsmith.engine.local.boundary.core import PassResults
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.device import device_of
from tinsmith.engine.local.ranks.group import JoinedRanks, Ranks
from tinsmith.engine.local.ranks.link import Link, Others
from tinsmith.engine.local.sample.choosing import fresh_seed
from tinsmith.errors import EngineError
from tinsmith.types import ForwardBackwardOutput, SampleResponse

_BEGIN, _ADVANCE, _CLOSE = "begin_passes", "advance_passes", "close_passes"


class LeadingCore:
    """The first rank's core, with the interface of `EngineCore`. Starts the other ranks."""

    def __init__(self, config: LocalEngineConfig) -> None:
        others = Others(config.ranks)
        self._link = others.link()
        self._ranks = JoinedRanks(0, config.ranks, self._link)
        choose_device(config, self._ranks)
        # What is wrong with the configuration shows here, before the others know of it.
        self._core = EngineCore(config, self._ranks)
        self._numbers = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="tinsmith-ranks-")
        others.begin(Path(self._folder.name), config)
        self._ranks.join(Path(self._folder.name), self._core.device)

    @property
    def is_sampling(self) -> bool:
        return self._core.is_sampling

    def health(self) -> Health:
        return self._core.health()

    def has_room_for(self, base_model: str) -> bool:
        return self._core.has_room_for(base_model)

    def base_model_of(self, adapter_id: str) -> str | None:
        return self._core.base_model_of(adapter_id)

    def submit_sample(self, job: SampleJob) -> Failure | None:
        if job.params.seed is None:  # one for all ranks
            job = replace(job, params=job.params.model_copy(update={"seed": fresh_seed()}))
        failure: Failure | None = self.together("submit_sample", job)
        return failure

    def sampling_turn(self, *, ahead: bool) -> list[tuple[str, SampleEvent]]:
        events: list[tuple[str, SampleEvent]] = self.together("sampling_turn", ahead=ahead)
        return events

    def run_passes(self, passes: Sequence[Pass]) -> PassResults:
        number = next(self._numbers)
        self._link.tell((_BEGIN, (number, passes), {}))
        self._compare(None)
        results = self._core.run_passes(passes)
        is_done = False
        try:
            while not is_done:
                self._link.tell((_ADVANCE, (number,), {}))
                result = self._guarded(functools.partial(_advance, results))
                self._compare(result)
                is_done = result is StopIteration
                if not is_done:
                    yield result
        finally:
            if not is_done:
                self._link.tell((_CLOSE, (number,), {}))
                results.close()
                self._compare(None)

    def together(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the method on all ranks; the first one's answer."""
        self._link.tell((method, arguments, options))
        call = functools.partial(getattr(self._core, method), *arguments, **options)
        value = self._guarded(call)
        self._compare(value)
        return value

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # where the others stand is not known
            self._ranks.give_up(error)
            raise

    def _compare(self, value: object) -> None:
        own = _ending(value)
        for index, ending in enumerate(self._link.hear_all(), start=1):
            if ending != own:
                problem = f"rank 0 ended with {own!r:.500}, rank {index} with {ending!r:.500}"
                self._ranks.give_up(EngineError(problem))


def _shared(method: str) -> Callable[..., Any]:
    def call(self: LeadingCore, *arguments: Any) -> Any:
        return self.together(method, *arguments)

    return call


for _method in CALLS.keys() - {"health", "run_passes", "sample"}:
    setattr(LeadingCore, _method, _shared(_method))


def follow(core: EngineCore, link: Link) -> None:
    """Do what the first rank does, for ever."""
    passes: dict[int, PassResults] = {}
    while True:
        method, arguments, options = link.hear()
        value: object = None
        if method == _BEGIN:
            number, items = arguments
            passes[number] = core.run_passes(items)
        elif method == _ADVANCE:
            value = _advance(passes[arguments[0]])
            if value is StopIteration:
                del passes[arguments[0]]
        elif method == _CLOSE:
            passes.pop(arguments[0]).close()
        else:
            value = getattr(core, method)(*arguments, **options)
        link.tell(_ending(value))


def choose_device(config: LocalEngineConfig, ranks: Ranks) -> None:
    """On CUDA each rank has a device of its own, or all share one where there are too few."""
    kind = device_of(config).type
    if kind not in ("cpu", "cuda"):
        raise EngineError(f"ranks = {ranks.count} needs device cpu or cuda, not {kind}")
    if kind == "cuda":
        torch.cuda.set_device(ranks.index if torch.cuda.device_count() >= ranks.count else 0)


def _advance(results: PassResults) -> FinishedPass | type[StopIteration] | None:
    """The next result; `StopIteration` itself at the end."""
    return next(results, StopIteration)


def _ending(value: object) -> object:
    """How a call ended, as far as ranks can compare it: times and sizes are their own."""
    if isinstance(value, Failure):
        return (value.category, value.message)
    if isinstance(value, FinishedPass):
        return (value.index, _ending(value.result))
    if isinstance(value, ForwardBackwardOutput):
        return repr(value.metrics)
    if isinstance(value, Capabilities):
        return ([model.name for model in value.models], [model.name for model in value.refused])
    if isinstance(value, SampleResponse):
        return [sequence.tokens for sequence in value.sequences]
    if isinstance(value, TokensSampled):
        return (value.index, value.tokens.tolist())
    if isinstance(value, list):  # of events by job, or of the metrics of steps
        return [_ending(each) for each in value]
    if isinstance(value, tuple):
        return tuple(_ending(each) for each in value)
    return value if isinstance(value, str | float | int | dict) else type(value).__name__
