"""Small requests that would cost much, decoded one at a time in a process of its own.

    python costly_requests.py NAME

Prints the verdict, the processor time in seconds, and by how many bytes the process grew.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

import tinsmith.server.edge.app  # noqa: F401  # what a server has in memory anyway
from tinsmith.errors import TinkerError
from tinsmith.types import CreateCustomLossRequest, SampleRequest
from tinsmith.wire import dialects, zstd
from tinsmith.wire.limits import DEFAULT_LIMITS
from tinsmith.wire.operation_ids import ids_in
from tinsmith.wire.protobuf import varint

MILLION = 10**6
MB = MILLION
PROTO = "application/x-protobuf"


def as_pass(body: bytes) -> Any:
    ids_in(body, PROTO)
    return dialects.decode_pass(body, PROTO)


def as_sample(body: bytes) -> Any:
    return dialects.decode(SampleRequest, body)


def as_loss(body: bytes) -> Any:
    return dialects.decode(CreateCustomLossRequest, body).to_wire()


def as_zstd(body: bytes) -> Any:
    return zstd.decompress(body, max_bytes=DEFAULT_LIMITS.max_body_bytes)


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def prompt(*chunks: bytes) -> bytes:
    return b'{"prompt":{"chunks":[' + b",".join(chunks) + b']},"sampling_params":{}}'


def tokens(item: bytes, count: int) -> bytes:
    return prompt(b'{"tokens":[' + b",".join([item] * count) + b"]}")


def scored(tensor: bytes) -> bytes:
    return prompt(b'{"tokens":[1]}')[:-1] + b',"target_prompt_logprobs":' + tensor + b"}"


def announced(size: int, frame: bytes) -> bytes:
    """A frame that states another size: magic, descriptor (8 bytes of size, one segment), size."""
    parameters = zstandard.get_frame_parameters(frame)
    skipped = 4 + 1 + {False: 1, True: 0}[parameters.window_size == parameters.content_size] + 4
    return frame[:4] + b"\xe0" + size.to_bytes(8, "little") + frame[skipped:]


def loss_with(argument: bytes) -> bytes:
    node = b'{"op":"call_function","name":"a","target":"torch.abs","args":' + argument + b"}"
    head = b'{"session_id":"s","custom_loss_seq_id":0,"name":"l","inputs":[],'
    return head + b'"graph":{"nodes":[' + node + b"]}}"


CHUNK = field(1, field(1, field(1, b"\x01\0\0\0")))

REQUESTS: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any], int]] = {
    # What it is, how it is made, how it is decoded, and the most memory in MB that it may take.
    "a zstd frame that announces 8 GB": (
        lambda: announced(2**33, zstandard.compress(bytes(100 * MB))),
        as_zstd,
        5,
    ),
    "a zstd bomb that stays below the limit": (
        lambda: zstandard.compress(bytes(255 * 2**20)),
        as_zstd,
        280,
    ),
    "a zstd frame that unfolds to more than it says": (
        lambda: announced(1000, zstandard.compress(bytes(200 * MB))),
        as_zstd,
        5,
    ),
    "a million tiny chunks in protobuf": (
        lambda: field(3, field(2, field(1, CHUNK * MILLION))),
        as_pass,
        180,
    ),
    "a million tiny fields in protobuf": (lambda: b"\x18\x01" * MILLION, as_pass, 60),
    "a million tiny chunks in JSON": (
        lambda: prompt(*[b'{"tokens":[1]}'] * MILLION),
        as_sample,
        5,
    ),
    "thirty megabytes of whole numbers in JSON": (
        lambda: tokens(b"12345", 5 * MILLION),
        as_sample,
        400,
    ),
    "thirty megabytes of fractions in JSON": (
        lambda: tokens(b"1e-1", 6 * MILLION),
        as_sample,
        400,
    ),
    "thirty megabytes of texts in JSON": (lambda: tokens(b'"ab"', 6 * MILLION), as_sample, 5),
    "forty megabytes of JSON": (lambda: tokens(b"1", 20 * MILLION), as_sample, 5),
    "deep nesting of lists": (
        lambda: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        as_sample,
        8,
    ),
    "deep nesting of objects": (
        lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        as_sample,
        8,
    ),
    "nesting just below the parser's limit": (
        lambda: loss_with(b"[" * 1000 + b"]" * 1000),
        as_loss,
        20,
    ),
    "a tensor of a huge shape": (
        lambda: scored(b'{"data":[1],"dtype":"float32","shape":[1000000,1000000,1000000]}'),
        as_sample,
        5,
    ),
    "a tensor of very many dimensions": (
        lambda: scored(
            b'{"data":[1],"dtype":"float32","shape":[' + b",".join([b"1"] * MILLION) + b"]}"
        ),
        as_sample,
        60,
    ),
    "a sparse tensor that claims a huge dense one": (
        lambda: scored(
            b'{"data":[1],"dtype":"int64","shape":[1,9000000000000000000],'
            b'"sparse_crow_indices":[0,1],"sparse_col_indices":[0]}'
        ),
        as_sample,
        5,
    ),
    "a number of a million digits": (
        lambda: b'{"seq_id":' + b"9" * MILLION + b"}",
        as_sample,
        20,
    ),
    "half a million field names": (
        lambda: b"{" + b",".join(b'"f%d":1' % n for n in range(500_000)) + b"}",
        as_sample,
        150,
    ),
    "a field name half a million times": (
        lambda: b"{" + b",".join([b'"prompt":1'] * 500_000) + b"}",
        as_sample,
        60,
    ),
}


def memory_bytes(line: str) -> int:
    """A line of what Linux says about this process: VmRSS is now, VmHWM the most it has been."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line):
            return int(text.split()[1]) * 1024
    raise LookupError(line)


def main(name: str) -> None:
    make, decode, _ = REQUESTS[name]
    body = make()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the most that it has been
    before, began = memory_bytes("VmRSS"), time.process_time()
    try:
        decode(body)
        verdict = "accepted"
    except TinkerError:
        verdict = "refused"
    print(verdict, time.process_time() - began, memory_bytes("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1])
