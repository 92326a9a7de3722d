"""Engines that compute alike, so that a model gets the same bits in whichever it is rebuilt.

What was answered comes out of a replay again only on a machine of the same kind, with the same
releases. On a deterministic server an engine on another is not taken: its slot waits and says why.
"""

from __future__ import annotations

import logging

from tinsmith.engine.base import Engine
from tinsmith.errors import EngineError
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.slot import EngineFactory

logger = logging.getLogger(__name__)


def alike(factory: EngineFactory) -> EngineFactory:
    """Engines that compute as the first one did; another is closed, and an error."""
    known: list[str] = []

    async def start(plan: SlotPlan) -> Engine:
        engine = await factory(plan)
        try:
            arithmetic = (await engine.capabilities()).arithmetic
            if not known:
                known.append(arithmetic)
                logger.info("engines have to compute as the first one: %s", arithmetic)
            elif arithmetic != known[0]:
                raise EngineError(
                    f"it computes with {arithmetic}, and the first engine with {known[0]}; a "
                    "deterministic server needs machines of one kind, or a model that moves would "
                    "get other bits"
                )
        except BaseException:
            # Nobody else knows of it yet.
            await engine.close()
            raise
        return engine

    return start
