"""Reading a request keeps no other thread of the server from the interpreter's lock for long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tests.security.costly_requests import REQUESTS, as_sample, scored
from tests.support.lock_holds import is_held_less
from tinsmith.errors import TinkerError
from tinsmith.server.thread_turns import short_waits
from tinsmith.types.protocol import JSON
from tinsmith.wire.dialects import decode_pass

MAX_HOLD_SECONDS = 0.01
"""Most are below 3 ms; copying a text of 20 MB takes 5."""

FREES_MUCH = ("a zstd bomb that stays below the limit",)
"""Giving 255 MiB back to the system takes longer, and cannot be cut."""


def _sample(chunks: list[dict[str, Any]]) -> bytes:
    return orjson.dumps({"prompt": {"chunks": chunks}, "sampling_params": {}})


def _tensor(count: int) -> dict[str, Any]:
    return {"data": [0.123] * count, "dtype": "float32", "shape": [count]}


def _pass(num_datums: int, num_tokens: int) -> bytes:
    datum = {
        "model_input": {"chunks": [{"tokens": list(range(1000, 1000 + num_tokens))}]},
        "loss_fn_inputs": {"weights": _tensor(num_tokens), "advantages": _tensor(num_tokens)},
    }
    inputs = {"data": [datum] * num_datums, "loss_fn": "cross_entropy"}
    return orjson.dumps({"forward_backward_input": inputs, "model_id": "m", "seq_id": 1})


def as_json_pass(body: bytes) -> Any:
    return decode_pass(body, JSON)


LARGE: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]] = {
    "as many tokens as a request may have": (
        lambda: _sample([{"tokens": list(range(10**6, 10**6 + 1_300_000))}]),
        as_sample,
    ),
    "as many tokens, in many chunks": (
        lambda: _sample([{"tokens": list(range(1000, 2000))}] * 1300),
        as_sample,
    ),
    "many tokens, the last of which is none": (
        lambda: _sample([{"tokens": [*range(1000, 301_000), "x"]}]),
        as_sample,
    ),
    "an image of some megabytes": (
        lambda: _sample([{"type": "image", "format": "png", "data": "iVBO" * 5 * 2**20}]),
        as_sample,
    ),
    "a text of escapes": (lambda: _sample([{"tokens": "\n" * 5 * 2**20}]), as_sample),
    "nothing but white space": (lambda: b'{"a":' + b" " * 20 * 2**20 + b"1}", as_sample),
    "a table of numbers": (
        lambda: scored(orjson.dumps({"data": [[0.5] * 1000] * 1200, "dtype": "float32"})),
        as_sample,
    ),
    "a pass of many datums": (lambda: _pass(1024, 300), as_json_pass),
    "a pass of one long datum": (lambda: _pass(1, 400_000), as_json_pass),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LARGE, *(name for name in REQUESTS if name not in FREES_MUCH)])
def test_no_request_keeps_other_threads_waiting(name: str) -> None:
    make, decode = LARGE[name] if name in LARGE else REQUESTS[name][:2]
    body = make()

    def read() -> None:
        with contextlib.suppress(TinkerError):
            decode(body)

    assert is_held_less(read, MAX_HOLD_SECONDS)


def test_a_thread_that_computes_lets_others_run_after_half_a_millisecond() -> None:
    """In processor time of the one that computes, for as often as a heartbeat needs the lock."""
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute)
    with short_waits():
        thread.start()
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        try:
            before = time.clock_gettime(clock)
            for _ in range(20):
                time.sleep(0.0001)
            taken = time.clock_gettime(clock) - before
        finally:
            is_over.set()
            thread.join()
    assert taken < 0.05, "100 ms where each waits for five"
    assert sys.getswitchinterval() == 0.005
