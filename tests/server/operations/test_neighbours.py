"""What one owner sends does not change what another gets, nor when."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from tinsmith.engine.fake import FakeEngine
from tinsmith.types import Datum, ModelInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.server.conftest import StartServer
    from tinsmith.engine.base import FinishedPass, Pass


class TimedEngine(FakeEngine):
    """A pass takes as long as its tokens are many."""

    TOKEN_SECONDS = 50e-6

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        async for finished in super().run_passes(passes):
            data = passes[finished.index].data
            seconds = self.TOKEN_SECONDS * sum(datum.model_input.length for datum in data)
            await asyncio.sleep(seconds)
            yield dataclasses.replace(finished, seconds=seconds)


def _datum(length: int) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([1] * length),
        loss_fn_inputs={"target_tokens": [2] * length, "weights": [1.0] * length},
    )


async def test_short_models_are_not_starved_by_long_ones(start_server: StartServer) -> None:
    """Turns go by time: a tenant with long sequences does not take the device."""
    server = await start_server(max_gathered_tokens=1000, engine=TimedEngine)
    api = server.api
    long, short = await api.model(), await api.model()
    long_ids = [await api.send_pass(long, n, _datum(1000)) for n in range(1, 11)]
    short_ids = [await api.send_pass(short, n, _datum(10)) for n in range(1, 11)]
    await asyncio.gather(*[api.result(i) for i in short_ids])
    pending = [i for i in long_ids if server.service.promises.get(i).outcome is None]  # type: ignore[union-attr]  # all are open
    assert len(pending) >= 5, "ten short passes wait for about one long pass, not for ten"
