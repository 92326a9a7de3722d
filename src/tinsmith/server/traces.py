"""A session's operations as a trace that browsers' trace viewers open (Chrome's event format).

Each model is a track and each operation a span on it, from its recording to its end: the time in
the queue is part of it. A long run has many of them, so the trace is streamed, model by model and
some operations at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tinsmith.server.store.records import OperationRecord
from tinsmith.server.store.store import Store
from tinsmith.wire import json

_MICROSECONDS = 1_000_000
_AT_ONCE = 500
"""Operations in one piece: some milliseconds' work."""


async def session_trace(store: Store, session_id: str) -> AsyncIterator[bytes]:
    head = json.encode({"displayTimeUnit": "ms", "otherData": {"session": session_id}})
    yield head[:-1] + b',"traceEvents":['
    separator = b""
    for track, model in enumerate(await store.models.of_session(session_id)):
        name = {"name": "thread_name", "ph": "M", "pid": 0, "tid": track}
        yield separator + json.encode({**name, "args": {"name": model.model_id}})
        separator = b","
        async for page in store.log.pages(model.model_id, -1):
            for first in range(0, len(page), _AT_ONCE):
                some = page[first : first + _AT_ONCE]
                yield b"".join(b"," + json.encode(_span(track, each)) for each in some)
                await asyncio.sleep(0)
    yield b"]}"


def _span(track: int, operation: OperationRecord) -> dict[str, Any]:
    end = operation.finished_at or operation.created_at
    return {
        "name": operation.kind,
        "ph": "X",
        "pid": 0,
        "tid": track,
        "ts": operation.created_at * _MICROSECONDS,
        "dur": (end - operation.created_at) * _MICROSECONDS,
        "args": {
            "seq_id": operation.seq_id,
            "request_id": operation.request_id,
            "status": operation.status,
            "tokens": operation.num_tokens,
        },
    }
