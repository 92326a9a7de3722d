"""Copies of vectors on the host, which a device need not wait for.

A copy from a GPU to the host takes longer than a step of a small model. So the vectors are copied
on the device first, which takes a moment, and come to the host beside what runs there next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Room:
    """Bytes of copies on devices together; others are made at once, and the device waits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        with self._lock:
            fits = self._num_bytes + num_bytes <= self._max_bytes
            self._num_bytes += num_bytes if fits else 0
            return fits

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


_ROOM = Room(1 << 30)


def begin_copies(
    vectors: Mapping[str, Tensor], room: Room = _ROOM
) -> Callable[[], dict[str, Tensor]]:
    """Copies of the vectors as they are now; what is returned fetches them, once, in any thread."""
    num_bytes = sum(vector.nbytes for vector in vectors.values())
    if all(vector.is_cuda for vector in vectors.values()) and room.take(num_bytes):
        with contextlib.suppress(torch.OutOfMemoryError):
            return _OnDevice(vectors, num_bytes, room).fetch
        room.give_back(num_bytes)
    copies = {name: vector.detach().to("cpu", copy=True) for name, vector in vectors.items()}
    return lambda: copies


class _OnDevice:
    def __init__(self, vectors: Mapping[str, Tensor], num_bytes: int, room: Room) -> None:
        self._copies = {name: vector.detach().clone() for name, vector in vectors.items()}
        self._device = next(iter(self._copies.values())).device
        self._are_made = torch.cuda.Event()
        self._are_made.record(torch.cuda.current_stream(self._device))
        self._room = room
        self._num_bytes = num_bytes

    def fetch(self) -> dict[str, Tensor]:
        # Graphs are captured on streams of the usual priority, which are given out again and again.
        stream = torch.cuda.Stream(self._device, priority=-1)
        stream.wait_event(self._are_made)
        with torch.cuda.stream(stream):
            found = {name: copy.to("cpu") for name, copy in self._copies.items()}
        stream.synchronize()
        self._copies.clear()
        return found

    def __del__(self) -> None:
        # Also where a save was given up, and nobody has fetched them.
        if "_num_bytes" in self.__dict__:
            self._room.give_back(self._num_bytes)
