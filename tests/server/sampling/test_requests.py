"""Sampling requests: each runs once, within a bound, until it is cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.in_process_server import MODEL
from tinsmith.server.tuning import Tuning
from tinsmith.types import SampleResponse
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer


async def _base_sampler(api: Api) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0}
    created = await api.ok("/create_sampling_session", {**body, "base_model": "tinsmith/fake"})
    return str(created["sampling_session_id"])


async def test_a_sample_sent_twice_runs_once(api: Api) -> None:
    sampler = await _base_sampler(api)
    body = api.sample_body(sampler, 2**60)
    first, second = await api.ok("/asample", body), await api.ok("/asample", body)
    assert first == second
    assert len(first["sample_sequence_ids"]) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"num_samples": 2},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 4]}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [7] * 20_000}]}},
        {"sampling_params": {"max_tokens": 4, "seed": 6, "stop": []}},
        {"prompt_logprobs": True},
    ],
)
async def test_a_number_used_again_for_another_sample_is_a_conflict(
    api: Api, other: dict[str, Any]
) -> None:
    sampler = await _base_sampler(api)
    first = await api.ok("/asample", api.sample_body(sampler, 1))
    await api.retrieve(first["request_id"])
    refused = await api.post("/asample", api.sample_body(sampler, 1, **other))
    assert refused.status_code == 400 and "number 1" in refused.json()["detail"]
    assert await api.ok("/asample", api.sample_body(sampler, 1)) == first
    assert (await api.post("/asample", api.sample_body(sampler, 2, **other))).status_code == 200


async def test_a_large_sample_sent_twice_at_once_runs_once(api: Api) -> None:
    sampler = await _base_sampler(api)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [7] * 20_000}]}
    body = api.sample_body(sampler, 1, prompt=prompt)
    first, second = await asyncio.gather(api.ok("/asample", body), api.ok("/asample", body))
    assert first == second


async def test_a_number_used_again_for_another_sampler_is_a_conflict(api: Api) -> None:
    """Whoever sampled from it would sample from other weights than it has asked for."""
    session = await api.session()
    model = await api.create_model(session)
    for seq_id, name in enumerate(("a", "b"), 1):
        save = {"model_id": model, "seq_id": seq_id, "path": name}
        await api.result((await api.ok("/save_weights_for_sampler", save))["request_id"])
    unnamed = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 7}
    await api.result((await api.ok("/save_weights_for_sampler", unnamed))["request_id"])
    of_model = {"model_path": f"tinker://{model}/sampler_weights/a"}
    wanted: list[tuple[int, dict[str, str]]] = [(0, of_model), (1, {"base_model": MODEL})]
    path = "/create_sampling_session"
    made = []
    for number, source in wanted:
        body = {"session_id": session, "sampling_session_seq_id": number, **source}
        made.append(await api.ok(path, body))
        assert await api.ok(path, body) == made[-1], "a true repeat"
    others: list[tuple[int, dict[str, str]]] = [
        (0, {"model_path": f"tinker://{model}/sampler_weights/b"}),
        (0, {"base_model": MODEL}),
        (1, of_model),
        (7, {"base_model": MODEL}),
    ]
    for number, source in others:
        body = {"session_id": session, "sampling_session_seq_id": number, **source}
        refused = await api.post(path, body)
        assert refused.status_code == 400
        assert "sampling_session_seq_id" in refused.json()["detail"]


async def test_samples_beyond_the_bound_are_told_to_wait(start_server: StartServer) -> None:
    """S57."""
    server = await start_server(max_queued_samples=4, fake_token_seconds=0.05)
    api = server.api
    sampler = await _base_sampler(api)
    for seq_id in range(2):
        await api.ok("/asample", api.sample_body(sampler, seq_id))
    full = await api.post("/asample", api.sample_body(sampler, 2))
    assert full.status_code == 429 and full.headers["retry-after-ms"] == "1000"
    await server.until(lambda: server.service.sampling.has_room("owner"))
    assert (await api.post("/asample", api.sample_body(sampler, 2))).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [7] * 400}]}},
        {
            "target_prompt_logprobs": {
                "data": [1] * 400,
                "dtype": "int64",
                "shape": [2, 200],
            }
        },
        {"sampling_params": {"max_tokens": 4, "stop": ["a" * 900, "b" * 900, "c" * 900]}},
    ],
    ids=["prompt", "targets", "stops"],
)
async def test_whatever_a_sample_brings_counts_while_it_is_under_way(
    start_server: StartServer, fields: dict[str, Any]
) -> None:
    server = await start_server(max_queued_sample_bytes=4000, fake_token_seconds=10.0)
    api = server.api
    sampler = await _base_sampler(api)
    promise = await api.ok("/asample", api.sample_body(sampler, 0, **fields))
    for path in ("/asample", "/sample_stream"):
        full = await api.post(path, api.sample_body(sampler, 1, **fields))
        assert full.status_code == 429, path
    cancelled = await api.post("/cancel_future", {"request_id": promise["request_id"]})
    assert cancelled.status_code == 204
    await server.until(lambda: not server.service.sampling.num_running)
    assert server.service.sampling.has_room("owner", 1, 4000), "all of it is given back"


async def test_an_answer_of_many_numbers_is_written_beside_the_loop(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(tuning=Tuning(many_cells=50))
    api, threads = server.api, list[bool]()
    encode = proto.encode_sample

    def noted(response: SampleResponse) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(response)

    monkeypatch.setattr(proto, "encode_sample", noted)
    sampler = await _base_sampler(api)
    for seq_id, count in enumerate((2, 20)):
        body = api.sample_body(sampler, seq_id, topk_sample_logprobs=count)
        promise = await api.ok("/asample", body)
        await api.retrieve(promise["request_id"])
    assert threads == [True, False]


async def test_cancelling_a_sample_frees_its_place(start_server: StartServer) -> None:
    """S43."""
    server = await start_server(fake_token_seconds=0.05)
    api = server.api
    sampler = await _base_sampler(api)
    long: dict[str, Any] = {"max_tokens": 4000, "stop": []}
    promise = await api.ok("/asample", api.sample_body(sampler, sampling_params=long))
    await server.until(lambda: server.engines[-1].running_samples == 1)
    body = {"request_id": promise["request_id"]}
    other = await server.other_user()
    assert (await other.post("/cancel_future", body)).status_code == 204
    assert server.service.sampling.num_running == 1, "only the owner may cancel"
    assert (await api.post("/cancel_future", body)).status_code == 204
    await server.until(lambda: not server.engines[-1].running_samples)
    error, category = await api.failure(promise["request_id"])
    assert "cancelled" in error and category == "user"


async def test_a_samplers_completions_come_with_one_question(api: Api) -> None:
    sampler = await _base_sampler(api)
    bodies = [api.sample_body(sampler, seq_id) for seq_id in range(3)]
    bodies[1]["sampling_params"] = {"max_tokens": 1, "temperature": -1.0}
    ids = [(await api.ok("/asample", body))["request_id"] for body in bodies]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    found: dict[str, str] = {}
    cursor = 0
    async with asyncio.timeout(30):
        while len(found) < 3:
            answer = await api.ok("/retrieve_futures", {"target": target, "prev_cursor": cursor})
            cursor = answer["cursor"]
            found |= {c["request_id"]: c["state"] for c in answer["completions"]}
    assert [found[i] for i in ids] == ["finished", "failed", "finished"]
    body = {"target": target, "prev_cursor": cursor, "timeout": 0.0}
    answer = await api.ok("/retrieve_futures", {**body, "retrieved_request_ids": ids})
    assert answer == {"completions": [], "cursor": cursor}
    assert (await api.retrieve(ids[0])).status_code == 410


async def test_a_sample_from_before_a_restart_is_gone_and_says_so(
    start_server: StartServer,
) -> None:
    server = await start_server()
    sampler = await _base_sampler(server.api)
    promise = await server.api.ok("/asample", server.api.sample_body(sampler))
    await server.stop()
    server = await start_server()
    assert (await server.api.retrieve(promise["request_id"])).status_code == 410
    assert len((await server.api.sample(sampler, 1)).sequences[0].tokens) == 4


async def test_clients_of_a_sampler_get_different_numbers(api: Api) -> None:
    sampler = await _base_sampler(api)
    body = {"sampling_session_id": sampler}
    answers = [await api.ok("/join_sampling_session", body) for _ in range(3)]
    assert [a["client_counter"] for a in answers] == [1, 2, 3]


async def test_stability_info_is_refused_by_name(api: Api) -> None:
    sampler = await _base_sampler(api)
    response = await api.post("/asample", api.sample_body(sampler, record_stability_info=True))
    assert response.status_code == 400 and "record_stability_info" in response.json()["detail"]
