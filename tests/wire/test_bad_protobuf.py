"""Protobuf bodies that are wrong, truncated or damaged.

Whatever the bytes, a decoder returns a message or raises `ValidationError`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tinsmith.errors import ValidationError
from tinsmith.wire import proto

DECODERS: dict[str, tuple[Callable[[bytes], Any], Any]] = {
    "pass": (proto.decode_pass, pb.ForwardBackwardRequest),
    "output": (proto.decode_output, pb.ForwardBackwardOutput),
    "sample": (proto.decode_sample, pb.SampleResponse),
}


# --- Bodies to start from ---------------------------------------------------------------------


def int64s(*values: int) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


def a_pass() -> Any:
    message = pb.ForwardBackwardRequest(model_id="m:train:0", seq_id=300, loss_fn="ppo")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, dtype=np.int32).tobytes()
    image = datum.model_input.add().image
    image.data, image.format, image.expected_tokens = b"png", "png", 200
    datum.model_input.add().dmel.dmel = b"\x01\x01\x05"
    dense = datum.loss_fn_inputs["weights"]
    dense.dtype, dense.dense = pb.DTYPE_FLOAT32, floats(1, 2, 3, 4)
    dense.shape.extend([2, 2])
    csr = datum.loss_fn_inputs["target_tokens"]
    csr.dtype, csr.sparse_csr.values = pb.DTYPE_INT64, int64s(7, 8)
    csr.sparse_csr.crow_indices, csr.sparse_csr.col_indices = int64s(0, 1, 2), int64s(1, 0)
    csr.shape.extend([2, 3])
    run = {"sequence_id": "s", "offset": 1, "length": 3}
    datum.model_input_spans.add(prompt_tokens=run)
    datum.loss_fn_input_spans.add(sampled_tokens=run)
    message.loss_fn_config["clip"] = 0.2
    message.loss_fn_config_v2["clip"].number = 0.2
    message.loss_fn_config_v2["name"].text = "x"
    return message


def an_output() -> Any:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="m:ArrayRecord")
    record = message.loss_fn_outputs.add(num_datums=2)
    field = record.fields["logprobs"]
    field.data, field.offsets, field.dtype = floats(1, 2, 3, 4), int64s(0, 8, 16), 1
    field.trailing_shape.extend([2])
    message.metrics["loss:sum"] = 1.5
    return message


def a_sample() -> Any:
    message = pb.SampleResponse(prompt_logprobs=floats(0, 1), prompt_cache_hit_tokens=300)
    topk = {"token_ids": b"\1\0\0\0" * 2, "logprobs": floats(1, 2), "k": 2, "length": 1}
    message.sequences.add(
        stop_reason=1, tokens=b"\1\0\0\0", logprobs=floats(1), topk_sampled_logprobs=topk
    )
    message.topk_prompt_logprobs.CopyFrom(pb.TopkLogprobs(**topk))
    tensor = pb.Tensor(dense=floats(1, 2), dtype=1, shape=[1, 2])
    message.target_prompt_logprobs.CopyFrom(tensor)
    message.prompt_alt_tokens.tokens.CopyFrom(tensor)
    message.prompt_alt_tokens.logprobs.CopyFrom(tensor)
    return message


BODIES = {
    "pass": a_pass().SerializeToString(deterministic=True),
    "output": an_output().SerializeToString(deterministic=True),
    "sample": a_sample().SerializeToString(deterministic=True),
}


# --- Each kind of wrong, and where the complaint points ---------------------------------------


def change(message: Any, edit: Callable[[Any], Any]) -> bytes:
    edit(message)
    return message.SerializeToString()


def weights(**fields: Any) -> Callable[[Any], Any]:
    def edit(message: Any) -> None:
        tensor = message.data[0].loss_fn_inputs["weights"]
        tensor.CopyFrom(pb.Tensor(**{"dtype": 1, **fields}))

    return edit


def targets(**fields: Any) -> Callable[[Any], Any]:
    """The sparse tensor [2, 3] with some of its parts replaced."""

    def edit(message: Any) -> None:
        tensor = message.data[0].loss_fn_inputs["target_tokens"]
        if "shape" in fields:
            tensor.shape[:] = fields.pop("shape")
        for name, value in fields.items():
            setattr(tensor.sparse_csr, name, value)

    return edit


def logprobs(**fields: Any) -> Callable[[Any], Any]:
    def edit(message: Any) -> None:
        field = message.loss_fn_outputs[0].fields["logprobs"]
        if "trailing_shape" in fields:
            field.trailing_shape[:] = fields.pop("trailing_shape")
        for name, value in fields.items():
            setattr(field, name, value)

    return edit


def setting(**fields: Any) -> Callable[[Any], Any]:
    def edit(message: Any) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return edit


W, T = r"data\[0\].*'weights'", r"data\[0\].*'target_tokens'"
WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a negative seq_id": ("pass", setting(seq_id=-1), "seq_id"),
    "an unknown loss": ("pass", setting(loss_fn="dpo"), "loss_fn.*dpo"),
    "no loss": ("pass", setting(loss_fn=""), "loss_fn"),
    "half a token": (
        "pass",
        lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"\1\2\3"),
        r"data\[0\].*chunks\[0\].*3 bytes",
    ),
    "a chunk of no kind": ("pass", lambda m: m.data[0].model_input.add(), r"chunks\[3\].*kind"),
    "an unknown image format": (
        "pass",
        lambda m: setattr(m.data[0].model_input[1].image, "format", "gif"),
        r"chunks\[1\].*format.*gif",
    ),
    "an image with other dimensions": (
        "pass",
        lambda m: setattr(m.data[0].model_input[1].image.override_dimensions, "width", 3),
        r"chunks\[1\].*dimensions",
    ),
    "no dtype": ("pass", weights(dense=floats(1), dtype=0), W + ".*dtype"),
    "an unknown dtype": ("pass", weights(dense=floats(1), dtype=9), W + ".*dtype.*9"),
    "bytes that do not fit the dtype": (
        "pass",
        weights(dense=b"\0" * 5, shape=[1]),
        W + ".*5 bytes",
    ),
    "bytes that do not fit the shape": (
        "pass",
        weights(dense=floats(1, 2), shape=[3]),
        W + ".*shape",
    ),
    "a negative extent": ("pass", weights(dense=floats(1, 2), shape=[-1, -2]), W + ".*shape"),
    "an overflowing shape": ("pass", weights(dense=floats(1), shape=[2**62, 4]), W + ".*shape"),
    "a wrapping shape": ("pass", weights(dense=b"", shape=[2**32, 2**32]), W + ".*shape"),
    "too many dimensions": ("pass", weights(dense=floats(1), shape=[1] * 9), W + ".*shape.*8"),
    "CSR without a shape": ("pass", targets(shape=[]), T + ".*shape"),
    "CSR of three dimensions": ("pass", targets(shape=[2, 3, 1]), T + ".*shape"),
    "CSR with too few row pointers": ("pass", targets(crow_indices=int64s(0, 2)), T + ".*crow"),
    "CSR without row pointers": ("pass", targets(crow_indices=b""), T + ".*crow"),
    "CSR rows that do not start at 0": (
        "pass",
        targets(crow_indices=int64s(1, 1, 2)),
        T + ".*crow",
    ),
    "CSR rows that fall": ("pass", targets(crow_indices=int64s(0, 3, 2)), T + ".*crow"),
    "CSR rows that end too early": ("pass", targets(crow_indices=int64s(0, 1, 1)), T + ".*crow"),
    "CSR rows that end too late": ("pass", targets(crow_indices=int64s(0, 1, 9)), T + ".*crow"),
    "CSR column outside": ("pass", targets(col_indices=int64s(1, 3)), T + ".*col"),
    "CSR column negative": ("pass", targets(col_indices=int64s(-1, 0)), T + ".*col"),
    "CSR columns of another count": ("pass", targets(col_indices=int64s(1)), T),
    "CSR values of another count": ("pass", targets(values=int64s(7)), T + ".*data"),
    "CSR indices of odd size": ("pass", targets(col_indices=b"\0" * 9), T + ".*9 bytes"),
    "CSR of absurd height": ("pass", targets(shape=[2**62, 3]), T + ".*crow"),
    "a run of negative length": (
        "pass",
        lambda m: setattr(m.data[0].model_input_spans[0].prompt_tokens, "length", -1),
        r"data\[0\].*length",
    ),
    "a run of no sequence": ("pass", lambda m: m.data[0].model_input_spans.add(), r"sequence_id"),
    "offsets that do not end at the data": (
        "output",
        logprobs(offsets=int64s(0, 8, 12)),
        "offsets",
    ),
    "offsets beyond the data": ("output", logprobs(offsets=int64s(0, 8, 800)), "offsets"),
    "offsets that do not start at 0": ("output", logprobs(offsets=int64s(8, 8, 16)), "offsets"),
    "negative offsets": ("output", logprobs(offsets=int64s(0, -8, 16)), "offsets"),
    "falling offsets": ("output", logprobs(offsets=int64s(0, 16, 8)), "offsets"),
    "offsets inside a number": ("output", logprobs(offsets=int64s(0, 6, 16)), "offsets"),
    "offsets inside a row": ("output", logprobs(offsets=int64s(0, 4, 16)), "offsets"),
    "offsets of odd size": ("output", logprobs(offsets=b"\0" * 9), "9 bytes"),
    "data without offsets": ("output", logprobs(offsets=b""), "logprobs|num_datums"),
    "one offset": ("output", logprobs(offsets=int64s(0)), "logprobs|num_datums"),
    "data of odd size": ("output", logprobs(data=b"\0" * 7), "7 bytes"),
    "an output of no dtype": ("output", logprobs(dtype=0), "dtype"),
    "an output of unknown dtype": ("output", logprobs(dtype=77), "dtype.*77"),
    "a trailing shape that does not fit": ("output", logprobs(trailing_shape=[3]), "offsets|shape"),
    "a negative trailing shape": ("output", logprobs(trailing_shape=[-2]), "offsets|shape"),
    "a zero trailing shape": ("output", logprobs(trailing_shape=[0]), "offsets|shape"),
    "an overflowing trailing shape": (
        "output",
        logprobs(trailing_shape=[2**62, 2**62, 2]),
        "offsets|shape",
    ),
    "too many trailing dimensions": (
        "output",
        logprobs(trailing_shape=[1] * 100 + [2]),
        "offsets|shape",
    ),
    "more datums than fields have": (
        "output",
        lambda m: setattr(m.loss_fn_outputs[0], "num_datums", 3),
        r"loss_fn_outputs\[0\].*num_datums",
    ),
    "a negative number of datums": (
        "output",
        lambda m: setattr(m.loss_fn_outputs.add(), "num_datums", -1),
        r"loss_fn_outputs\[2\].*num_datums",
    ),
    "half a sampled token": (
        "sample",
        lambda m: setattr(m.sequences[0], "tokens", b"\1"),
        "tokens",
    ),
    "half a logprob": ("sample", lambda m: setattr(m.sequences[0], "logprobs", b"\1"), "logprobs"),
    "half a prompt logprob": ("sample", setting(prompt_logprobs=b"\1"), "prompt_logprobs"),
    "top-k of another size": (
        "sample",
        lambda m: setattr(m.topk_prompt_logprobs, "k", 3),
        "topk_prompt_logprobs",
    ),
    "top-k of absurd size": (
        "sample",
        lambda m: setattr(m.topk_prompt_logprobs, "k", 2**32 - 1),
        "topk_prompt_logprobs",
    ),
    "alternatives without a tensor": (
        "sample",
        lambda m: m.prompt_alt_tokens.ClearField("logprobs"),
        r"prompt_alt_tokens\.logprobs",
    ),
}
STARTS = {"pass": a_pass, "output": an_output, "sample": a_sample}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_refused_and_named(name):
    kind, edit, message = WRONG[name]
    body = change(STARTS[kind](), edit)
    with pytest.raises(ValidationError, match=message):
        DECODERS[kind][0](body)


def test_the_bodies_above_are_right_until_they_are_changed():
    for kind, body in BODIES.items():
        DECODERS[kind][0](body)


def test_a_negative_topk_size_is_refused():
    cells = "0a080000000000000000" + "12080000000000000000"
    minus = "18" + "ff" * 9 + "01" + "20fe" + "ff" * 8 + "01"  # k = -1, length = -2
    body = bytes.fromhex("1a2a" + cells + minus)
    assert len(body) == 2 + 0x2A
    with pytest.raises(ValidationError, match="topk_prompt_logprobs"):
        proto.decode_sample(body)


# --- Damage -----------------------------------------------------------------------------------


def survives(kind: str, body: bytes) -> bool:
    """Whether a decoder took the body; anything but `ValidationError` fails the test."""
    try:
        DECODERS[kind][0](body)
    except ValidationError:
        return False
    return True


def library_takes(kind: str, body: bytes) -> bool:
    try:
        DECODERS[kind][1].FromString(body)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("kind", BODIES)
def test_no_prefix_of_a_body_is_taken_unless_the_library_takes_it(kind):
    for end in range(len(BODIES[kind])):
        if survives(kind, BODIES[kind][:end]):
            assert library_takes(kind, BODIES[kind][:end]), end


@pytest.mark.parametrize("kind", BODIES)
def test_changing_any_byte_gives_a_message_or_a_validation_error(kind):
    body = bytearray(BODIES[kind])
    for index in range(len(body)):
        kept = body[index]
        for value in {0, 1, kept ^ 1, kept ^ 0x80, kept + 1 & 255, 0x7F, 0x80, 0xFF}:
            body[index] = value
            survives(kind, bytes(body))
        body[index] = kept


@pytest.mark.parametrize("kind", BODIES)
def test_random_damage_gives_a_message_or_a_validation_error(kind):
    rng = random.Random(kind)
    for _ in range(4_000):
        body = bytearray(BODIES[kind])
        for _ in range(rng.randint(1, 6)):
            where = rng.randrange(len(body) + 1)
            what = rng.choice("cids")
            if what == "c" and where < len(body):
                body[where] = rng.randrange(256)
            elif what == "i":
                body[where:where] = rng.randbytes(rng.randint(1, 3))
            elif what == "d":
                del body[where : where + rng.randint(1, 4)]
            else:
                body += body[where : where + 20]
        survives(kind, bytes(body))


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.sampled_from(list(BODIES)), st.binary(max_size=40))
def test_noise_gives_a_message_or_a_validation_error(kind, body):
    survives(kind, body)


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"\x00\x00",  # field number 0
        b"\x0b\x0c",  # a group, which nobody sends
        b"\x0e\x00",  # wire type 6
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a length of 2^63 - 1
        b"\x0a" + b"\xff" * 9 + b"\x01",  # a length of 2^64 - 1
        b"\xff" * 12,  # a tag without an end
        b"\x0d\x00",  # half a fixed32
        b"\x09\x00\x00\x00\x00",  # half a fixed64
    ],
)
def test_malformed_wire_data_is_refused(kind, body):
    assert not survives(kind, body)


def test_text_must_be_utf8():
    assert not survives("pass", b"\x0a\x02\xc3\x28")
    assert not survives("output", b"\x0a\x02\xc3\x28")


def test_fields_from_a_later_release_are_passed_over():
    """S8: unknown numbers of every wire type, in every message we read."""
    unknown = b"\xf8\x07\x01" + b"\xfa\x07\x01x" + b"\xf9\x07" + b"\0" * 8 + b"\xfd\x07\0\0\0\0"
    for kind, body in BODIES.items():
        decode = DECODERS[kind][0]
        assert decode(body + unknown) == decode(body)
