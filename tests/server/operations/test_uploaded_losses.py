"""Uploaded losses: read once for many passes, another's never, and none that has been replaced."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from tinsmith.server.operations.uploaded_losses import UploadedLosses
from tinsmith.server.store import schema
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.records import CustomLossRecord
from tinsmith.server.store.store import Store

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer

LONG_AGO = 1000.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(sqlite_url(tmp_path / "store.db"), tmp_path / "blobs")
    yield store
    await store.close()


def _record(number: int, owner: str, target: str, num_bytes: int = 100) -> CustomLossRecord:
    return CustomLossRecord(
        loss_id=f"s:loss:{number}",
        request_id=f"{target} {number}",
        session_id="s",
        custom_loss_seq_id=number,
        owner=owner,
        name="n",
        definition={
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": [{"op": "output", "name": "o", "target": target}]},
        },
        num_bytes=num_bytes,
        created_at=LONG_AGO,
        used_at=LONG_AGO,
    )


def _num_reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    get = store.losses.get

    async def counted(loss_id: str) -> CustomLossRecord | None:
        read.append(loss_id)
        return await get(loss_id)

    monkeypatch.setattr(store.losses, "get", counted)
    return read


async def test_a_loss_is_read_once_for_all_its_passes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.losses.add(_record(0, "a", "output"))
    read = _num_reads(store, monkeypatch)
    losses = UploadedLosses(store.losses)
    first = await losses.get("s:loss:0", "a")
    assert first is not None and all([await losses.get("s:loss:0", "a") is first for _ in "12345"])
    assert read == ["s:loss:0"]


async def test_what_is_found_is_what_the_store_has_whatever_was_found_before(store: Store) -> None:
    """Owners upload, use and lose losses under a few numbers, in any order."""
    draw = random.Random(20)
    losses = UploadedLosses(store.losses, max_bytes=350)
    for step in range(400):
        number, owner = draw.randrange(6), draw.choice("ab")
        move = draw.random()
        if move < 0.2:
            num_bytes = draw.choice([100, 100, 400])
            await store.losses.add(_record(number, owner, f"version {step}", num_bytes))
        elif move < 0.25:
            await losses.note_use(f"s:loss:{number}", owner)
        elif move < 0.3:
            await store.database.execute(sa.update(schema.custom_losses).values(used_at=LONG_AGO))
        elif move < 0.4:
            await losses.delete_unused(LONG_AGO + 1)
        else:
            stored = await store.losses.get(f"s:loss:{number}")
            found = await losses.get(f"s:loss:{number}", owner)
            if stored is None or stored.owner != owner:
                assert found is None
            else:
                assert found is not None
                assert (
                    found.graph.nodes[0].target == stored.definition["graph"]["nodes"][0]["target"]
                )


async def test_many_losses_take_no_more_memory_than_a_few(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = _num_reads(store, monkeypatch)
    losses = UploadedLosses(store.losses, max_bytes=250)
    for number in range(6):
        await store.losses.add(_record(number, "a", "output", 300 if number == 5 else 100))
        await losses.get(f"s:loss:{number}", "a")
    read.clear()
    for number in (4, 3, 5, 2):
        await losses.get(f"s:loss:{number}", "a")
    assert read == ["s:loss:5", "s:loss:2"], "those used last stay, and none larger than all room"


async def test_a_use_is_written_once_in_a_while_and_names_of_nothing_are_not_remembered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.losses.add(_record(0, "a", "output"))
    written: list[tuple[str, str]] = []
    note_use = store.losses.note_use

    async def counted(loss_id: str, owner: str, at: float) -> bool:
        written.append((loss_id, owner))
        return await note_use(loss_id, owner, at)

    monkeypatch.setattr(store.losses, "note_use", counted)
    losses = UploadedLosses(store.losses)
    strange = [(name, "b") for name in ("s:loss:0", "s:loss:1", "\ud800", "x" * 10_000)]
    for name, owner in [*strange, ("s:loss:0", "a")] * 2:
        await losses.note_use(name, owner)
    assert written == [*strange, ("s:loss:0", "a"), *strange[1:]]
    found = await store.losses.get("s:loss:0")
    assert found is not None and found.used_at > LONG_AGO


async def test_a_pass_keeps_its_loss_and_a_full_owner_is_told_the_limit(
    start_server: StartServer,
) -> None:
    server = await start_server(custom_loss_server_side=True, key_max_losses=2)
    api, store = server.api, server.service.store
    session = await api.session()

    def body(session_id: str, number: int) -> dict[str, object]:
        record = _record(number, "a", "output")
        return {
            "session_id": session_id,
            "custom_loss_seq_id": number,
            "name": "n",
            **record.definition,
        }

    async def upload(user: Api, session_id: str, number: int) -> str:
        promise = await user.ok("/create_custom_loss", body(session_id, number))
        return str((await user.result(promise["request_id"]))["loss_id"])

    used, unused = [await upload(api, session, number) for number in range(2)]
    refused = await api.post("/create_custom_loss", body(session, 2))
    assert refused.status_code == 403
    assert refused.json()["detail"].startswith(
        "this owner has 2 uploaded losses, which is the most"
    )
    other = await server.other_user()
    await upload(other, await other.session(), 0)

    await store.database.execute(sa.update(schema.custom_losses).values(used_at=LONG_AGO))
    model = await api.model()
    request_id = await api.send_pass(model, 1, loss_fn="custom", loss_fn_config={"loss_id": used})
    error, category = await api.failure(request_id)
    assert "fake engine" in error and category == "user"
    await server.service.tidy_results()
    assert await store.losses.get(used) is not None
    assert await store.losses.get(unused) is None
    await upload(api, session, 2)
    request_id = await api.send_pass(model, 2, loss_fn="custom", loss_fn_config={"loss_id": unused})
    error, _ = await api.failure(request_id)
    assert error.startswith(f"no custom loss called {unused!r}") and "upload it again" in error
