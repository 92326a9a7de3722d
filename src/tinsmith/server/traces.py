"""A session's operations as a trace that browsers' trace viewers open (Chrome's event format).

Each model is a track and each operation a span on it, from its recording to its end: the time in
the queue is part of it.
"""

from __future__ import annotations

from typing import Any

from tinsmith.server.store.store import Store

_MICROSECONDS = 1_000_000


async def session_trace(store: Store, session_id: str) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for track, model in enumerate(await store.models.of_session(session_id)):
        events.append(
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": track,
                "args": {"name": model.model_id},
            }
        )
        for operation in await store.log.read(model.model_id, -1):
            end = operation.finished_at or operation.created_at
            events.append(
                {
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
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"session": session_id}}
