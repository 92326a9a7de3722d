"""One suite for both codecs: what is encoded comes back equal.

JSON is the form that releases before 0.25.0 send and read, protobuf the one since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.encoded_results import encode_result
from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ImageChunk,
    ModelInput,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import dialects, json, proto
from tinsmith.wire.limits import Limits

Pass = ForwardBackwardRequest | ForwardRequest


@dataclass(frozen=True)
class Protobuf:
    content_type: str = PROTOBUF

    def encode_pass(self, request: Pass) -> bytes:
        return proto.encode_pass(request)

    def decode_output(self, body: bytes) -> ForwardBackwardOutput:
        return proto.decode_output(body)

    def decode_sample(self, body: bytes) -> SampleResponse:
        return proto.decode_sample(body)


@dataclass(frozen=True)
class Json:
    content_type: str = JSON

    def encode_pass(self, request: Pass) -> bytes:
        body = {name: value for name, value in vars(request).items() if value is not None}
        name = next(iter(body))
        return json.encode({**body, name: body[name].to_wire()})

    def decode_output(self, body: bytes) -> ForwardBackwardOutput:
        return ForwardBackwardOutput.model_validate(json.parse(body))

    def decode_sample(self, body: bytes) -> SampleResponse:
        return SampleResponse.model_validate(json.parse(body))


@pytest.fixture(params=[Json(), Protobuf()], ids=["json", "protobuf"])
def codec(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- Passes -----------------------------------------------------------------------------------

TOKENS = np.arange(5, dtype=np.int32)
SPARSE = TensorData([7, 8], "int64", [3, 4], [0, 1, 1, 2], [2, 0])
TENSORS: dict[str, TensorData] = {
    "a vector of integers": TensorData([1, -2, 2**62], "int64", [3]),
    "a vector of floats": TensorData([0.1, -1e-30, 3e38], "float32", [3]),
    "a matrix": TensorData.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "a matrix that is not contiguous": TensorData.from_numpy(np.arange(6).reshape(2, 3).T),
    "an empty vector": TensorData([], "float32", [0]),
    "a matrix without rows": TensorData([], "int64", [0, 4]),
    "a sparse matrix": SPARSE,
    "a sparse matrix without cells": TensorData([], "float32", [2, 2], [0, 0, 0], []),
    "sparse floats": TensorData([0.5], "float32", [1, 9], [0, 1], [8]),
}
PROMPTS: dict[str, ModelInput] = {
    "text": ModelInput.from_ints(TOKENS),
    "nothing": ModelInput.empty(),
    "no tokens": ModelInput.from_ints([]),
    "the ends of int32": ModelInput.from_ints([-(2**31), 2**31 - 1]),
    "everything": ModelInput(
        chunks=[
            EncodedTextChunk(tokens=[1]),
            ImageChunk(data=bytes(range(256)), format="jpeg", expected_tokens=9),
            ImageChunk(data=b"", format="png"),
            DmelChunk(dmel=b"\x01\x01\x05"),
            EncodedTextChunk(tokens=TOKENS[::2]),
        ]
    ),
}


def returned(codec: Any, request: Pass) -> Pass:
    return dialects.decode_pass(
        codec.encode_pass(request),
        codec.content_type,
        forward_only=isinstance(request, ForwardRequest),
    )


@pytest.mark.parametrize("kind", [ForwardRequest, ForwardBackwardRequest])
@pytest.mark.parametrize("seq_id", [None, 1, 2**31 - 1])
def test_a_pass_keeps_its_kind_and_number(codec, kind, seq_id):
    request = kind(ForwardBackwardInput([], "cross_entropy"), "s:train:0", seq_id)
    assert returned(codec, request) == request
    assert type(returned(codec, request)) is kind


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_equal(codec, name):
    datum = Datum(ModelInput.empty(), {"weights": TENSORS[name], "höhe": SPARSE})
    request = ForwardRequest(ForwardBackwardInput([datum, datum], "ppo"), "m", 1)
    assert returned(codec, request) == request


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_comes_back_equal(codec, name):
    request = ForwardRequest(ForwardBackwardInput([Datum(PROMPTS[name])], "ppo"), "m", 1)
    assert returned(codec, request) == request


@pytest.mark.parametrize("config", [None, {"a": 0.5}, {"a": -0.0, "b": "text", "c": ""}])
def test_a_loss_configuration_comes_back_equal(codec, config):
    request = ForwardRequest(ForwardBackwardInput([], "custom", config), "m", 1)
    assert returned(codec, request) == request


def test_too_many_datums_are_refused(codec):
    datum = Datum(ModelInput.empty())
    request = ForwardRequest(ForwardBackwardInput([datum] * 4, "ppo"), "m", 1)
    body = codec.encode_pass(request)
    with pytest.raises(TooLargeError, match="3"):
        dialects.decode_pass(
            body, codec.content_type, forward_only=True, limits=Limits(max_datums=3)
        )


def test_an_unknown_loss_is_refused(codec):
    """S17"""
    request = ForwardRequest(ForwardBackwardInput([], "ppo"), "m", 1)
    body = codec.encode_pass(request).replace(b"ppo", b"dpo")
    with pytest.raises(ValidationError, match=r"loss_fn.*dpo"):
        dialects.decode_pass(body, codec.content_type, forward_only=True)


# --- Results ----------------------------------------------------------------------------------

OUTPUTS: dict[str, ForwardBackwardOutput] = {
    "nothing": ForwardBackwardOutput("ArrayRecord", []),
    "vectors of several lengths": ForwardBackwardOutput(
        "TorchLossReturn",
        [{"logprobs": TensorData.from_numpy(np.arange(n, dtype=np.float32))} for n in (3, 0, 5)],
        {"loss:sum": 1.5, "n:mean": 0.0},
    ),
    "matrices": ForwardBackwardOutput(
        "ArrayRecord",
        [{"logprobs": TensorData.from_numpy(np.ones((n, 2), np.float32))} for n in (1, 4)],
    ),
    "rows of changing width": ForwardBackwardOutput(
        "ArrayRecord", [{"x": TensorData.from_numpy(np.ones((2, k)))} for k in (1, 1, 3, 1)]
    ),
    "several fields": ForwardBackwardOutput(
        "ArrayRecord",
        [
            {
                "ids": TensorData([2**40], "int64", [1]),
                "logprobs": TensorData([-0.1], "float32", [1]),
            }
        ],
        {"loss:sum": 1e300},
    ),
    "datums without fields": ForwardBackwardOutput("ArrayRecord", [{}, {}]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_comes_back_equal(codec, name):
    kind, body = encode_result(OUTPUTS[name], codec.content_type)
    assert kind == codec.content_type
    assert codec.decode_output(body) == OUTPUTS[name]


NAN = np.float32(np.nan)
SAMPLES: dict[str, SampleResponse] = {
    "no sequences": SampleResponse([]),
    "both reasons": SampleResponse(
        [
            SampledSequence("stop", "", TOKENS, np.linspace(-3, 0, 5).astype(np.float32)),
            SampledSequence("length", "", np.array([2**31 - 1], np.int32)),
            SampledSequence("stop", "", np.array([], np.int32)),
        ]
    ),
    "the prompt's logprobs": SampleResponse([], np.array([NAN, -0.1, NAN, -5.0], np.float32)),
    "the prompt's top-k": SampleResponse(
        [], None, TopkLogprobs.from_lists([None, [(1, -0.5), (2, -0.75)], [(3, -0.25)]])
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_comes_back_equal(codec, name):
    """S6"""
    kind, body = encode_result(SAMPLES[name], codec.content_type)
    assert kind == codec.content_type
    assert codec.decode_sample(body) == SAMPLES[name]
