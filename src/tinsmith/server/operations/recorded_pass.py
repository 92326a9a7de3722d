"""A pass as it is recorded: the request as it came, and the experts that its tokens go to.

Experts are not a function of the request: those of a sample are known for a while only. So they are
found once, before the pass is recorded, and stay with it; a pass that runs again, after any
death, goes to the same ones.

    length of the header (u32), header (JSON), the request's body, one array after another

A pass without experts is recorded as its body alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith.types import ForwardBackwardRequest, ForwardRequest
from tinsmith.wire import json

PassRequest = ForwardBackwardRequest | ForwardRequest

WITH_EXPERTS = "application/x-tinsmith-pass"
"""The content type, in the store alone, of a pass with experts; no client may send it."""

_LENGTH = struct.Struct("<I")
_DTYPES = {1: "<u1", 2: "<u2"}


@dataclass(frozen=True, slots=True)
class RecordedPass:
    request: PassRequest
    choices: tuple[np.ndarray | None, ...] = ()
    """For each datum the experts of its tokens, or None; empty where no datum has any."""


def encode(body: bytes, content_type: str, choices: Sequence[np.ndarray | None]) -> bytes:
    """What is recorded of a request that came as `body`, where some datum has experts."""
    arrays = {index: each for index, each in enumerate(choices) if each is not None}
    header = json.encode(
        {
            "content_type": content_type,
            "body": len(body),
            "datums": len(choices),
            "choices": [[index, each.itemsize, *each.shape] for index, each in arrays.items()],
        }
    )
    raw = [each.astype(_DTYPES[each.itemsize], copy=False).tobytes() for each in arrays.values()]
    return b"".join((_LENGTH.pack(len(header)), header, body, *raw))


def decode(recorded: bytes, decode_request: Callable[[bytes, str], PassRequest]) -> RecordedPass:
    """The other way round; `decode_request` reads a body of a content type."""
    (length,) = _LENGTH.unpack_from(recorded)
    end = _LENGTH.size + length
    header = json.parse(recorded[_LENGTH.size : end])
    start, end = end, end + header["body"]
    request = decode_request(recorded[start:end], header["content_type"])
    choices: list[np.ndarray | None] = [None] * header["datums"]
    for index, itemsize, *shape in header["choices"]:
        count = int(np.prod(shape))
        array = np.frombuffer(recorded, _DTYPES[itemsize], count, end).reshape(shape)
        choices[index] = array
        end += array.nbytes
    return RecordedPass(request, tuple(choices))
