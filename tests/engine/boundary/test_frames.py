"""Frames: values survive the crossing, whatever the sockets do to the bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.engine.local.boundary import frames
from tinsmith.errors import EngineError, TooLargeError


def joined(*values: object) -> bytes:
    return b"".join(piece for value in values for piece in frames.encode(value))


def decoded(stream: bytes, sizes: list[int], max_bytes: int = frames.MAX_FRAME_BYTES) -> list[Any]:
    """Feed `stream` to a decoder in bites of the given sizes, repeated as needed."""
    decoder = frames.Decoder(max_bytes=max_bytes)
    values: list[Any] = []
    position, turn = 0, 0
    while position < len(stream):
        space = decoder.space()
        assert len(space) > 0
        bite = min(sizes[turn % len(sizes)], len(space), len(stream) - position)
        space[:bite] = stream[position : position + bite]
        values += decoder.advance(bite)
        position += bite
        turn += 1
    return values


MESSAGE = {
    "tokens": np.arange(100_000, dtype=np.int32),
    "few": np.arange(3, dtype=np.float32),
    "none": np.zeros((0, 4), dtype=np.int64),
    "transposed": np.arange(4000.0).reshape(40, 100).T,
    "every other": np.arange(20_000)[::2],
    "text": "grüße",
}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name])
        if isinstance(value, np.ndarray):
            assert value.dtype == right[name].dtype


@given(sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_values_survive_any_division_of_the_stream(sizes: list[int]) -> None:
    small = ["a", 1, None]
    if max(sizes) < 50:
        sizes = [*sizes, 5000]
    first, second, third, fourth = decoded(joined(small, MESSAGE, small, MESSAGE), sizes)
    assert first == third == small
    assert_same(second, MESSAGE)
    assert_same(fourth, MESSAGE)


def test_many_small_frames_may_arrive_at_once() -> None:
    values = [(i, "x" * (i % 50)) for i in range(2000)]
    assert decoded(joined(*values), [1_000_000]) == values


def test_large_arrays_stay_in_the_memory_they_were_received_into() -> None:
    left = np.arange(50_000, dtype=np.float32)
    right = np.arange(60_000, dtype=np.int64)
    ((first, second),) = decoded(joined((left, right)), [1 << 20])
    assert not first.flags.owndata
    assert not second.flags.owndata
    distance = second.__array_interface__["data"][0] - first.__array_interface__["data"][0]
    # Aligned pieces of one block: nothing was copied out of it.
    assert distance == -(-left.nbytes // 64) * 64
    first[0] = 7  # and the block belongs to the receiver


def test_large_arrays_are_sent_from_the_memory_they_lie_in() -> None:
    array = np.arange(50_000)
    pieces = frames.encode({"a": array})
    assert any(
        isinstance(piece, memoryview) and np.shares_memory(np.frombuffer(piece, np.uint8), array)
        for piece in pieces
    )


def test_a_frame_above_the_limit_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(TooLargeError, match="at most 1000 are possible"):
        frames.encode(np.zeros(10_000), max_bytes=1000)


def test_a_frame_that_claims_too_much_breaks_the_stream_before_memory_is_taken() -> None:
    with pytest.raises(EngineError, match="stream to the engine process is broken"):
        decoded(joined(np.zeros(10_000)), [1 << 20], max_bytes=1000)


def test_bytes_that_are_no_frame_break_the_stream() -> None:
    with pytest.raises(EngineError, match="broken"):
        decoded(b"Traceback (most recent call last)", [1 << 20])


def test_a_blocking_end_reads_until_the_other_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            for value in (MESSAGE, 1, 2):
                frames.write(ours, frames.encode(value))
            ours.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        first, *rest = frames.read(theirs)
        thread.join()
    assert_same(first, MESSAGE)
    assert rest == [1, 2]


class Inbox:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def message_received(self, message: Any) -> None:
        self.messages.put_nowait(message)

    def channel_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)


async def test_a_channel_carries_frames_both_ways_in_order() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        inbox = Inbox()
        channel = await frames.Channel.open(ours, inbox)

        def echo() -> None:
            for value in frames.read(theirs):
                frames.write(theirs, frames.encode(value))

        echoing = asyncio.create_task(asyncio.to_thread(echo))
        for value in (1, MESSAGE, 2):
            channel.send(value)
        assert await inbox.messages.get() == 1
        assert_same(await inbox.messages.get(), MESSAGE)
        assert await inbox.messages.get() == 2
        channel.close()
        await echoing
        assert await inbox.lost is None


async def test_a_channel_says_when_the_stream_is_broken() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        inbox = Inbox()
        await frames.Channel.open(ours, inbox)
        theirs.sendall(b"Traceback (most recent call last)")
        assert isinstance(await inbox.lost, EngineError)
