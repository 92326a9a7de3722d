"""What tests of servers with several engines have in common."""

from __future__ import annotations

import asyncio

from tests.support.in_process_server import MODEL, Api, TestServer
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.slot import Slot


async def engine_in(server: TestServer, number: int) -> FakeEngine:
    engine, _ = await server.service.engines.slots[number].get()
    assert isinstance(engine, FakeEngine)
    return engine


def slot_of(server: TestServer, model_id: str) -> Slot:
    live = server.service.models.find(model_id)
    assert live is not None and live.slot is not None
    return live.slot


async def train(api: Api, model: str, first_seq_id: int, num_steps: int) -> None:
    for seq_id in range(first_seq_id, first_seq_id + 2 * num_steps, 2):
        await api.result(await api.send_pass(model, seq_id))
        await api.result(await api.send_step(model, seq_id + 1))


async def sampler_of(api: Api, model: str, seq_id: int) -> str:
    body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
    saved = await api.ok("/save_weights_for_sampler", body)
    return str((await api.result(saved["request_id"]))["sampling_session_id"])


async def base_sampler(api: Api) -> str:
    body = {
        "session_id": await api.session(),
        "sampling_session_seq_id": 0,
        "base_model": MODEL,
    }
    return str((await api.ok("/create_sampling_session", body))["sampling_session_id"])


class Gate:
    """Lets engines start, or keeps those of one slot waiting."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def wait(self, plan: SlotPlan) -> None:
        if plan.number == 0:
            await self.is_open.wait()
