"""The JSON codec: what is written, what is left out, and numbers and dates kept exactly."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import orjson
import pytest
import tinker.types as official

from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types.model import Request, Response
from tinsmith.wire import json

# --- None -------------------------------------------------------------------------------------


def test_the_encoder_itself_keeps_none():
    """S21: plain data is written as it is."""
    assert json.encode({"a": None, "b": [None]}) == b'{"a":null,"b":[null]}'


def test_a_message_drops_none_when_it_is_sent_and_keeps_it_when_it_is_dumped():
    """S21"""
    request = ours.SaveWeightsRequest(model_id="m")
    assert orjson.loads(json.encode(request)) == {
        "model_id": "m",
        "overwrite": False,
        "type": "save_weights",
    }
    assert request.model_dump()["path"] is None
    assert orjson.loads(request.model_dump_json())["path"] is None
    assert "path" not in request.model_dump(exclude_none=True)


def test_none_inside_free_form_content_is_the_users_own():
    """S21: as the official package does."""
    content = {"a": None, "b": [None, {"c": None}]}
    request = ours.CreateSessionRequest(tags=[], user_metadata=content, sdk_version="1")
    assert orjson.loads(json.encode(request))["user_metadata"] == content
    assert json.decode(ours.CreateSessionRequest, json.encode(request)) == request


def test_removing_a_ttl_sends_an_explicit_null():
    """S21, S23"""
    assert json.encode(ours.SetCheckpointTtlRequest(ttl_seconds=None)) == b'{"ttl_seconds":null}'
    assert json.encode(ours.SetCheckpointTtlRequest(ttl_seconds=7200)) == b'{"ttl_seconds":7200}'
    assert json.decode(ours.SetCheckpointTtlRequest, b'{"ttl_seconds":null}').ttl_seconds is None


def test_finishing_without_a_detail_sends_an_explicit_null():
    """S21, S23"""
    request = ours.FinishSessionRequest(reason={"type": "success"})
    assert json.encode(request) == b'{"reason":{"type":"success"},"detail":null}'
    assert json.decode(ours.FinishSessionRequest, json.encode(request)) == request


def test_a_message_can_declare_which_field_null_clears():
    """S21, S23: the decision is the message's, field by field."""

    class Rename(Request):
        __explicit_null__ = frozenset({"title"})

        title: str | None = None
        note: str | None = None

    assert json.encode(Rename()) == b'{"title":null}'


def test_null_reads_as_absent_where_there_is_a_default():
    """S21: old clients send null for what their caller left out."""
    body = b'{"model_id":"m","overwrite":null,"type":null,"seq_id":null}'
    assert json.decode(ours.SaveWeightsRequest, body) == ours.SaveWeightsRequest(model_id="m")
    with pytest.raises(ValidationError, match="model_id"):
        json.decode(ours.SaveWeightsRequest, b'{"model_id":null}')


# --- Only the schema's fields -----------------------------------------------------------------


def test_internal_state_never_reaches_the_body():
    """S24: properties, caches and numpy arrays stay inside."""
    prompt = ours.ModelInput.from_ints([1, 2])
    assert prompt.length == 2 and prompt.nbytes == 8
    image = ours.ImageChunk(data=b"x", format="png", expected_tokens=3)
    tensor = ours.TensorData([1], "int64", [1])
    request = ours.SampleRequest(
        prompt=prompt.append(image),
        sampling_params=ours.SamplingParams(max_tokens=1),
        target_prompt_logprobs=tensor,
    )
    body = orjson.loads(json.encode(request))
    assert body.keys() <= official.SampleRequest.model_fields.keys()
    assert body["prompt"] == {
        "chunks": [
            {"tokens": [1, 2], "type": "encoded_text"},
            {"data": "eA==", "format": "png", "expected_tokens": 3, "type": "image"},
        ]
    }
    assert body["target_prompt_logprobs"] == {"data": [1], "dtype": "int64", "shape": [1]}


def test_extra_fields_of_a_response_are_not_sent_on():
    """S24, S9"""

    class Answer(Response):
        value: int

    answer = json.decode(Answer, b'{"value":1,"secret":2}')
    assert json.encode(answer) == b'{"value":1}'


def test_open_families_keep_their_own_fields():
    config = {"type": "muon", "momentum": 0.95, "nested": {"a": [1]}}
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "optimizer_config": config}
    request = json.decode(ours.CreateModelRequest, orjson.dumps(body))
    assert request.optimizer_config.momentum == 0.95
    assert orjson.loads(json.encode(request))["optimizer_config"] == config


# --- Exact numbers and dates ------------------------------------------------------------------


@pytest.mark.parametrize("seq_id", [2**53 + 1, 10**18 + 7, 2**63 - 1])
def test_sequence_ids_beyond_2_to_the_53_are_exact(seq_id):
    request = ours.SampleRequest(
        prompt=ours.ModelInput.empty(), sampling_params=ours.SamplingParams(), seq_id=seq_id
    )
    body = json.encode(request)
    assert b'"seq_id":%d' % seq_id in body
    assert json.decode(ours.SampleRequest, body).seq_id == seq_id
    assert official.SampleRequest.model_validate_json(body).seq_id == seq_id


@pytest.mark.parametrize("value", [0.1, 1e-12, 5e-324, 1.7976931348623157e308, -0.0, 1 / 3])
def test_floats_round_trip_exactly(value):
    params = ours.AdamParams(learning_rate=value)
    assert json.decode(ours.AdamParams, json.encode(params)).learning_rate == value


MOMENTS = {
    "2026-11-15T10:00:00Z": datetime(2026, 11, 15, 10, tzinfo=UTC),
    "2026-11-15T10:00:00.250000Z": datetime(2026, 11, 15, 10, 0, 0, 250_000, tzinfo=UTC),
    "2026-11-15T10:00:00+05:30": datetime(
        2026, 11, 15, 10, tzinfo=timezone(timedelta(hours=5, minutes=30))
    ),
    "2026-11-15T10:00:00": datetime(2026, 11, 15, 10),
}


@pytest.mark.parametrize("text", MOMENTS)
def test_moments_are_written_with_z_and_read_back(text):
    answer = ours.CheckpointArchiveUrlResponse(url="u", expires=MOMENTS[text])
    assert json.encode(answer) == b'{"url":"u","expires":"%s"}' % text.encode()
    assert json.decode(ours.CheckpointArchiveUrlResponse, json.encode(answer)) == answer
    theirs = official.ExternalWeightsUrlsResponse(urls={}, expires=MOMENTS[text])
    assert orjson.loads(theirs.model_dump_json())["expires"] == text


@pytest.mark.parametrize(
    "text", ["2026-11-15T10:00:00Z", "2026-11-15 10:00:00+00:00", "2026-11-15T10:00:00.123456789Z"]
)
def test_the_forms_of_a_moment_that_services_write_are_read(text):
    body = orjson.dumps({"url": "u", "expires": text})
    moment = json.decode(ours.CheckpointArchiveUrlResponse, body).expires
    theirs = official.ExternalWeightsUrlsResponse.model_validate({"urls": {}, "expires": text})
    assert moment == theirs.expires


# --- Numbers JSON cannot carry ----------------------------------------------------------------

INFINITE: dict[str, tuple[Any, str]] = {
    "a field": (ours.AdamParams(learning_rate=float("inf")), "learning_rate"),
    "a field of a field": (
        ours.OptimStepRequest(optim_params=ours.AdamParams(eps=float("nan")), model_id="m"),
        r"optim_params\.eps",
    ),
    "free-form content": (
        ours.CreateSessionRequest(
            tags=[], user_metadata={"a": [1.0, float("-inf")]}, sdk_version="1"
        ),
        r"user_metadata\['a'\]\[1\]",
    ),
    "a tensor": (
        ours.SampleRequest(
            prompt=ours.ModelInput.empty(),
            sampling_params=ours.SamplingParams(),
            target_prompt_logprobs=ours.TensorData.from_numpy(np.array([0, np.nan])),
        ),
        r"target_prompt_logprobs\.data\[1\]",
    ),
}


@pytest.mark.parametrize("name", INFINITE)
def test_a_number_json_cannot_carry_is_refused_with_its_place(name):
    message, place = INFINITE[name]
    with pytest.raises(ValidationError, match=place + ".*cannot be sent as JSON"):
        json.encode(message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["learning_rate", "beta1", "grad_clip_norm"])
def test_dimuon_takes_finite_numbers_only(field, value):
    fields = {"learning_rate": 0.1, field: value}
    with pytest.raises(ValidationError, match=f"{field}.*finite|{field}.*least"):
        ours.DimuonParams(**fields)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"learning_rate": -0.1}, "learning_rate.*at least 0"),
        ({"learning_rate": 0.1, "beta1": 1.0}, "beta1.*less than 1"),
        ({"learning_rate": 0.1, "beta1": -0.1}, "beta1.*at least 0"),
        ({}, "learning_rate"),
    ],
)
def test_bounds_are_named(fields, place):
    with pytest.raises(ValidationError, match=place):
        ours.DimuonParams(**fields)


# --- The optimizer's two names ----------------------------------------------------------------


def test_adam_numbers_and_other_families_go_under_different_names():
    adam = ours.OptimStepRequest(optim_params=ours.AdamParams(), model_id="m", seq_id=2)
    assert orjson.loads(json.encode(adam)) == {
        "model_id": "m",
        "seq_id": 2,
        "type": "optim_step",
        "adam_params": {
            "learning_rate": 0.0001,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "grad_clip_norm": 0.0,
        },
    }
    other = ours.OptimStepRequest(optim_params=ours.DimuonParams(learning_rate=1), model_id="m")
    assert "optimizer_params" in orjson.loads(json.encode(other))
    for request in (adam, other):
        assert json.decode(ours.OptimStepRequest, json.encode(request)) == request
    both = {"model_id": "m", "adam_params": {}, "optimizer_params": {"type": "dimuon"}}
    with pytest.raises(ValidationError, match="optimizer_params"):
        json.decode(ours.OptimStepRequest, orjson.dumps(both))
