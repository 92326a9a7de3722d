"""How long unnamed samplers live: as long as anybody may ask for them, and minutes longer at most.

Who may ask are the clients that hold one: the one that made it, and those that joined it. A client
of ours says when it is gone; of any other the session's end is the sign.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.server.sampling.test_samplers import freeze, sampler_of_checkpoint

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


async def _release(api: Api, sampler: str) -> int:
    path = f"/api/v1/samplers/{sampler}"
    return (await api.http.delete(path, headers=api.headers)).status_code


async def _finish(api: Api, session: str) -> None:
    response = await api.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    assert response.status_code == 204, response.text


async def _status(api: Api, sampler: str, number: int = 0) -> int:
    return (await api.post("/asample", api.sample_body(sampler, number))).status_code


async def _num_kept(server: TestServer) -> int:
    """How many unnamed samplers take room; what the store has forgotten is not on disk either."""
    folder = server.service.config.data_dir / "weights"
    weights = server.service.store.weights
    assert {each.name for each in folder.iterdir()} == set(await weights.ids())
    return sum(n for what, _, n, _ in await weights.room() if what == "unnamed samplers")


async def test_a_loop_that_drops_each_sampler_leaves_no_weights(server: TestServer) -> None:
    api = server.api
    model = await api.model()
    for number in range(1, 21):
        sampler = await freeze(api, model, number)
        await api.sample(sampler)
        assert await _release(api, sampler) == 204
        assert await _status(api, sampler) == 404
    await server.service.tidy()
    assert await _num_kept(server) == 0


async def test_a_sampler_that_others_have_joined_is_not_released_by_one(server: TestServer) -> None:
    api = server.api
    sampler = await freeze(api, await api.model(), 1)
    await api.ok("/join_sampling_session", {"sampling_session_id": sampler})
    assert await _release(api, sampler) == 204
    await server.service.tidy()
    assert len((await api.sample(sampler)).sequences) == 1


async def test_a_sampler_of_a_checkpoint_is_not_released(server: TestServer) -> None:
    sampler = await sampler_of_checkpoint(server.api)
    assert await _release(server.api, sampler) == 204
    assert await _status(server.api, sampler) == 200


async def test_nobody_releases_what_is_anothers(server: TestServer) -> None:
    sampler = await freeze(server.api, await server.api.model(), 1)
    assert await _release(await server.other_user(), sampler) == 404
    assert await _status(server.api, sampler) == 200


async def test_the_samplers_of_a_finished_session_go_minutes_after_the_last_sample(
    start_server: StartServer,
) -> None:
    server = await start_server(finished_sampler_seconds=0.0)
    api = server.api
    sessions = [await api.session() for _ in range(2)]
    samplers = [await freeze(api, await api.create_model(each), 1) for each in sessions]
    await server.service.tidy()
    assert await _num_kept(server) == 2, "a session that is not finished keeps them"
    await _finish(api, sessions[0])
    await server.service.tidy()
    assert [await _status(api, each) for each in samplers] == [404, 200]
    assert await _num_kept(server) == 1


async def test_who_still_samples_from_a_finished_session_keeps_its_samplers(
    server: TestServer,
) -> None:
    """Another process with a handle, for instance."""
    api = server.api
    session = await api.session()
    sampler = await freeze(api, await api.create_model(session), 1)
    await _finish(api, session)
    await server.service.tidy()
    assert await _status(api, sampler) == 200


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_disappears_that_a_client_may_ask_for_and_nothing_else_stays(
    start_server: StartServer, seed: int
) -> None:
    """A random life: freezes, joins, drops, ends of sessions, and the housekeeping in between."""
    chance = random.Random(seed)
    server = await start_server(finished_sampler_seconds=0.0)
    api = server.api
    sessions = [await api.session() for _ in range(3)]
    models = {session: await api.create_model(session) for session in sessions}
    numbers = dict.fromkeys(sessions, 0)
    holders: dict[str, int] = {}
    """How many clients have a sampler, as far as anybody can know."""
    gone: set[str] = set()
    for _ in range(80):
        doing = chance.random()
        alive = [sampler for sampler in holders if sampler not in gone]
        if doing < 0.4 and models:
            session = chance.choice(list(models))
            numbers[session] += 1
            holders[await freeze(api, models[session], numbers[session])] = 1
        elif doing < 0.5 and alive:
            sampler = chance.choice(alive)
            await api.ok("/join_sampling_session", {"sampling_session_id": sampler})
            holders[sampler] += 1
        elif doing < 0.7 and alive:
            sampler = chance.choice(alive)
            assert await _release(api, sampler) == 204
            if holders[sampler] == 1:
                gone.add(sampler)
        elif doing < 0.72 and len(models) > 1:
            session = chance.choice(list(models))
            del models[session]
            await _finish(api, session)
            await server.service.tidy()
            gone |= {sampler for sampler in holders if sampler.startswith(session)}
        elif doing < 0.8:
            await server.service.tidy()
        else:
            for sampler in chance.sample(list(holders), min(3, len(holders))):
                expected = 404 if sampler in gone else 200
                assert await _status(api, sampler, chance.randrange(10**9)) == expected
    await server.service.tidy()
    assert await _num_kept(server) == len(holders) - len(gone)
