"""What a refused request leaves in memory: nothing.

The server seldom searches for garbage (`server/garbage.py`), so an error that keeps the frames it
came through, and by them itself, keeps a large body for as long.
"""

from __future__ import annotations

import asyncio
import gc

import orjson
import pytest

from tests.support.in_process_server import Api
from tinsmith.errors import TinkerError
from tinsmith.server.edge.http import Refusal

TEXTS = {"sampling_params": {"stop": [f"stop {number}" for number in range(300_000)]}}


def errors() -> list[BaseException]:
    return [each for each in gc.get_objects() if issubclass(type(each), (TinkerError, Refusal))]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/asample", orjson.dumps(TEXTS), 413),  # decoded in a thread
        ("/asample", orjson.dumps(TEXTS)[:-1], 413),
        ("/asample", b'{"stop": ["' + b"x" * 2_000_000, 400),
        ("/asample", b"{}", 400),
        ("/forward_backward", b'{"model_id": "x"', 400),
        ("/create_session", b'{"tags": [' + b"[" * 100, 400),
    ],
)
async def test_the_error_of_a_refused_request_is_kept_by_nobody(
    api: Api, path: str, body: bytes, status: int
) -> None:
    gc.collect()
    others = {id(error): error for error in errors()}  # of other tests
    gc.disable()
    try:
        for _ in range(3):
            assert (await api.post(path, body)).status_code == status
        async with asyncio.timeout(30):  # until threads and event loop let go of what they did last
            while any(id(error) not in others for error in errors()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
