"""Nothing that was answered is lost: not with an engine, not with the server."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.support.in_process_server import MODEL, datum
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.operations.codecs import PassCodec
from tinsmith.server.store.database import Database
from tinsmith.server.trash import Trash
from tinsmith.server.tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.support.in_process_server import Api, StartServer, TestServer
    from tinsmith.engine.base import Pass, Step
    from tinsmith.server.engines.plan import SlotPlan


async def _steps(api: Api, model: str, first: int, count: int) -> list[str]:
    """Send `count` pairs of pass and step, numbered from `first`; their request ids."""
    ids = []
    for index in range(count):
        seq_id = first + 2 * index
        ids.append(await api.send_pass(model, seq_id))
        ids.append(await api.send_step(model, seq_id + 1))
    return ids


async def _undisturbed(api: Api, count: int) -> float:
    model = await api.model()
    for request_id in await _steps(api, model, 1, count):
        await api.result(request_id)
    return await api.loss(model, 2 * count + 1)


async def test_an_engine_that_dies_in_mid_step_costs_nothing(start_server: StartServer) -> None:
    server = await start_server(fake_pass_seconds=0.05)
    api = server.api
    expected = await _undisturbed(api, 5)
    model = await api.model()
    ids = await _steps(api, model, 1, 5)
    await api.result(ids[3])
    server.kill_engine()
    for request_id in ids:
        await api.result(request_id)
    assert await api.loss(model, 11) == expected
    assert len(server.engines) == 2


async def test_an_engine_that_dies_while_idle_is_replaced_before_the_next_request(
    server: TestServer,
) -> None:
    api = server.api
    model = await api.model()
    for request_id in await _steps(api, model, 1, 2):
        await api.result(request_id)
    before = await api.loss(model, 5)
    server.kill_engine()
    assert await api.loss(model, 6) == before


async def test_a_rebuild_asks_the_store_a_few_times_however_long_the_log_is(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a question for each operation, hundreds of models took half a minute to come back."""
    asked = 0
    in_thread = Database.in_thread

    async def counted(database: Database, function: Callable[..., Any], *args: Any) -> Any:
        nonlocal asked
        asked += function.__qualname__.startswith(("Log.", "Database."))
        return await in_thread(database, function, *args)

    api = server.api
    model = await api.model()
    for request_id in await _steps(api, model, 1, 20):
        await api.result(request_id)
    before = await api.loss(model, 41)
    server.kill_engine()
    await server.until(lambda: len(server.engines) == 2)
    monkeypatch.setattr(Database, "in_thread", counted)
    assert await api.loss(model, 42) == before
    assert 0 < asked < 20, "40 operations were replayed"


async def test_a_step_that_failed_fails_again_in_the_replay_and_nothing_else_does(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have dropped a gradient, so a replay without it would end elsewhere."""
    taken: list[tuple[FakeEngine, float]] = []
    take_step = FakeEngine.step

    async def recorded(engine: FakeEngine, steps: Sequence[Step]) -> Any:
        taken.extend((engine, step.params.learning_rate) for step in steps)
        return await take_step(engine, steps)

    monkeypatch.setattr(FakeEngine, "step", recorded)
    api = server.api
    models = [await api.model(), await api.model()]
    losses = []
    for model in models:
        await api.result(await api.send_pass(model, 1))
        failure, category = await api.failure(await api.send_step(model, 2, learning_rate=-1.0))
        assert (category, "learning_rate" in failure) == ("user", True)
        if model == models[1]:
            server.kill_engine()
        await api.result(await api.send_step(model, 3))
        losses.append(await api.loss(model, 4))
    assert losses[0] == losses[1]
    assert [rate for engine, rate in taken if engine is server.engines[1]] == [-1.0, 0.1]


async def test_an_operation_that_kills_the_engine_each_time_is_given_up(
    start_server: StartServer,
) -> None:
    server = await start_server(fake_pass_seconds=0.3)
    model = await server.api.model()
    request_id = await server.api.send_pass(model, 1)

    async def kill_each() -> None:
        for number in range(1, 4):
            await server.until(lambda n=number: _is_working(server, n))
            await asyncio.sleep(0.05)
            server.kill_engine()

    async with asyncio.timeout(20):
        killer = asyncio.create_task(kill_each())
        error, category = await server.api.failure(request_id)
        await killer
    assert "died 3 times" in error and category == "server"
    assert await server.api.loss(model, 2) > 0


def _is_working(server: TestServer, number: int) -> bool:
    return len(server.engines) >= number and server.service.scheduler.is_batch_running


async def test_samplers_live_through_the_death_of_the_engine(server: TestServer) -> None:
    api = server.api
    model = await api.model()
    for request_id in await _steps(api, model, 1, 2):
        await api.result(request_id)
    body = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}
    saved = await api.ok("/save_weights_for_sampler", body)
    sampler = (await api.result(saved["request_id"]))["sampling_session_id"]
    before = await api.sample(sampler, 0, prompt_logprobs=True)
    await api.result(await api.send_pass(model, 6))
    await api.result(await api.send_step(model, 7, learning_rate=1.0))
    server.kill_engine()
    after = await api.sample(sampler, 1, prompt_logprobs=True)
    assert after.prompt_logprobs == before.prompt_logprobs
    assert [s.tokens for s in after.sequences] == [s.tokens for s in before.sequences]


async def test_a_sample_under_way_starts_again_when_the_engine_dies(
    start_server: StartServer,
) -> None:
    server = await start_server(fake_token_seconds=0.02)
    api = server.api
    session = await api.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tinsmith/fake"}
    sampler = (await api.ok("/create_sampling_session", body))["sampling_session_id"]
    sampling = {"max_tokens": 20, "seed": 3, "stop": []}
    expected = await api.sample(sampler, 0, sampling_params=sampling)
    running = asyncio.create_task(api.sample(sampler, 1, sampling_params=sampling))
    await asyncio.sleep(0.2)
    server.kill_engine()
    response = await running
    assert [s.tokens for s in response.sequences] == [s.tokens for s in expected.sequences]


async def test_a_restarted_server_resolves_the_ids_it_gave_out(start_server: StartServer) -> None:
    server = await start_server(fake_pass_seconds=0.05)
    expected = await _undisturbed(server.api, 4)
    model = await server.api.model()
    ids = await _steps(server.api, model, 1, 4)
    await server.api.result(ids[2])
    await server.stop()
    server = await start_server()
    for request_id in ids:
        await server.api.result(request_id)
    assert await server.api.loss(model, 9) == expected


async def test_a_start_reads_models_together_and_rebuilds_them_without_reading_more(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, with their logs twice, hundreds took seconds to come back after a takeover."""
    server = await start_server()
    models = [await server.api.model() for _ in range(20)]
    before = []
    for model in models:
        for request_id in await _steps(server.api, model, 1, 2):
            await server.api.result(request_id)
        before.append(await server.api.loss(model, 5))
    await server.stop()
    asked = 0
    in_thread = Database.in_thread

    async def counted(database: Database, function: Callable[..., Any], *args: Any) -> Any:
        nonlocal asked
        asked += function.__qualname__.startswith(("Log.", "Database."))
        return await in_thread(database, function, *args)

    monkeypatch.setattr(Database, "in_thread", counted)
    server = await start_server()
    after = [await server.api.loss(model, 6) for model in models]
    assert after == before
    assert asked < 2 * len(models), "each session is read when it first comes, and little else"


async def test_what_was_read_at_a_start_is_replayed_once_and_never_when_it_is_old(
    start_server: StartServer,
) -> None:
    server = await start_server()
    expected = await _undisturbed(server.api, 4)
    model = await server.api.model()
    for request_id in await _steps(server.api, model, 1, 2):
        await server.api.result(request_id)
    await server.stop()
    server = await start_server()
    for first in (5, 7):
        for request_id in await _steps(server.api, model, first, 1):
            await server.api.result(request_id)
        server.kill_engine()
        await server.until(lambda: server.service.engines.is_up)
    assert await server.api.loss(model, 9) == expected


async def test_a_model_whose_creation_waited_at_the_start_is_rebuilt_with_all_it_learnt(
    start_server: StartServer,
) -> None:
    """Nothing of it had been carried out when its log was read."""
    may_start = asyncio.Event()
    may_start.set()

    async def wait(plan: SlotPlan) -> None:
        await may_start.wait()

    server = await start_server(before_start=wait)
    expected = await _undisturbed(server.api, 2)
    session = await server.api.session()
    may_start.clear()
    server.kill_engine()
    asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    promise = await server.api.ok("/create_model", asked | {"lora_config": {"rank": 4, "seed": 1}})
    await server.stop()
    server = await start_server()
    model = promise["model_id"]
    for request_id in await _steps(server.api, model, 1, 2):
        await server.api.result(request_id)
    server.kill_engine()
    assert await server.api.loss(model, 5) == expected


async def test_what_a_rebuild_holds_is_bounded_in_bytes_and_decoded_beside_the_event_loop(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by a number of operations alone: each may have a hundred megabytes."""
    sizes: list[int] = []
    run_passes, decode = FakeEngine.run_passes, PassCodec.decode
    decoding: set[threading.Thread] = set()

    def decoded(*args: Any) -> Any:
        decoding.add(threading.current_thread())
        return decode(*args)

    def noted(engine: FakeEngine, passes: Sequence[Pass]) -> Any:
        sizes.append(sum(datum.nbytes for each in passes for datum in each.data))
        return run_passes(engine, passes)

    api = server.api
    model = await api.model()
    large = datum(*(1 + number % 200 for number in range(4000)))
    for seq_id in range(1, 9):
        await api.result(await api.send_pass(model, seq_id, *[large] * 20))
    await api.result(await api.send_step(model, 9))
    before = await api.loss(model, 10)
    server.kill_engine()
    monkeypatch.setattr(FakeEngine, "run_passes", noted)
    monkeypatch.setattr(PassCodec, "decode", decoded)
    assert await api.loss(model, 11) == before
    *replayed, _ = sizes
    assert len(replayed) > 1 and max(replayed) < 0.8 * sum(replayed)
    assert decoding and threading.main_thread() not in decoding, "the event loop is for others"


@pytest.mark.parametrize("policy", [{"snapshot_steps": 2}, {"snapshot_log_bytes": 500}])
async def test_a_snapshot_shortens_the_log_and_changes_nothing(
    start_server: StartServer, policy: dict[str, int]
) -> None:
    server = await start_server(**policy)
    expected = await _undisturbed(server.api, 6)
    model = await server.api.model()
    for request_id in await _steps(server.api, model, 1, 6):
        await server.api.result(request_id)
    record = await server.service.store.models.get(model)
    assert record is not None and record.snapshot_seq_id > 2
    server.kill_engine()
    assert await server.api.loss(model, 13) == expected


@pytest.mark.parametrize("way", ["forward", "failed", "refused"])
async def test_a_log_in_which_nothing_changes_the_model_is_trimmed_too(
    start_server: StartServer, way: str
) -> None:
    server = await start_server(
        snapshot_log_operations=8,
        log_keep_operations=0,
        retrieved_retention_seconds=0.0,
        training_retention_seconds=0.0,
    )
    api, store = server.api, server.service.store
    model = await api.model()
    await api.result(await api.send_pass(model, 1))
    await api.result(await api.send_step(model, 2))
    expected = await api.loss(model, 3)
    live = server.service.models.find(model)
    assert live is not None
    for seq_id in range(4, 44):
        if way == "forward":
            assert await api.loss(model, seq_id) == expected
        elif way == "failed":
            body = {"model_id": model, "seq_id": seq_id, "path": "tinker://nothing/here"}
            promise = await api.ok("/load_weights", body)
            await api.failure(promise["request_id"])
        else:
            body = {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": "x"}}
            assert (await api.post("/optim_step", body)).status_code == 400
            await server.until(lambda: live.operations_since_snapshot < 9)
    await server.until(lambda: not live.is_busy)
    await server.service.tidy()
    await server.service.tidy_results()
    record = await store.models.get(model)
    assert record is not None and record.snapshot_seq_id > 30
    assert len(await store.log.read(model, 0)) < 24
    server.kill_engine()
    assert await api.loss(model, 44) == expected
    await server.stop()
    server = await start_server()
    assert await server.api.loss(model, 45) == expected


async def test_a_snapshot_keeps_gradients_that_are_not_applied_yet(
    start_server: StartServer,
) -> None:
    """A snapshot between two passes of one batch must hold the first one's gradient."""
    server = await start_server()
    api = server.api
    expected_model, model = await api.model(), await api.model()
    for each in (expected_model, model):
        await api.result(await api.send_pass(each, 1))
        if each is model:
            live = await server.service.models.get(model)
            assert live is not None
            engine = await server.service.engines.first()
            await server.service.snapshots.take(engine, live)
            server.kill_engine()
        await api.result(await api.send_pass(each, 2))
        await api.result(await api.send_step(each, 3))
    assert await api.loss(model, 4) == await api.loss(expected_model, 4)


async def test_a_load_is_replayed_although_its_checkpoint_was_deleted(server: TestServer) -> None:
    api = server.api
    model = await api.model()
    for request_id in await _steps(api, model, 1, 2):
        await api.result(request_id)
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 5, "path": "a"})
    path = (await api.result(saved["request_id"]))["path"]
    await api.result(await api.send_pass(model, 6))
    await api.result(await api.send_step(model, 7, learning_rate=1.0))
    body = {"model_id": model, "seq_id": 8, "path": path, "optimizer": True}
    await api.result((await api.ok("/load_weights", body))["request_id"])
    before = await api.loss(model, 9)
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert (await api.http.delete(url, headers=api.headers)).status_code == 204
    server.kill_engine()
    assert await api.loss(model, 10) == before


@pytest.mark.parametrize("limit", [{"max_loaded_models": 1}, {"max_engine_bytes": 1}])
async def test_idle_models_go_to_disk_and_come_back(
    start_server: StartServer, limit: dict[str, int]
) -> None:
    server = await start_server(**limit)
    api = server.api
    models = [await api.model(seed=n) for n in range(3)]
    for model in models:
        for request_id in await _steps(api, model, 1, 2):
            await api.result(request_id)
    losses = [await api.loss(model, 5) for model in models]
    await server.until(lambda: sum(m.generation > 0 for m in server.service.models) <= 1)
    assert [await api.loss(model, 6) for model in models] == losses


async def test_models_beyond_the_limit_that_were_all_at_work_at_once_go_to_disk_afterwards(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_models=2, fake_pass_seconds=0.1)
    api, models = server.api, server.service.models

    def num_loaded() -> int:
        return sum(model.generation > 0 for model in models)

    names = [await api.model(seed=n) for n in range(6)]
    await asyncio.gather(*[api.send_pass(name, n) for n in (1, 2, 3) for name in names])
    await server.until(lambda: num_loaded() > 4)  # nobody waits for a place
    await asyncio.gather(*[api.loss(name, 4) for name in names])
    await server.until(lambda: num_loaded() == 2)


async def test_who_holds_few_models_keeps_them_though_they_are_idle_longest(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_models=3)
    rude, kind = server.api, await server.other_user()
    model = await kind.model()
    for _ in range(6):
        await rude.model()
    live = await server.service.models.get(model)
    assert live is not None
    await server.until(lambda: sum(m.generation > 0 for m in server.service.models) == 3)
    assert live.generation > 0, "six models of another owner came after it"


async def test_who_is_idle_for_a_moment_does_not_make_room_for_another_owners_many_at_work(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_models=3, tuning=Tuning(models_seconds=0.01))
    rude, kind = server.api, await server.other_user()
    names = [await rude.model(seed=n) for n in range(6)]
    for name in names:
        await rude.send_pass(name, 2)  # it waits for the first, and its model with it
    await server.until(lambda: sum(len(m.queue) for m in server.service.models) == 6)
    model = await kind.model()
    for number in (1, 2):
        await kind.loss(model, number)
        await asyncio.sleep(0.1)  # the models are counted ten times
    live = await server.service.models.get(model)
    assert live is not None and live.generation > 0, "his is the only one with nothing to do"
    await asyncio.gather(*[rude.send_pass(name, 1) for name in names])
    await server.until(lambda: sum(m.generation > 0 for m in server.service.models) == 3)
    assert live.generation > 0


async def test_weights_without_a_record_go_to_the_trash_at_the_start(
    start_server: StartServer, tmp_path: Path
) -> None:
    """A save that did not end leaves such a folder."""
    await (await start_server()).stop()
    stray = tmp_path / "data" / "weights" / "0123"
    stray.mkdir(parents=True)
    server = await start_server()
    assert not stray.exists()
    assert [e.name for e in Trash(server.service.folder.trash).entries()] == ["0123"]


async def test_results_are_forgotten_after_their_time(start_server: StartServer) -> None:
    server = await start_server(training_retention_seconds=0.0)
    api = server.api
    model = await api.model()
    request_id = await api.send_pass(model, 1)
    await api.result(request_id)
    await server.service.tidy_results()
    server.service.promises.forget([request_id])
    response = await api.retrieve(request_id)
    assert response.status_code == 410
    operation = await server.service.store.log.get(request_id)
    assert operation is not None
    assert operation.result is None


async def test_two_saves_that_claim_one_sampler_do_not_wedge_the_log(server: TestServer) -> None:
    api = server.api
    session = await api.session()
    models = [await api.create_model(session, number) for number in range(2)]
    body = {"seq_id": 1, "sampling_session_seq_id": 0}
    promises = await asyncio.gather(
        *[api.ok("/save_weights_for_sampler", {"model_id": m, **body}) for m in models]
    )
    bodies = [(await api.retrieve(p["request_id"])).json() for p in promises]
    assert sorted("error" in b for b in bodies) == [False, True]
    for model in models:
        assert await api.loss(model, 2) > 0


async def test_models_that_nobody_uses_are_forgotten_and_found_again(server: TestServer) -> None:
    api = server.api
    model = await api.model()
    for request_id in await _steps(api, model, 1, 2):
        await api.result(request_id)
    before = await api.loss(model, 5)
    live = await server.service.models.get(model)
    assert live is not None
    live.wants_unload = True
    server.service.scheduler.wake_all()
    await server.until(lambda: live.is_idle)
    server.service.models.forget_idle(live.last_used_at + 1)
    assert len(server.service.models) == 0
    assert await api.loss(model, 6) == before


async def test_an_engine_that_cannot_start_is_said_to_be_the_trouble(
    start_server: StartServer,
) -> None:
    server = await start_server(broken="no such device", hold_seconds=0.1)
    response = await server.api.get("/get_server_capabilities")
    assert response.status_code == 503 and "no such device" in response.json()["detail"]
    ready = await server.api.http.get("/readyz", headers=server.api.headers)
    assert ready.status_code == 503 and "no such device" in ready.json()["detail"]
    ready = await server.api.http.get("/readyz")
    assert ready.json() == {"status": "not ready", "detail": "the engine is starting"}
    assert (await server.api.http.get("/healthz")).status_code == 200


async def test_the_state_of_a_model_long_forgotten_is_dropped_and_that_is_said(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = await start_server()
    model = await server.api.model()
    for request_id in await _steps(server.api, model, 1, 1):
        await server.api.result(request_id)
    await server.api.post(f"/sessions/{model.partition(':')[0]}/finish", {"reason": {}})
    await server.stop()
    server = await start_server(session_timeout_seconds=0.0, model_retention_seconds=0.0)
    await server.service.tidy_results()
    await server.service.tidy()
    assert list_folder(tmp_path / "data" / "weights") == []
    error, category = await server.api.failure(await server.api.send_pass(model, 3))
    assert "not used for very long" in error and category == "user"


def list_folder(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_trimmed_log_changes_nothing_but_what_may_come_again(
    start_server: StartServer,
) -> None:
    settings = {"snapshot_steps": 1, "log_keep_operations": 3, "retrieved_retention_seconds": 0.0}
    server = await start_server(**settings)
    expected = await _undisturbed(server.api, 8)
    model = await server.api.model()
    for number in range(8):
        for request_id in await _steps(server.api, model, 1 + 2 * number, 1):
            await server.api.result(request_id)
    await server.service.tidy()
    await server.service.tidy_results()
    record = await server.service.store.models.get(model)
    assert record is not None and record.trimmed_seq_id > 2
    repeated = {"model_id": model, "seq_id": 2, "adam_params": {}}
    response = await server.api.post("/optim_step", repeated)
    assert response.status_code == 400 and "long ago" in response.json()["detail"]
    await server.stop()
    server = await start_server(**settings)
    response = await server.api.post("/optim_step", repeated)
    assert response.status_code == 400, "after a restart as well"
    assert await server.api.loss(model, 17) == expected


async def test_a_start_reads_no_metadata(start_server: StartServer) -> None:
    """Twelve sessions may hold gigabytes of it."""
    server = await start_server()
    await server.api.session(user_metadata={"large": "x" * 1000})
    await server.stop()
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        await start_server()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
    assert statements
    assert [s for s in statements if s.startswith("SELECT") and "user_metadata" in s] == []
