"""The ways in which results are fetched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.server.futures import Outcome
from tinsmith.types import ForwardBackwardOutput, TensorData
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


JSON = {"accept": "application/json"}


async def _base_sampler(api: Api) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0}
    created = await api.ok("/create_sampling_session", {**body, "base_model": "tinsmith/fake"})
    return str(created["sampling_session_id"])


async def test_a_question_is_held_until_the_answer_is_there(start_server: StartServer) -> None:
    server = await start_server(fake_pass_seconds=0.3, hold_seconds=60)
    model = await server.api.model()
    request_id = await server.api.send_pass(model, 1)
    started = time.monotonic()
    response = await server.api.post("/retrieve_future", {"request_id": request_id})
    assert response.status_code == 200 and time.monotonic() - started < 30


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


async def test_what_a_client_accepts_is_read_without_regard_to_case(api: Api) -> None:
    request_id = await api.send_pass(await api.model(), 1)
    accept = {"accept": "Application/JSON, Application/X-Protobuf"}
    response = await api.retrieve(request_id, headers=accept)
    assert response.headers["content-type"] == "application/x-protobuf"


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


async def test_unknown_requests_are_404(api: Api) -> None:
    assert (await api.retrieve("nothing")).status_code == 404


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
