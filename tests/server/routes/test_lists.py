"""Lists for which the protocol has no pages: whole, in parts, or refused with a cure."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tinsmith.server.edge.lists import LONGEST_LIST
from tinsmith.server.store import schema
from tinsmith.server.store.database import row_of
from tinsmith.server.store.records import AuditRecord, CheckpointRecord, UsageRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.in_process_server import TestServer

    Fill = Callable[[TestServer, int], Awaitable[tuple[str, str, dict[str, str]]]]

HOUR = 473064
WHEN = {"starting_on": "2023-12-17T00:00:00Z", "ending_before": "2023-12-31T00:00:00Z"}


async def _insert(server: TestServer, table: sa.Table, rows: list[Any]) -> None:
    database = server.service.store.database
    await database.execute_many(sa.insert(table), [row_of(row) for row in rows])


async def fill_audit(server: TestServer, number: int) -> tuple[str, str, dict[str, str]]:
    entries = [
        AuditRecord(owner="owner", at=100.0 + n, area="checkpoints", event=f"e{n}", details={})
        for n in range(number)
    ]
    await _insert(server, schema.audit, entries)
    return "/audit", "entries", {"event_type": "checkpoints"}


async def fill_usage(server: TestServer, number: int) -> tuple[str, str, dict[str, str]]:
    usage = [
        UsageRecord(
            owner="owner",
            hour=HOUR,
            base_model="m",
            session_id=f"s{n}",
            kind="training",
            count=n,
        )
        for n in range(number)
    ]
    await _insert(server, schema.usage, usage)
    return "/billing/usage/events", "data", WHEN


async def fill_checkpoints(server: TestServer, number: int) -> tuple[str, str, dict[str, str]]:
    run = await server.api.model()
    checkpoints = [_checkpoint(run, f"weights/{n}", 100.0 + n) for n in range(number)]
    await _insert(server, schema.checkpoints, checkpoints)
    return f"/training_runs/{run}/checkpoints", "checkpoints", {}


def _checkpoint(run: str, checkpoint_id: str, at: float, **more: Any) -> CheckpointRecord:
    return dataclasses.replace(
        CheckpointRecord(
            model_id=run,
            checkpoint_id=checkpoint_id,
            owner="owner",
            checkpoint_type="training",
            weights_id="w",
            size_bytes=7,
            created_at=at,
        ),
        **more,
    )


@pytest.mark.parametrize("fill", [fill_audit, fill_usage, fill_checkpoints])
async def test_a_long_list_comes_whole_or_in_parts_and_never_cut(
    server: TestServer, fill: Fill
) -> None:
    path, name, query = await fill(server, LONGEST_LIST)
    whole = (await server.api.get(path, **query)).json()[name]
    assert len(whole) == LONGEST_LIST
    parts = [
        (await server.api.get(path, **query, limit=4000, offset=offset)).json()[name]
        for offset in (0, 4000, 8000, 12000)
    ]
    assert [len(part) for part in parts] == [4000, 4000, 2000, 0]
    assert [item for part in parts for item in part] == whole


@pytest.mark.parametrize("fill", [fill_audit, fill_usage, fill_checkpoints])
async def test_a_list_that_is_too_long_is_refused_with_what_to_do(
    server: TestServer, fill: Fill
) -> None:
    path, name, query = await fill(server, LONGEST_LIST + 1)
    refused = await server.api.get(path, **query)
    assert refused.status_code == 400
    assert f"there are more than {LONGEST_LIST}" in refused.json()["detail"]
    assert "limit and offset" in refused.json()["detail"]
    last = await server.api.get(path, **query, limit=1, offset=LONGEST_LIST)
    assert len(last.json()[name]) == 1
    assert (await server.api.get(path, **query, limit=LONGEST_LIST + 1)).status_code == 400


async def test_the_metadata_in_a_long_list_has_a_bound(server: TestServer) -> None:
    api, note = server.api, {"user_metadata": {"a": "x" * 60_000}}
    record = await server.service.store.sessions.get(await api.session(**note))
    assert record is not None
    run = await api.model()
    more = [dataclasses.replace(record, session_id=f"s{n}") for n in range(300)]
    await _insert(server, schema.sessions, more)
    checkpoints = [_checkpoint(run, f"weights/{n}", 100.0 + n, **note) for n in range(300)]
    await _insert(server, schema.checkpoints, checkpoints)
    of_run: tuple[str, str, dict[str, str]] = f"/training_runs/{run}/checkpoints", "checkpoints", {}
    for path, name, query in (await fill_usage(server, 300), of_run):
        refused = await api.get(path, **query)
        assert refused.status_code == 400
        assert "ask for a part with limit and offset" in refused.json()["detail"]
        part = (await api.get(path, **query, limit=200)).json()
        assert len(part[name]) == 200 and len(str(part)) > 200 * 60_000


async def test_a_run_shows_the_newest_checkpoints_that_have_not_expired(server: TestServer) -> None:
    api = server.api
    run = await api.model()
    await _insert(
        server,
        schema.checkpoints,
        [
            _checkpoint(run, "weights/old", 100.0),
            _checkpoint(run, "weights/new", 200.0),
            _checkpoint(run, "weights/expired", 300.0, expires_at=time.time() - 5),
            _checkpoint(run, "sampler_weights/a", 50.0, checkpoint_type="sampler"),
        ],
    )
    shown = (await api.get(f"/training_runs/{run}")).json()
    assert shown["last_checkpoint"]["checkpoint_id"] == "weights/new"
    assert shown["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/a"
    found = await api.ok("/sessions/search", {"session_id": run.partition(":")[0]})
    (summary,) = found["sessions"]
    assert summary["checkpoints_count"] == 4 and summary["checkpoint_storage_bytes"] == 28
