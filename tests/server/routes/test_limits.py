"""What one key may have: requests, sessions, models, bytes on disk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tinsmith.types import Datum, ModelInput

if TYPE_CHECKING:
    from tests.support.in_process_server import StartServer, TestServer


async def test_limits_per_key_are_kept(start_server: StartServer) -> None:
    server = await start_server(key_max_models=1, key_max_queued_bytes=400, key_max_stored_bytes=1)
    api = server.api
    session = await api.session()
    model = await api.create_model(session)
    body = {"session_id": session, "model_seq_id": 1, "base_model": "tinsmith/fake"}
    second = await api.post("/create_model", {**body, "lora_config": {"rank": 4}})
    assert second.status_code == 403 and "at most 1" in second.json()["detail"]
    third = await api.send_pass(model, 3)  # waits for 1 and 2
    responses = [await api.post_pass(model, n, _probe()) for n in (4, 5)]
    assert [r.status_code for r in responses] == [200, 429]
    assert responses[1].headers["retry-after-ms"] == "1000"
    for seq_id in (1, 2):
        await server.service.recorder.refuse("owner", model, seq_id, "not needed")
    for request_id in (third, responses[0].json()["request_id"]):
        await api.result(request_id)  # what has run no longer waits
    await api.result(await api.send_step(model, 5))
    full = await api.ok("/save_weights", {"model_id": model, "seq_id": 6, "path": "first"})
    error, category = await api.failure(full["request_id"])
    assert category == "user" and "at most 1 may" in error


async def test_unnamed_samplers_count_in_the_quota(start_server: StartServer) -> None:
    server = await start_server()
    size = await _size_of_a_sampler(server)
    await server.stop()
    server = await start_server(key_max_stored_bytes=2 * size)
    api = server.api
    model = await api.model()
    sampler = {"model_id": model, "sampling_session_seq_id": 1}
    first = await api.ok("/save_weights_for_sampler", {**sampler, "seq_id": 1})
    await api.result(first["request_id"])
    full = await api.post(
        "/save_weights_for_sampler", {**sampler, "seq_id": 2, "sampling_session_seq_id": 2}
    )
    detail = full.json()["detail"]
    assert full.status_code == 403 and str(2 * size) in detail, "the first one was there before"


async def test_the_quota_is_checked_again_when_a_save_runs(start_server: StartServer) -> None:
    """All of them are sent before the first has run."""
    server = await start_server()
    size = await _size_of_a_sampler(server)
    await server.stop()
    server = await start_server(key_max_stored_bytes=3 * size + size // 2, fake_pass_seconds=0.2)
    api = server.api
    model = await api.model()
    await api.send_pass(model, 1)
    ids = []
    for seq_id in range(2, 6):
        body = {"model_id": model, "seq_id": seq_id, "path": f"n{seq_id}"}
        ids.append((await api.ok("/save_weights_for_sampler", body))["request_id"])
    for request_id in ids[:2]:
        await api.result(request_id)
    for request_id in ids[2:]:
        error, category = await api.failure(request_id)
        assert category == "user" and str(3 * size + size // 2) in error
    folder = server.service.config.data_dir / "weights"
    assert len([*folder.iterdir()]) == 3, "nothing is left of those that were refused"
    copied = await api.post(
        "/copy_weights", {"source_path": f"tinker://{model}/sampler_weights/n2"}
    )
    assert copied.status_code == 403, "nor may a copy go beyond"


async def test_saves_at_once_do_not_pass_the_quota_together(start_server: StartServer) -> None:
    """Of four models, each save finds room for one when it begins."""
    server = await start_server()
    size = await _size_of_a_sampler(server)
    await server.stop()
    server = await start_server(key_max_stored_bytes=2 * size + size // 2)
    api, store = server.api, server.service.store
    models = [await api.model() for _ in range(4)]
    plain, asked = store.weights.check_quota, 0
    all_asked = asyncio.Event()

    async def check_together(owner: str, num_bytes: int = 1) -> None:
        nonlocal asked
        await plain(owner, num_bytes)
        if num_bytes > 1:
            asked += 1
            if asked == len(models):
                all_asked.set()
            await all_asked.wait()

    store.weights.check_quota = check_together  # type: ignore[method-assign]  # slow disks
    bodies = [{"model_id": model, "seq_id": 1, "path": "n"} for model in models]
    ids = [(await api.ok("/save_weights_for_sampler", body))["request_id"] for body in bodies]
    answers = [(await api.retrieve(request_id)).json() for request_id in ids]
    refused = [answer for answer in answers if "error" in answer]
    assert len(refused) == 3
    assert all(r["category"] == "user" and "delete checkpoints" in r["error"] for r in refused)
    folder = server.service.config.data_dir / "weights"
    assert len([*folder.iterdir()]) == 2, "nothing is left of those that were refused"


async def _size_of_a_sampler(server: TestServer) -> int:
    """The bytes of one unnamed sampler, which is there from then on."""
    model = await server.api.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    made = await server.api.ok("/save_weights_for_sampler", body)
    await server.api.result(made["request_id"])
    rows = await server.service.store.weights.room()
    return sum(num_bytes for _, owner, _, num_bytes in rows if owner == "owner")


def _probe() -> list[Datum]:
    tensors = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    return [Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs=tensors)]
