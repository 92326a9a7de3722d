"""The protobuf codec beside the official package's: its generated classes and its converters.

`spec` strategies give plain data from which both packages build their own objects, so that every
comparison is between two independent implementations.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker.types as official
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

import tinsmith.wire
from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types import TensorData
from tinsmith.wire import proto

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)

# --- The vectors of protocol.md, section 15 ---------------------------------------------------

REQUEST_VECTOR = bytes.fromhex(
    "0a016d10011a440a100a0e0a0c01000000020000000300000012300a0d746172"
    "6765745f746f6b656e73121f0a18020000000000000003000000000000000400"
    "0000000000001802220103220d63726f73735f656e74726f70792a0c0a016111"
    "000000000000f83f30013a0e0a0161120909000000000000f83f"
)
OUTPUT_VECTOR = bytes.fromhex(
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c00"
    "0080bf000000c0000040c01218000000000000000008000000000000000c0000"
    "0000000000180118021a130a086c6f73733a73756d110000000000001840"
)
SAMPLE_VECTOR = bytes.fromhex(
    "0a160801120805000000060000001a08000080bf000000c012080000c07f000000bf"
)


def vector_request() -> ours.ForwardRequest:
    datum = ours.Datum(
        model_input=ours.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": TensorData([2, 3, 4], "int64", [3])},
    )
    return ours.ForwardRequest(
        ours.ForwardBackwardInput([datum], "cross_entropy", {"a": 1.5}), "m", 1
    )


def vector_output() -> ours.ForwardBackwardOutput:
    logprobs = [[-1.0, -2.0], [-3.0]]
    outputs = [{"logprobs": TensorData(row, "float32", [len(row)])} for row in logprobs]
    return ours.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": 6.0})


def vector_sample() -> ours.SampleResponse:
    sequence = ours.SampledSequence(
        "length", "", np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
    )
    prompt = np.frombuffer(bytes.fromhex("0000c07f000000bf"), np.float32)
    return ours.SampleResponse([sequence], prompt)


@pytest.mark.parametrize(
    ("vector", "message", "encode", "decode"),
    [
        (REQUEST_VECTOR, vector_request(), proto.encode_pass, proto.decode_pass),
        (OUTPUT_VECTOR, vector_output(), proto.encode_output, proto.decode_output),
        (SAMPLE_VECTOR, vector_sample(), proto.encode_sample, proto.decode_sample),
    ],
    ids=["request", "output", "sample"],
)
def test_the_vectors_of_the_protocol_hold_byte_for_byte(vector, message, encode, decode):
    assert encode(message) == vector
    assert decode(vector) == message


# --- The schema -------------------------------------------------------------------------------


def compiled(folder: Path) -> Any:
    """Our .proto file as a descriptor, compiled here and now."""
    source = Path(tinsmith.wire.__file__).with_name("tinker_public.proto")
    target = folder / "tinker_public.pb"
    arguments = [f"-I{source.parent}", f"--descriptor_set_out={target}", str(source)]
    assert protoc.main(["protoc", *arguments]) == 0
    [file] = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName(file.name)


def described(file: Any) -> dict[str, Any]:
    """Everything about a schema that shows on the wire or in a generated class."""
    result: dict[str, Any] = {"package": file.package, "services": list(file.services_by_name)}
    for name, enum in file.enum_types_by_name.items():
        result[name] = {value.name: value.number for value in enum.values}
    pending = list(file.message_types_by_name.values())
    while pending:
        message = pending.pop()
        pending += message.nested_types
        result[message.full_name] = {
            field.name: (
                field.number,
                field.type,
                field.is_repeated,
                field.has_presence,
                field.message_type and field.message_type.full_name,
                field.enum_type and field.enum_type.full_name,
                field.containing_oneof and field.containing_oneof.name,
            )
            for field in message.fields
        }
    return result


def test_our_schema_is_the_official_one_field_by_field(tmp_path):
    """S1"""
    assert described(compiled(tmp_path)) == described(pb.DESCRIPTOR)


# --- A pass -----------------------------------------------------------------------------------

characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
"""NUL is refused: databases cannot store it (tests/server/routes/test_bounds.py)."""
names = st.text(characters, max_size=6)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def tensor_specs(draw: Any) -> dict[str, Any]:
    rng = np.random.default_rng(draw(seeds))
    dtype = draw(st.sampled_from(["int64", "float32"]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    values = rng.integers(-(2**40), 2**40, shape) if dtype == "int64" else rng.normal(size=shape)
    if dtype == "float32" and values.size and draw(st.booleans()):
        values.flat[0] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    kind = draw(st.sampled_from(["dense", "unshaped", "csr"]))
    if kind == "csr" and len(shape) == 2:
        listed = rng.random(shape) < 0.4
        return {
            "data": values[listed],
            "dtype": dtype,
            "shape": shape,
            "sparse_crow_indices": [0, *np.cumsum(listed.sum(axis=1)).tolist()],
            "sparse_col_indices": np.nonzero(listed)[1].tolist(),
        }
    # A scalar's empty shape is not told from an absent one on the wire: both are vectors.
    shaped = kind == "dense" and shape
    return {"data": values.ravel(), "dtype": dtype, "shape": shape if shaped else None}


spans = st.lists(
    st.tuples(
        st.booleans(),
        st.text(characters, min_size=1, max_size=4),
        st.integers(0, 99),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=3,
)
chunks = st.one_of(
    st.tuples(st.just("text"), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)),
    st.tuples(st.just("image"), st.binary(max_size=9), st.none() | st.integers(0, 2**31 - 1)),
    st.tuples(st.just("dmel"), st.binary(max_size=9)),
)
pass_specs = st.fixed_dictionaries(
    {
        "data": st.lists(
            st.tuples(
                st.lists(chunks, max_size=3),
                st.dictionaries(names, tensor_specs(), max_size=3),
                st.none() | st.tuples(spans, spans),
            ),
            max_size=3,
        ),
        "loss_fn": st.sampled_from(["cross_entropy", "ppo", "custom"]),
        "config": st.none()
        | st.dictionaries(
            names,
            st.floats(allow_nan=False) | st.text(characters, max_size=5),
            min_size=1,
            max_size=3,
        ),
        "model_id": names,
        "seq_id": st.none() | st.integers(1, 2**31 - 1),
        "forward_only": st.booleans(),
    }
)


def build_chunk(types: Any, kind: str, *rest: Any) -> Any:
    if kind == "text":
        return types.EncodedTextChunk(tokens=rest[0])
    if kind == "image":
        return types.ImageChunk(data=rest[0], format="png", expected_tokens=rest[1])
    return types.DmelChunk(dmel=rest[0])


def build_spans(types: Any, runs: list[Any]) -> list[Any]:
    kinds = (types.PromptProvenanceSpan, types.SampledProvenanceSpan)
    return [kinds[sampled](sequence_id=i, offset=o, length=n) for sampled, i, o, n in runs]


def build_pass(types: Any, spec: dict[str, Any]) -> Any:
    data = [
        types.Datum(
            types.ModelInput(chunks=[build_chunk(types, *chunk) for chunk in parts]),
            {name: types.TensorData(**tensor) for name, tensor in inputs.items()},
            *(build_spans(types, runs) for runs in provenance or ()),
        )
        for parts, inputs, provenance in spec["data"]
    ]
    cls = types.ForwardRequest if spec["forward_only"] else types.ForwardBackwardRequest
    inputs = types.ForwardBackwardInput(data, spec["loss_fn"], spec["config"])
    return cls(inputs, spec["model_id"], spec["seq_id"])


def official_message(spec: dict[str, Any]) -> Any:
    """The official converter's message; its client sends forward passes this way as well."""
    request = build_pass(official, {**spec, "forward_only": False})
    message = forward_backward_request_to_proto(request)
    message.forward_only = spec["forward_only"]
    return message


@quick
@given(pass_specs)
def test_a_pass_is_encoded_as_the_official_converter_does(spec):
    """S3, S109"""
    body = proto.encode_pass(build_pass(ours, spec))
    assert pb.ForwardBackwardRequest.FromString(body) == official_message(spec)


@quick
@given(pass_specs)
def test_a_pass_of_the_official_package_is_decoded_as_what_it_is(spec):
    """S3, S109"""
    assert proto.decode_pass(official_message(spec).SerializeToString()) == build_pass(ours, spec)


def test_a_pointer_to_an_image_cannot_be_trained_on():
    pointer = ours.ImageAssetPointerChunk(format="png", location="asset://1")
    datum = ours.Datum(ours.ModelInput(chunks=[pointer]))
    request = ours.ForwardRequest(ours.ForwardBackwardInput([datum], "ppo"), "m", 1)
    with pytest.raises(ValidationError, match=r"data\[0\].*chunks\[0\].*image_asset_pointer"):
        proto.encode_pass(request)


def test_numbers_that_do_not_fit_the_wire_are_refused_when_sent():
    """S5"""
    image = ours.ImageChunk(data=b"", format="png", expected_tokens=2**31)
    datum = ours.Datum(ours.ModelInput(chunks=[image]))
    inputs = ours.ForwardBackwardInput([datum], "ppo")
    with pytest.raises(ValidationError, match=r"chunks\[0\]\.expected_tokens.*32-bit"):
        proto.encode_pass(ours.ForwardRequest(inputs, "m", 1))
    empty = ours.ForwardBackwardInput([], "ppo")
    for seq_id in (-1, 2**31):
        with pytest.raises(ValidationError, match="seq_id"):
            proto.encode_pass(ours.ForwardRequest(empty, "m", seq_id))
    alternatives = ours.PromptAltTokens(
        TensorData([2**31], "int64", [1, 1]), TensorData([0.0], "float32", [1, 1])
    )
    with pytest.raises(ValidationError, match="int32"):
        proto.encode_sample(ours.SampleResponse([], prompt_alt_tokens=alternatives))


def test_numbers_go_into_both_config_maps_and_texts_into_the_second():
    config = {"kl_coeff": 0.5, "loss_id": "l-1"}
    inputs = ours.ForwardBackwardInput([], "custom", config)
    message = pb.ForwardBackwardRequest.FromString(
        proto.encode_pass(ours.ForwardBackwardRequest(inputs, "m", 1))
    )
    assert dict(message.loss_fn_config) == {"kl_coeff": 0.5}
    assert message.loss_fn_config_v2["kl_coeff"].number == 0.5
    assert message.loss_fn_config_v2["loss_id"].text == "l-1"
    assert set(message.loss_fn_config_v2) == {"kl_coeff", "loss_id"}


def test_the_first_config_map_is_read_only_when_the_second_is_absent():
    """Clients before 0.26.2 had one map."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.8
    old = proto.decode_pass(message.SerializeToString())
    assert old.forward_backward_input.loss_fn_config == {"clip_low_threshold": 0.8}
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.9
    new = proto.decode_pass(message.SerializeToString())
    assert new.forward_backward_input.loss_fn_config == {"clip_low_threshold": 0.9}


def test_decoded_arrays_are_views_of_the_body():
    """S15: 20 MB of tensors are decoded without copying them."""
    tensor = TensorData.from_numpy(np.zeros(4_000_000, np.float32))
    tokens = ours.ModelInput.from_ints(np.zeros(1_000_000, np.int32))
    datum = ours.Datum(tokens, {"weights": tensor})
    request = ours.ForwardRequest(ours.ForwardBackwardInput([datum], "ppo"), "m", 1)
    body = proto.encode_pass(request)
    raw = np.frombuffer(body, np.uint8)
    tracemalloc.start()
    try:
        [decoded] = proto.decode_pass(body).forward_input.data
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.shares_memory(decoded.loss_fn_inputs["weights"].numpy, raw)
    assert np.shares_memory(decoded.model_input.chunks[0].tokens_np, raw)
    assert peak < 100_000


def test_a_shape_may_be_written_unpacked():
    """Readers of proto3 take both forms of a repeated number."""
    packed, unpacked = bytes.fromhex("220103"), bytes.fromhex("2003")
    assert len(packed) - len(unpacked) == 1
    tensor = pb.Tensor.FromString(bytes.fromhex("1802") + unpacked)
    assert list(tensor.shape) == [3]
    # The same datum, its tensor's shape written the old way: three enclosing lengths shrink.
    body = REQUEST_VECTOR.replace(packed, unpacked)
    for longer, shorter in (("1a44", "1a43"), ("1230", "122f"), ("121f", "121e")):
        body = body.replace(bytes.fromhex(longer), bytes.fromhex(shorter), 1)
    assert proto.decode_pass(body) == vector_request()
