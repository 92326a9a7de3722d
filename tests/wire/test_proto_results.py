"""Results in protobuf: the outputs of a pass, and samples, beside the official converters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from tests.wire.test_proto import names
from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types import TensorData, TopkLogprobs
from tinsmith.wire import proto

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def same_tensor(mine: TensorData | None, theirs: Any) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return (
        (mine.dtype, mine.shape, mine.sparse_crow_indices, mine.sparse_col_indices)
        == (theirs.dtype, theirs.shape, theirs.sparse_crow_indices, theirs.sparse_col_indices)
    ) and np.array_equal(mine.numpy, theirs._numpy, equal_nan=mine.dtype == "float32")


def same_outputs(mine: ours.ForwardBackwardOutput, theirs: Any) -> bool:
    return (
        mine.loss_fn_output_type == theirs.loss_fn_output_type
        and mine.metrics == theirs.metrics
        and len(mine.loss_fn_outputs) == len(theirs.loss_fn_outputs)
        and all(
            a.keys() == b.keys() and all(same_tensor(a[name], b[name]) for name in a)
            for a, b in zip(mine.loss_fn_outputs, theirs.loss_fn_outputs, strict=True)
        )
    )


# --- The output of a pass ---------------------------------------------------------------------

output_specs = st.fixed_dictionaries(
    {
        "seed": seeds,
        "lengths": st.lists(st.integers(0, 5), max_size=5),
        "widths": st.lists(st.integers(1, 3), min_size=5, max_size=5),
        "fields": st.sets(st.sampled_from(["logprobs", "elementwise_loss", "ids"]), max_size=3),
        "metrics": st.dictionaries(names, st.floats(allow_nan=False), max_size=3),
        "kind": st.sampled_from(["ArrayRecord", "TorchLossReturn"]),
    }
)


def build_output(spec: dict[str, Any]) -> ours.ForwardBackwardOutput:
    """Vectors, and under `elementwise_loss` matrices whose width changes along the datums."""
    rng = np.random.default_rng(spec["seed"])
    outputs = []
    for index, length in enumerate(spec["lengths"]):
        shapes = {
            "logprobs": rng.normal(size=length),
            "elementwise_loss": rng.normal(size=(length, spec["widths"][index])),
            "ids": rng.integers(-(2**50), 2**50, length),
        }
        outputs.append({k: TensorData.from_numpy(shapes[k]) for k in sorted(spec["fields"])})
    return ours.ForwardBackwardOutput(spec["kind"], outputs, spec["metrics"])


@quick
@given(output_specs)
def test_our_outputs_are_read_by_the_official_converter(spec):
    """S109"""
    output = build_output(spec)
    body = proto.encode_output(output)
    assert same_outputs(output, deserialize_forward_backward_output(body))
    assert proto.decode_output(body) == output


def batched(arrays: list[np.ndarray], dtype: int, trailing: list[int]) -> Any:
    """A field of a record, written the slow way."""
    offsets = np.cumsum([0, *(a.nbytes for a in arrays)]).astype(np.int64)
    data = b"".join(a.tobytes() for a in arrays)
    return pb.BatchedTensor(
        data=data, offsets=offsets.tobytes(), dtype=dtype, trailing_shape=trailing
    )


WIRE_DTYPES = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
record_specs = st.lists(
    st.tuples(seeds, st.lists(st.integers(0, 4), max_size=4), st.sampled_from([[], [2], [2, 3]])),
    max_size=3,
)


@quick
@given(record_specs, st.sampled_from(list(WIRE_DTYPES)), st.booleans())
def test_records_of_any_dtype_are_read_as_the_official_converter_reads_them(specs, dtype, counted):
    """bfloat16 and int32 are widened; encoders older than `num_datums` left it 0."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="package.module:LossReturn")
    for seed, lengths, trailing in specs:
        rng = np.random.default_rng(seed)
        arrays = [
            rng.integers(0, 2**15, (n, *trailing)).astype(WIRE_DTYPES[dtype]) for n in lengths
        ]
        record = message.loss_fn_outputs.add(num_datums=len(arrays) if counted else 0)
        record.fields["x"].CopyFrom(batched(arrays, dtype, trailing))
        record.fields["also"].CopyFrom(batched(arrays, dtype, trailing))
    message.metrics["loss:sum"] = 0.25
    body = message.SerializeToString()
    mine, theirs = proto.decode_output(body), deserialize_forward_backward_output(body)
    if specs:
        assert same_outputs(mine, theirs)
    else:  # with no records the official converter keeps the module in the name
        assert mine.loss_fn_output_type == "LossReturn" and mine.loss_fn_outputs == []


def test_bfloat16_is_widened_exactly():
    words = np.array([0x3F80, 0xC000, 0x0001, 0x7F80, 0xFF80], dtype="<u2")
    message = pb.ForwardBackwardOutput()
    record = message.loss_fn_outputs.add(num_datums=1)
    record.fields["x"].CopyFrom(batched([words], pb.DTYPE_BFLOAT16, []))
    [output] = proto.decode_output(message.SerializeToString()).loss_fn_outputs
    assert output["x"].data == [1.0, -2.0, 2.0**-133, np.inf, -np.inf]


def test_datums_survive_when_every_field_was_stripped():
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.loss_fn_outputs.add(num_datums=3)
    body = message.SerializeToString()
    assert proto.decode_output(body).loss_fn_outputs == [{}, {}, {}]
    assert same_outputs(proto.decode_output(body), deserialize_forward_backward_output(body))
    assert proto.encode_output(proto.decode_output(body)) == body


def test_an_output_without_a_type_is_an_array_record():
    assert proto.decode_output(b"").loss_fn_output_type == "ArrayRecord"
    assert deserialize_forward_backward_output(b"").loss_fn_output_type == "ArrayRecord"


def test_output_arrays_are_views_of_the_body():
    """S15"""
    arrays = [np.arange(1000, dtype=np.float32), np.arange(500, dtype=np.float32)]
    outputs = [{"logprobs": TensorData.from_numpy(a)} for a in arrays]
    body = proto.encode_output(ours.ForwardBackwardOutput("ArrayRecord", outputs))
    raw = np.frombuffer(body, np.uint8)
    for output in proto.decode_output(body).loss_fn_outputs:
        assert np.shares_memory(output["logprobs"].numpy, raw)


def test_a_sparse_output_is_refused_rather_than_flattened():
    sparse = TensorData([5.0], "float32", [2, 2], [0, 1, 1], [0])
    output = ours.ForwardBackwardOutput("ArrayRecord", [{"logprobs": sparse}])
    with pytest.raises(ValidationError, match="logprobs"):
        proto.encode_output(output)


def test_a_scalar_output_keeps_its_value():
    """The wire has no scalars; a datum's field is at least a vector."""
    output = ours.ForwardBackwardOutput(
        "ArrayRecord", [{"loss": TensorData([2.5], "float32", [])}] * 2
    )
    back = deserialize_forward_backward_output(proto.encode_output(output))
    assert [o["loss"].data for o in back.loss_fn_outputs] == [[2.5], [2.5]]


# --- A sample ---------------------------------------------------------------------------------

sample_specs = st.fixed_dictionaries(
    {
        "seed": seeds,
        "lengths": st.lists(st.integers(0, 5), max_size=4),
        "logprobs": st.booleans(),
        "k": st.integers(0, 3),
        "prompt": st.none() | st.integers(1, 5),
        "prompt_k": st.integers(0, 3),
        "targets": st.sampled_from(["none", "dense", "csr"]),
        "alternatives": st.integers(0, 2),
        "hits": st.integers(0, 2**31 - 1),
    }
)


def build_sample(spec: dict[str, Any]) -> ours.SampleResponse:
    rng = np.random.default_rng(spec["seed"])

    def topk(rows: int, k: int) -> TopkLogprobs | None:
        if not rows or not k:
            return None
        ids = rng.integers(0, 50, (rows, k)).astype(np.int32)
        return TopkLogprobs(ids, rng.normal(size=(rows, k)).astype(np.float32))

    sequences = [
        ours.SampledSequence(
            "stop" if rng.random() < 0.5 else "length",
            "",
            rng.integers(0, 2**31, length).astype(np.int32),
            rng.normal(size=length).astype("f4") if spec["logprobs"] and length else None,
            topk(length, spec["k"]),
        )
        for length in spec["lengths"]
    ]
    prompt = spec["prompt"] or 1
    targets = None
    if spec["targets"] == "dense":
        targets = TensorData.from_numpy(rng.normal(size=(prompt, 2)))
    elif spec["targets"] == "csr":
        targets = TensorData([0.5], "float32", [prompt, 2], [0] + [1] * prompt, [1])
    alternatives = None
    if spec["alternatives"]:
        shape = (prompt, spec["alternatives"])
        ids = TensorData.from_numpy(rng.integers(0, 99, shape))
        alternatives = ours.PromptAltTokens(ids, TensorData.from_numpy(rng.normal(size=shape)))
    logprobs = np.append(np.float32(np.nan), rng.normal(size=prompt - 1).astype("f4"))
    return ours.SampleResponse(
        sequences=sequences,
        prompt_logprobs_np=logprobs if spec["prompt"] else None,
        topk_prompt_logprobs_np=topk(prompt, spec["prompt_k"]),
        target_prompt_logprobs=targets,
        prompt_cache_hit_tokens=spec["hits"],
        prompt_alt_tokens=alternatives,
    )


def same_sample(mine: ours.SampleResponse, theirs: Any) -> bool:
    pairs = zip(mine.sequences, theirs.sequences, strict=True)
    alternatives = (mine.prompt_alt_tokens, theirs.prompt_alt_tokens)
    return (
        all(
            (a.stop_reason, a.tokens, a.logprobs, a.topk_logprobs)
            == (b.stop_reason, b.tokens, b.logprobs, b.topk_logprobs)
            for a, b in pairs
        )
        and mine.prompt_logprobs == theirs.prompt_logprobs
        and mine.topk_prompt_logprobs == theirs.topk_prompt_logprobs
        and same_tensor(mine.target_prompt_logprobs, theirs.target_prompt_logprobs)
        and mine.prompt_cache_hit_tokens == theirs.prompt_cache_hit_tokens
        and (
            alternatives == (None, None)
            or (
                same_tensor(alternatives[0].tokens, alternatives[1].tokens)
                and same_tensor(alternatives[0].logprobs, alternatives[1].logprobs)
            )
        )
    )


@quick
@given(sample_specs)
def test_our_samples_are_read_by_the_official_converter(spec):
    """S6, S109"""
    response = build_sample(spec)
    body = proto.encode_sample(response)
    assert same_sample(response, deserialize_sample_response(body))
    assert proto.decode_sample(body) == response
    message = pb.SampleResponse.FromString(body)
    if response.prompt_alt_tokens is not None:
        assert message.prompt_alt_tokens.tokens.dtype == pb.DTYPE_INT32
    # Written by the library, read by us.
    assert proto.decode_sample(message.SerializeToString()) == response


def test_samples_built_from_lists_are_encoded_like_those_of_arrays():
    lists = ours.SampledSequence(
        "stop",
        "",
        _tokens_list=[1, 2],
        _logprobs_list=[-0.5, -1.5],
        _topk_logprobs_list=[[(1, -0.5)], None],
    )
    response = ours.SampleResponse(
        [lists],
        _prompt_logprobs_list=[None, -0.25],
        _topk_prompt_logprobs_list=[None, [(3, -0.5), (4, -1.0)]],
    )
    read = deserialize_sample_response(proto.encode_sample(response))
    assert read.sequences[0].tokens == [1, 2]
    assert read.sequences[0].logprobs == [-0.5, -1.5]
    assert read.sequences[0].topk_logprobs == [[(1, -0.5)], None]
    assert read.prompt_logprobs == [None, -0.25]
    assert read.topk_prompt_logprobs == [None, [(3, -0.5), (4, -1.0)]]


def test_sequence_ids_come_from_the_promise():
    body = proto.encode_sample(build_sample({**PLAIN, "lengths": [1, 2]}))
    assert [s.sequence_id for s in proto.decode_sample(body, ["r:0", "r:1"]).sequences] == [
        "r:0",
        "r:1",
    ]
    with pytest.raises(ValidationError, match=r"sequences.*2 sequences for 1 ids"):
        proto.decode_sample(body, ["r:0"])


PLAIN: dict[str, Any] = {
    "seed": 0,
    "lengths": [3],
    "logprobs": True,
    "k": 0,
    "prompt": None,
    "prompt_k": 0,
    "targets": "none",
    "alternatives": 0,
    "hits": 0,
}


def test_bfloat16_in_a_tensor_is_read_as_the_numbers_it_holds():
    """The official converter reads such words as integers; nobody should send them."""
    words = np.array([0x3F80, 0xC000], dtype="<u2")
    message = pb.SampleResponse()
    message.target_prompt_logprobs.dense = words.tobytes()
    message.target_prompt_logprobs.dtype = pb.DTYPE_BFLOAT16
    message.target_prompt_logprobs.shape.extend([1, 2])
    read = proto.decode_sample(message.SerializeToString())
    assert read.target_prompt_logprobs.tolist() == [[1.0, -2.0]]


def test_an_unset_stop_reason_is_stop_and_a_new_one_is_an_error():
    """S6"""
    assert (
        proto.decode_sample(pb.SampleResponse(sequences=[{}]).SerializeToString())
        .sequences[0]
        .stop_reason
        == "stop"
    )
    with pytest.raises(ValidationError, match=r"sequences\[0\]\.stop_reason.*7"):
        proto.decode_sample(bytes.fromhex("0a020807"))


def test_sample_arrays_are_views_of_the_body():
    """S15"""
    body = proto.encode_sample(build_sample({**PLAIN, "lengths": [1000], "prompt": 5}))
    raw = np.frombuffer(body, np.uint8)
    read = proto.decode_sample(body)
    assert np.shares_memory(read.sequences[0].tokens_np, raw)
    assert np.shares_memory(read.sequences[0].logprobs_np, raw)
    assert np.shares_memory(read.prompt_logprobs_np, raw)
