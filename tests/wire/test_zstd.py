"""Compressed bodies: one frame of stated size, and nothing that unfolds beyond its limit."""

from __future__ import annotations

import base64
import random
import tracemalloc

import pytest
import zstandard

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.wire import zstd

BODY = b"tokens and tensors " * 1000


def test_compression_round_trips_and_is_one_frame_of_stated_size():
    frame = zstd.compress(BODY)
    assert zstd.decompress(frame, max_bytes=len(BODY)) == BODY
    assert zstandard.get_frame_parameters(frame).content_size == len(BODY)
    assert zstd.decompress(zstd.compress(b""), max_bytes=0) == b""


def lying(size: int) -> bytes:
    """A frame of `BODY` whose header announces another size."""
    frame = bytearray(zstd.compress(BODY))
    assert frame[4] >> 6 == 1, "the size is in a two-byte field, less 256"
    frame[5:7] = (size - 256).to_bytes(2, "little")
    return bytes(frame)


FRAMES: dict[str, bytes] = {
    "nothing": b"",
    "no frame": b"not compressed at all",
    "the magic alone": b"\x28\xb5\x2f\xfd",
    "a frame that unfolds to more than it says": lying(300),
    "a frame that unfolds to less than it says": lying(len(BODY) + 1),
    "bytes after the frame": zstd.compress(BODY) + b"x",
    "a second frame": zstd.compress(BODY) * 2,
    "a frame that hides its size": zstandard.ZstdCompressor(write_content_size=False).compress(
        BODY
    ),
    "a skippable frame": b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",
    "gzip": base64.b64decode("H4sIAAAAAAAAA0vMKQYAVGeD/wMAAAA="),
    "a frame for a dictionary": b"\x28\xb5\x2f\xfd\x61\x07\x00\x00" + zstd.compress(BODY)[6:],
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_wrong_frame_is_refused(name):
    with pytest.raises(ValidationError):
        zstd.decompress(FRAMES[name], max_bytes=1 << 20)


def test_every_truncated_frame_is_refused():
    frame = zstd.compress(BODY)
    for end in range(len(frame)):
        with pytest.raises(ValidationError):
            zstd.decompress(frame[:end], max_bytes=1 << 20)


def test_a_damaged_frame_gives_a_body_or_a_validation_error():
    rng = random.Random(0)
    frame = zstd.compress(BODY)
    for _ in range(2_000):
        damaged = bytearray(frame)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            unfolded = zstd.decompress(bytes(damaged), max_bytes=1 << 20)
        except ValidationError:
            continue
        assert len(unfolded) <= 1 << 20


def test_a_decompression_bomb_is_refused_by_its_header():
    bomb = zstd.compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match=rf"{64 << 20} bytes.*{1 << 20}"):
            zstd.decompress(bomb, max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_that_announces_the_largest_size_is_refused():
    huge = b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + b"\xfe" + b"\xff" * 7 + b"\x01\x00\x00"
    with pytest.raises(TooLargeError, match="limit"):
        zstd.decompress(huge, max_bytes=1 << 20)
