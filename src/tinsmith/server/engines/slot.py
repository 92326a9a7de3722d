"""A slot: a place for an engine, with what the engine in it holds and has to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from tinsmith.engine.base import Engine
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.supervisor import EngineSupervisor
from tinsmith.server.sampling.loaded import LoadedSamplers

if TYPE_CHECKING:
    from tinsmith.server.operations.live_model import LiveModel

EngineFactory = Callable[[SlotPlan], Awaitable[Engine]]
"""Starts an engine for a slot; called again when the engine has died."""


class Slot(EngineSupervisor):
    def __init__(
        self,
        plan: SlotPlan,
        factory: EngineFactory,
        clean_up: Callable[[], Awaitable[None]],
        samplers: LoadedSamplers,
        health_seconds: float,
    ) -> None:
        super().__init__(partial(factory, plan), clean_up, health_seconds)
        self.plan = plan
        self.samplers = samplers
        """The frozen weights that its engine holds."""
        self.models: dict[LiveModel, None] = {}
        """The models that train here, in the engine or on their way into it."""
        self.bases: set[str] = set()
        """The base models that its engine has been asked to work with."""
        self.num_jobs = 0
        """Sampling jobs under way."""
        self.is_draining = False
        """Whether its models move away and nothing new comes."""
        self.on_start(self.bases.clear)
        self.on_health(samplers.heed)

    @property
    def number(self) -> int:
        return self.plan.number

    @property
    def is_open(self) -> bool:
        """Whether something new may come."""
        return not self.is_draining and not self.is_lost

    @property
    def state(self) -> str:
        """In a word or two, for people."""
        if self.is_draining:
            return "drained" if not self.models and not self.num_jobs else "draining"
        if self.is_lost:
            return "lost"
        if self.is_up:
            return "up"
        return "restarting" if self.generation else "starting"
