"""Every release's requests mean the same to us, and every release can read our results.

The bodies in `recorded/` were written by the releases themselves (see `record_dialects.py`, which
also checked that each release reads our results); all ask for the same things.
"""

from __future__ import annotations

import base64
import json as plain_json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tinker.types as official
from tinker.proto.response_conv import deserialize_proto_response

from tests.support.encoded_results import encode_result
from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types import TensorData
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import dialects, zstd

RECORDED = {
    path.stem: plain_json.loads(path.read_text())["bodies"]
    for path in Path(__file__).with_name("recorded").glob("*.json")
}
NEWEST = "0.36.0"
KINDS: dict[str, Any] = {
    "create_session": ours.CreateSessionRequest,
    "session_heartbeat": ours.SessionHeartbeatRequest,
    "create_model": ours.CreateModelRequest,
    "get_info": ours.GetInfoRequest,
    "unload_model": ours.UnloadModelRequest,
    "optim_step": ours.OptimStepRequest,
    "save_weights": ours.SaveWeightsRequest,
    "load_weights": ours.LoadWeightsRequest,
    "save_weights_for_sampler": ours.SaveWeightsForSamplerRequest,
    "create_sampling_session": ours.CreateSamplingSessionRequest,
    "asample": ours.SampleRequest,
    "retrieve_future": ours.FutureRetrieveRequest,
    "telemetry": ours.TelemetrySendRequest,
}


def decoded(recording: dict[str, Any]) -> Any:
    """A recorded body as the server would read it."""
    is_json = recording["type"] == JSON
    body = recording["body"]
    body = orjson.dumps(body) if is_json else base64.b64decode(body)
    endpoint = recording["endpoint"]
    if endpoint in KINDS:
        return dialects.decode(KINDS[endpoint], body)
    # Since 0.25.0 both kinds of pass go to one endpoint, and the body tells them apart.
    forward_only = endpoint == "forward" and is_json
    return dialects.decode_pass(body, recording["type"], forward_only=forward_only)


MEANT = {recording["endpoint"]: decoded(recording) for recording in RECORDED[NEWEST]}
RECORDINGS = [
    pytest.param(recording, id=f"{version} {recording['endpoint']} {recording['type'][12:]}")
    for version, recordings in sorted(RECORDED.items())
    for recording in recordings
]


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_request_of_any_release_means_what_the_newest_one_means(recording):
    message = decoded(recording)
    assert message == MEANT[recording["endpoint"]]
    assert type(message) is type(MEANT[recording["endpoint"]])


def test_the_recordings_cover_every_generation():
    """The releases around each change of the drift table."""
    assert {
        "0.3.0",  # no `optimizer`, no `weight_decay`, images with height and width
        "0.7.0",
        "0.16.1",  # the last to send only what was set, without tags
        "0.18.2",
        "0.24.1",  # the last to send passes as JSON
        "0.25.0",  # the first to send them as protobuf only
        "0.26.2",
        "0.30.4",
        "0.35.0",
        NEWEST,
    } == RECORDED.keys()
    for recordings in RECORDED.values():
        assert {r["endpoint"] for r in recordings} == KINDS.keys() | {"forward", "forward_backward"}


def test_what_the_requests_mean():
    """Spot checks, so that a shared mistake does not pass for agreement."""
    sample = MEANT["asample"]
    assert sample.seq_id == 7_000_000_000_000_000_001
    assert [chunk.type for chunk in sample.prompt.chunks] == [
        "encoded_text",
        "image",
        "image_asset_pointer",
    ]
    assert sample.prompt.length == 3 + 7 + 7
    assert sample.sampling_params == ours.SamplingParams(max_tokens=5, stop=[])
    assert MEANT["optim_step"].optim_params == ours.AdamParams(learning_rate=3e-4)
    assert MEANT["create_model"].lora_config == ours.LoraConfig(rank=16, train_mlp=False)
    assert MEANT["load_weights"].optimizer is True
    inputs = MEANT["forward_backward"].forward_backward_input
    assert (inputs.loss_fn, inputs.loss_fn_config) == ("ppo", {"clip_low_threshold": 0.75})
    assert inputs.data[0].loss_fn_inputs["weights"].data == [0.0, 0.5, 1.0]
    assert isinstance(MEANT["forward"], ours.ForwardRequest)
    assert MEANT["forward"].forward_input.loss_fn_config is None


def test_a_compressed_pass_is_the_same_pass():
    [recording] = [r for r in RECORDED[NEWEST] if r["endpoint"] == "forward_backward"]
    frame = zstd.compress(base64.b64decode(recording["body"]))
    body = zstd.decompress(frame, max_bytes=1 << 20)
    assert dialects.decode_pass(body, PROTOBUF) == MEANT["forward_backward"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_a_content_type_may_carry_parameters_and_any_case(content_type):
    body = orjson.dumps(RECORDED["0.24.1"][-2]["body"])
    if RECORDED["0.24.1"][-2]["type"] != JSON:
        body = orjson.dumps(RECORDED["0.18.2"][-1]["body"])
    assert dialects.decode_pass(body, content_type, forward_only=True) == MEANT["forward"]


def test_explicit_nulls_read_as_absent():
    body = orjson.dumps({"model_id": "m", "path": None, "overwrite": None, "ttl_seconds": None})
    assert dialects.decode(ours.SaveWeightsRequest, body) == ours.SaveWeightsRequest(model_id="m")
    body = orjson.dumps({"model_id": "m", "path": "p", "optimizer": None})
    assert dialects.decode(ours.LoadWeightsRequest, body).optimizer is True


def test_a_field_nobody_ever_sent_is_still_refused():
    """S7"""
    with pytest.raises(ValidationError, match="optimiser"):
        dialects.decode(ours.LoadWeightsRequest, b'{"model_id":"m","path":"p","optimiser":true}')
    with pytest.raises(ValidationError, match="lossfn"):
        dialects.decode_pass(b'{"model_id":"m","lossfn":1}', "application/json")


# --- Results ----------------------------------------------------------------------------------

OUTPUT = ours.ForwardBackwardOutput(
    "ArrayRecord",
    [{"logprobs": TensorData([-0.5, -1.5], "float32", [2])}],
    {"loss:sum": 2.0},
)
SAMPLE = ours.SampleResponse(
    sequences=[
        ours.SampledSequence(
            "length", "r:0", np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
        ),
        ours.SampledSequence("stop", "r:1", np.array([], np.int32)),
    ],
    prompt_logprobs_np=np.array([np.nan, -0.5], np.float32),
    topk_prompt_logprobs_np=ours.TopkLogprobs.from_lists([None, [(3, -0.5), (4, -1.0)]]),
)
# What the generations send in `Accept` for these two results.
ACCEPTS_JSON = ["application/json", "*/*", ""]
ACCEPTS_PROTO = [
    "application/x-protobuf",
    "application/x-protobuf, application/json",
    "Application/X-Protobuf",
]


@pytest.mark.parametrize("accept", ACCEPTS_JSON)
def test_outputs_as_json_have_exactly_the_fields_of_the_old_form(accept):
    """protocol.md 13.4"""
    kind, body = encode_result(OUTPUT, accept)
    assert kind == "application/json"
    assert orjson.loads(body) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": [-0.5, -1.5], "dtype": "float32", "shape": [2]}}],
        "metrics": {"loss:sum": 2.0},
    }


@pytest.mark.parametrize("accept", ACCEPTS_JSON)
def test_samples_as_json_have_exactly_the_fields_of_the_old_form(accept):
    """protocol.md 13.5; NaN becomes null, which JSON can carry. S6"""
    kind, body = encode_result(SAMPLE, accept)
    assert kind == "application/json"
    assert orjson.loads(body) == {
        "sequences": [
            {"stop_reason": "length", "tokens": [5, 6], "logprobs": [-1.0, -2.0]},
            {"stop_reason": "stop", "tokens": [], "logprobs": None},
        ],
        "prompt_logprobs": [None, -0.5],
        "topk_prompt_logprobs": [None, [[3, -0.5], [4, -1.0]]],
        "type": "sample",
    }


@pytest.mark.parametrize("accept", ACCEPTS_PROTO)
def test_clients_that_accept_protobuf_get_it(accept):
    kind, body = encode_result(OUTPUT, accept)
    assert kind == "application/x-protobuf"
    output = deserialize_proto_response(body, official.ForwardBackwardOutput)
    assert output.loss_fn_outputs[0]["logprobs"].data == [-0.5, -1.5]
    kind, body = encode_result(SAMPLE, accept)
    assert kind == "application/x-protobuf"
    sample = deserialize_proto_response(body, official.SampleResponse)
    assert [s.tokens for s in sample.sequences] == [[5, 6], []]
    assert sample.prompt_logprobs == [None, -0.5]


@pytest.mark.parametrize("accept", ACCEPTS_JSON + ACCEPTS_PROTO)
def test_other_results_are_json_whatever_is_accepted(accept):
    """Failures and try-again answers to a client that asked for protobuf must be JSON."""
    for result in (
        ours.RequestFailedResponse(error="no", category="user"),
        ours.TryAgainResponse(request_id="r", queue_state="active"),
        ours.MetadataOnlyResponse(response_payload_size=5),
        ours.CreateModelResponse(model_id="m"),
    ):
        kind, body = encode_result(result, accept)
        assert kind == "application/json"
        assert orjson.loads(body) == result.to_wire()
