"""Sampling requests and the ways in which results are fetched."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tinsmith.server.futures import Outcome, Promises
from tinsmith.types import ForwardBackwardOutput, TensorData
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.server.conftest import Api, StartServer, TestServer

JSON = {"accept": "application/json"}


async def _base_sampler(api: Api) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0}
    created = await api.ok("/create_sampling_session", {**body, "base_model": "tinsmith/fake"})
    return str(created["sampling_session_id"])


async def test_a_promise_wakes_everybody_who_waits_and_resolves_once() -> None:
    """S41."""
    promises = Promises(max_bytes=100)
    promise = promises.open("r", "o")
    waiting = [asyncio.create_task(promises.wait(promise, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    promises.resolve("r", Outcome(body=b"first"), 1.0)
    promises.resolve("r", Outcome(body=b"second"), 2.0)
    outcomes = await asyncio.gather(*waiting)
    assert [o.body for o in outcomes if o] == [b"first"] * 3


async def test_results_beyond_the_bytes_are_let_go_fetched_ones_first() -> None:
    promises = Promises(max_bytes=100)
    for number in range(3):
        promises.open(str(number), "o")
    for number in range(2):
        promises.resolve(str(number), Outcome(body=b"x" * 45), float(number))
    fetched = promises.get("1")
    assert fetched is not None
    promises.mark_retrieved(fetched, 5.0)
    promises.resolve("2", Outcome(body=b"x" * 45), 2.0)
    assert promises.get("1") is None
    assert promises.get("0") is not None and promises.nbytes == 90


async def test_thousands_of_open_questions_are_cheap() -> None:
    promises = Promises(max_bytes=1000)
    all_promises = [promises.open(str(n), "o") for n in range(5000)]
    waiting = [asyncio.create_task(promises.wait(p, 30)) for p in all_promises]
    await asyncio.sleep(0)
    started = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - started < 0.1, "waiting must not burn CPU"
    promises.close()
    assert await asyncio.gather(*waiting) == [None] * 5000


async def test_a_question_is_held_until_the_answer_is_there(start_server: StartServer) -> None:
    server = await start_server(fake_pass_seconds=0.3, hold_seconds=10)
    model = await server.api.model()
    request_id = await server.api.send_pass(model, 1)
    started = time.monotonic()
    response = await server.api.post("/retrieve_future", {"request_id": request_id})
    assert response.status_code == 200 and time.monotonic() - started < 2


async def test_not_yet_is_a_408_that_says_how_the_queue_stands(start_server: StartServer) -> None:
    """S71."""
    server = await start_server(hold_seconds=0.05)
    model = await server.api.model()
    request_id = await server.api.send_pass(model, 2)
    response = await server.api.post("/retrieve_future", {"request_id": request_id})
    assert response.status_code == 408
    body = response.json()
    assert (body["type"], body["queue_state"]) == ("try_again", "active")


async def test_a_large_result_is_announced_to_those_who_ask_for_that(
    start_server: StartServer,
) -> None:
    server = await start_server(metadata_only_bytes=10)
    api = server.api
    request_id = await api.send_pass(await api.model(), 1)
    full = await api.retrieve(request_id)
    announced = (await api.retrieve(request_id, allow_metadata_only=True)).json()
    assert announced["status"] == "complete_metadata"
    assert announced["response_payload_size"] == len(full.content)


async def test_old_clients_read_passes_and_samples_as_json(api: Api) -> None:
    model = await api.model()
    request_id = await api.send_pass(model, 1)
    output = (await api.retrieve(request_id, headers=JSON)).json()
    decoded = proto.decode_output((await api.retrieve(request_id)).content)
    assert output["metrics"] == decoded.metrics
    assert output["loss_fn_outputs"][0]["logprobs"]["dtype"] == "float32"
    sampler = await _base_sampler(api)
    promise = await api.ok("/asample", api.sample_body(sampler, prompt_logprobs=True))
    sampled = (await api.retrieve(promise["request_id"], headers=JSON)).json()
    assert len(sampled["sequences"][0]["tokens"]) == 4
    assert sampled["sequences"][0]["stop_reason"] == "length"
    assert sampled["prompt_logprobs"][0] is None


async def test_old_clients_send_passes_as_json_and_forward_by_its_own_path(api: Api) -> None:
    model = await api.model()
    inputs = {
        "data": [
            {
                "model_input": {"chunks": [{"tokens": [1, 2]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
                    "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
                },
            }
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": None,
    }
    body = {"forward_input": inputs, "model_id": model, "seq_id": 1}
    before = await api.output((await api.ok("/forward", body))["request_id"])
    body = {"forward_backward_input": inputs, "model_id": model, "seq_id": 2}
    passed = await api.output((await api.ok("/forward_backward", body))["request_id"])
    assert passed.metrics == before.metrics
    await api.result(await api.send_step(model, 3))
    body = {"forward_input": inputs, "model_id": model, "seq_id": 4}
    after = await api.output((await api.ok("/forward", body))["request_id"])
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]


async def test_a_sample_sent_twice_runs_once(api: Api) -> None:
    sampler = await _base_sampler(api)
    body = api.sample_body(sampler, 2**60)
    first, second = await api.ok("/asample", body), await api.ok("/asample", body)
    assert first == second
    assert len(first["sample_sequence_ids"]) == 1


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


async def test_cancelling_a_sample_frees_its_place(start_server: StartServer) -> None:
    """S43."""
    server = await start_server(fake_token_seconds=0.05)
    api = server.api
    sampler = await _base_sampler(api)
    long: dict[str, Any] = {"max_tokens": 4000, "stop": []}
    promise = await api.ok("/asample", api.sample_body(sampler, sampling_params=long))
    await asyncio.sleep(0.1)
    assert (await server.engines[-1].health()).running_samples == 1
    body = {"request_id": promise["request_id"]}
    other = await server.other_user()
    assert (await other.post("/cancel_future", body)).status_code == 204
    assert server.service.sampling.num_running == 1, "only the owner may cancel"
    assert (await api.post("/cancel_future", body)).status_code == 204
    await server.until(lambda: not server.engines[-1]._jobs)
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
    async with asyncio.timeout(5):
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


async def test_unknown_requests_are_404(api: Api) -> None:
    assert (await api.retrieve("nothing")).status_code == 404


async def test_clients_of_a_sampler_get_different_numbers(api: Api) -> None:
    sampler = await _base_sampler(api)
    body = {"sampling_session_id": sampler}
    answers = [await api.ok("/join_sampling_session", body) for _ in range(3)]
    assert [a["client_counter"] for a in answers] == [1, 2, 3]


async def test_stability_info_is_refused_by_name(api: Api) -> None:
    sampler = await _base_sampler(api)
    response = await api.post("/asample", api.sample_body(sampler, record_stability_info=True))
    assert response.status_code == 400 and "record_stability_info" in response.json()["detail"]


async def test_telemetry_is_always_accepted(api: Api) -> None:
    for body in (b"not json", b'{"events": [], "platform": "x"}'):
        assert await api.ok("/telemetry", body) == {"status": "accepted"}


async def test_a_custom_loss_is_uploaded_once_and_kept(start_server: StartServer) -> None:
    server = await start_server(custom_loss_server_side=True)
    api = server.api
    session = await api.session()
    upload = {
        "session_id": session,
        "custom_loss_seq_id": 0,
        "name": "n",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": [{"op": "output", "name": "o", "target": "output"}]},
    }
    promises = [await api.ok("/create_custom_loss", upload) for _ in range(2)]
    assert promises[0] == promises[1]
    result = await api.result(promises[0]["request_id"])
    assert result["loss_id"] == f"{session}:loss:0"
    assert await server.service.store.losses.get(result["loss_id"]) is not None


async def test_a_client_that_reads_json_gets_the_numbers_of_a_pass_that_diverged(
    server: TestServer,
) -> None:
    """The pass was executed: its result is due, whatever the numbers are."""
    record = await server.service.store.models.get(await server.api.model())
    assert record is not None
    scores = TensorData.dense(np.array([-np.inf, np.nan, -1], np.float32), [3])
    output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": scores}], {"loss:sum": np.inf})
    server.service.promises.open("diverged", record.owner)
    outcome = Outcome(result_type="output", body=proto.encode_output(output))
    server.service.promises.resolve("diverged", outcome, time.time())
    response = await server.api.retrieve("diverged", headers=JSON)
    assert response.status_code == 200, response.text
    read = response.json()
    assert read["loss_fn_outputs"][0]["logprobs"]["data"] == ["-Infinity", "NaN", -1.0]
    assert read["metrics"] == {"loss:sum": "Infinity"}
