"""Small protobuf bodies that name a great many things are refused in little time and memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinsmith.errors import TooLargeError
from tinsmith.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
    TensorData,
)
from tinsmith.wire import proto
from tinsmith.wire.limits import Limits

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "pass": proto.decode_pass,
    "output": proto.decode_output,
    "sample": proto.decode_sample,
}


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def nested(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def measured(decode: Callable[[], Any]) -> tuple[float, int]:
    """Seconds and peak traced bytes of a decoding that must be refused as too large."""
    start = time.process_time()
    with pytest.raises(TooLargeError, match=r"\d"):
        decode()
    seconds = time.process_time() - start
    if seconds > 1.5:
        return seconds, 0  # tracing would take minutes
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError):
            decode()
        return seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MANY = 600_000
FLOODS: dict[str, tuple[str, bytes]] = {
    "datums": ("pass", b"\x1a\x00" * MANY),
    "chunks in one datum": ("pass", nested(3, b"\x0a\x02\x0a\x00" * MANY)),
    "tensors in one datum": (
        "pass",
        nested(
            3, b"".join(nested(2, nested(1, b"%d" % i) + b"\x12\x02\x18\x01") for i in range(500))
        ),
    ),
    "runs in one datum": ("pass", nested(3, b"\x1a\x07\x12\x05\x0a\x01s\x18\x01" * MANY)),
    "settings": ("pass", nested(5, b"\x0a\x01a") * MANY),
    "unknown fields": ("pass", b"\x78\x01" * MANY),
    "dimensions": ("pass", nested(3, nested(2, nested(2, b"\x18\x01" + b"\x20\x01" * MANY)))),
    "packed dimensions": (
        "pass",
        nested(3, nested(2, nested(2, b"\x18\x01" + nested(4, b"\x01" * MANY)))),
    ),
    "datums in a record": ("output", nested(2, b"\x18" + varint(2**40))),
    "datums over many records": ("output", nested(2, b"\x18" + varint(16_000)) * 1000),
    "records": ("output", b"\x12\x02\x18\x01" * MANY),
    "metrics": (
        "output",
        b"".join(nested(3, nested(1, b"%d" % i)) for i in range(10_000)),
    ),
    "sequences": ("sample", b"\x0a\x00" * MANY),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_tiny_parts_is_refused_in_little_time_and_memory(name):
    kind, body = FLOODS[name]
    seconds, peak = measured(lambda: DECODERS[kind](body))
    assert seconds < 1.5
    assert peak < 64 * 2**20


def test_a_body_above_the_limit_is_refused_before_it_is_read():
    with pytest.raises(TooLargeError, match=r"33.*limit is 32"):
        proto.decode_pass(b"\0" * 33, Limits(max_body_bytes=32))


CUBE = TensorData.dense(np.zeros(8, dtype=np.float32), [2, 2, 2])


def test_a_tensor_in_a_pass_has_no_more_dimensions_than_the_caller_allows() -> None:
    data = [Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": CUBE})]
    inputs = ForwardBackwardInput(data, "cross_entropy")
    body = proto.encode_pass(ForwardBackwardRequest(inputs, "m", 1))
    assert proto.decode_pass(body, Limits(max_tensor_rank=3))
    with pytest.raises(TooLargeError, match="more than 2 dimensions"):
        proto.decode_pass(body, Limits(max_tensor_rank=2))


def test_an_output_has_no_more_dimensions_or_datums_than_the_caller_allows() -> None:
    body = proto.encode_output(ForwardBackwardOutput("ArrayRecord", [{"x": CUBE}] * 5, {}))
    assert proto.decode_output(body, Limits(max_tensor_rank=3, max_datums=5))
    with pytest.raises(TooLargeError, match="more than 2 dimensions"):
        proto.decode_output(body, Limits(max_tensor_rank=2))
    with pytest.raises(TooLargeError, match="more than 4 datums"):
        proto.decode_output(body, Limits(max_datums=4))
    without_fields = nested(2, b"\x18\x05")
    assert len(proto.decode_output(without_fields, Limits(max_datums=5)).loss_fn_outputs) == 5
    with pytest.raises(TooLargeError, match="the limit is 4"):
        proto.decode_output(without_fields, Limits(max_datums=4))
