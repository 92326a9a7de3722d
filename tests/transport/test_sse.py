"""Server-sent events come out the same however the stream is cut."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import TooLargeError
from tinsmith.transport.sse import Event, EventDecoder, events

STREAM = (
    b"\xef\xbb\xbfevent: token\r\n"
    b'data: {"text": "gr\xc3\xbc\xc3\x9fe \xf0\x9f\x98\x80"}\r\n'
    b"\r\n"
    b": a comment\n"
    b"id: 7\n"
    b"data: one\n"
    b"data:two\n"
    b"data\n"
    b"\n"
    b"event: nothing\n"
    b"\n"
    b"retry: 10\rdata: by carriage return\r\r"
    b"data:  two blanks\n\n"
    b"data: cut off"
)
EXPECTED = [
    Event('{"text": "grüße 😀"}', "token", ""),
    Event("one\ntwo\n", "message", "7"),
    Event("by carriage return", "message", "7"),
    Event(" two blanks", "message", "7"),
]


def decode(*pieces: bytes) -> list[Event]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def test_the_stream_in_one_piece() -> None:
    assert decode(STREAM) == EXPECTED


def test_every_pair_of_cuts_gives_the_same_events() -> None:
    """S91: inside UTF-8 and CR LF, too."""
    for first in range(len(STREAM) + 1):
        for second in range(first, len(STREAM) + 1):
            assert decode(STREAM[:first], STREAM[first:second], STREAM[second:]) == EXPECTED


def test_byte_by_byte() -> None:
    """S91"""
    assert decode(*(bytes([byte]) for byte in STREAM)) == EXPECTED


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cuts_at_all(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(edges)]
    assert decode(*pieces) == EXPECTED


def test_events_come_as_soon_as_they_are_complete() -> None:
    decoder = EventDecoder()
    assert list(decoder.feed(b"data: x\r\n\r")) == [Event("x")]
    assert list(decoder.feed(b"\ndata: y\n")) == []
    assert list(decoder.feed(b"\n")) == [Event("y")]


async def test_a_long_stream_takes_constant_memory() -> None:
    """S92"""
    piece = b"data: " + b"x" * 1000 + b"\n\n"

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(20_000):
            yield piece

    tracemalloc.start()
    count = 0
    async for event in events(pieces()):
        count += len(event.data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 20_000_000 and peak < 200_000


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 50 + b"\n", b"y" * 50])
def test_an_endless_event_is_refused(piece: bytes) -> None:
    decoder = EventDecoder(max_event_bytes=1000)
    with pytest.raises(TooLargeError, match="1000"):
        for _ in range(100):
            list(decoder.feed(piece))
