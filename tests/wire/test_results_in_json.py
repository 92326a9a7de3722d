"""Every result has a JSON form and a protobuf form, whatever its numbers are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pydantic
import pytest
import tinker.types as official
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support.encoded_results import encode_result
from tinsmith.types import (
    ForwardBackwardOutput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import json, proto

FLOATS = st.floats(width=32)
ANY_FLOAT = st.floats()


@st.composite
def outputs(draw: st.DrawFn) -> ForwardBackwardOutput:
    shape = arrays.array_shapes(min_dims=1, max_dims=2, max_side=4)
    tensors = arrays.arrays(np.float32, shape, elements=FLOATS).map(TensorData.from_numpy)
    per_datum = st.dictionaries(st.sampled_from(["logprobs", "elementwise_loss"]), tensors)
    return ForwardBackwardOutput(
        "ArrayRecord",
        draw(st.lists(per_datum, max_size=3)),
        draw(st.dictionaries(st.sampled_from(["loss:sum", "ratio:mean"]), ANY_FLOAT)),
    )


@st.composite
def samples(draw: st.DrawFn) -> SampleResponse:
    def floats(length: int) -> Any:
        return draw(arrays.arrays(np.float32, length, elements=FLOATS))

    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    topk = TopkLogprobs(np.arange(1, 5, dtype=np.int32).reshape(2, 2), floats(4).reshape(2, 2))
    return SampleResponse(
        sequences=[
            SampledSequence("length", "", np.arange(n, dtype=np.int32), floats(n)) for n in lengths
        ],
        prompt_logprobs_np=floats(3),
        topk_prompt_logprobs_np=draw(st.sampled_from([None, topk])),
    )


# The official types of the releases that read JSON, as far as results go.
class OldTensor(pydantic.BaseModel):
    data: list[int] | list[float]
    dtype: str
    shape: list[int] | None = None


class OldOutput(pydantic.BaseModel):
    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, OldTensor]]
    metrics: dict[str, float]


class OldSequence(pydantic.BaseModel):
    stop_reason: str
    tokens: list[int]
    logprobs: list[float] | None = None


class OldSample(pydantic.BaseModel):
    sequences: list[OldSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


def same(left: float | None, right: float | None) -> bool:
    """Equal as float32, which is what results have; None stands for a NaN of a prompt."""
    if left is None or right is None:
        return left is right
    return np.array_equal(np.float32(left), np.float32(right), equal_nan=True)


@given(outputs())
def test_a_pass_has_both_forms_and_every_release_can_read_its_own(
    output: ForwardBackwardOutput,
) -> None:
    assert encode_result(output, PROTOBUF)[0] == PROTOBUF
    content_type, body = encode_result(output, JSON)
    assert content_type == JSON
    read = OldOutput.model_validate(orjson.loads(body))
    for theirs, ours in zip(read.loss_fn_outputs, output.loss_fn_outputs, strict=True):
        for name, tensor in ours.items():
            assert all(map(same, theirs[name].data, tensor.data))
            assert len(theirs[name].data) == len(tensor.data)
    for name, value in output.metrics.items():
        got = read.metrics[name]
        assert got == value or (math.isnan(got) and math.isnan(value))
    again = ForwardBackwardOutput.model_validate(orjson.loads(body))
    assert again.loss_fn_outputs == output.loss_fn_outputs


@given(samples())
def test_a_sample_has_both_forms_and_every_release_can_read_its_own(
    response: SampleResponse,
) -> None:
    assert proto.decode_sample(proto.encode_sample(response)).sequences
    body = encode_result(response, JSON)[1]
    read = OldSample.model_validate(orjson.loads(body))
    for theirs, ours in zip(read.sequences, response.sequences, strict=True):
        assert all(map(same, theirs.logprobs or (), ours.logprobs or ()))
    assert all(map(same, read.prompt_logprobs or (), response.prompt_logprobs or ()))
    again = SampleResponse.model_validate(orjson.loads(body))
    for left, right in zip(again.sequences, response.sequences, strict=True):
        assert all(map(same, left.logprobs or (), right.logprobs or ()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5])
def test_the_metrics_of_a_step_are_read_by_the_official_client(value: float) -> None:
    body = json.encode(OptimStepResponse(metrics={"grad_norm": value}))
    theirs = official.OptimStepResponse.model_validate(orjson.loads(body))
    ours = json.decode(OptimStepResponse, body)
    for metrics in (theirs.metrics, ours.metrics):
        assert metrics is not None and same(metrics["grad_norm"], value)
