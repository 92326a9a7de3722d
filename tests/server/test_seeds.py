"""An adapter without a seed gets one that is recorded and shown, and the same again if wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.server.edge.auth import create_key

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.in_process_server import Api, StartServer


async def _seed(api: Api, session: str, number: int, **lora: int) -> int:
    body = {"session_id": session, "model_seq_id": number, "base_model": "tinsmith/fake"}
    promise = await api.ok("/create_model", {**body, "lora_config": {"rank": 4, **lora}})
    await api.result(promise["request_id"])
    run = (await api.get(f"/training_runs/{promise['model_id']}")).json()
    return int(run["lora_seed"])


async def test_the_seed_that_was_drawn_is_shown_and_makes_the_same_adapter(api: Api) -> None:
    session = await api.session()
    drawn = await _seed(api, session, 0)
    assert await _seed(api, session, 1, seed=drawn) == drawn
    assert await _seed(api, session, 2) != drawn


async def test_a_server_seed_gives_the_same_seeds_in_the_same_order(
    start_server: StartServer, tmp_path: Path
) -> None:
    draws = []
    for folder in ("one", "two"):
        server = await start_server(seed=7, data_dir=tmp_path / folder)
        key, _ = await create_key(server.service.store, "owner", "another")
        api, other = server.client(key), await server.other_user()
        if folder == "two":
            await _seed(other, await other.session(), 0)  # somebody else changes nothing
        sessions = [await api.session(), await api.session()]
        draws.append([await _seed(api, session, n) for session in sessions for n in (0, 1)])
        await server.stop()
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 4
