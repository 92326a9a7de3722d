"""The keys of a data folder, read and changed whether or not a server runs on it.

A server that runs on the same data folder is told of a revocation at once; one on another machine,
with which only a database is shared, looks at its keys every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tinsmith.server.config import ServerConfig
from tinsmith.server.edge import auth
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.records import KeyRecord
from tinsmith.server.store.store import Store

T = TypeVar("T")


def create(
    config: ServerConfig, owner: str, name: str, note: str = "", seconds: float | None = None
) -> tuple[str, KeyRecord]:
    """A fresh key and its record. Only the hash is kept: this is the one time the key is seen."""
    return _with_store(
        config, lambda store: auth.create_key(store, owner, name, note, seconds=seconds)
    )


def list_keys(config: ServerConfig) -> Sequence[KeyRecord]:
    """All keys, those that were revoked too."""
    return _with_store(config, lambda store: store.keys.list())


def revoke(config: ServerConfig, key_id: int) -> bool:
    """False when there is no such key, or it is revoked already."""
    was_active = _with_store(config, lambda store: store.keys.revoke(key_id, time.time()))
    auth.note_key_change(config.data_dir)
    return was_active


def _with_store(config: ServerConfig, use: Callable[[Store], Awaitable[T]]) -> T:
    config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    url = config.database_url or sqlite_url(config.data_dir / "tinsmith.db")

    async def run() -> T:
        store = await asyncio.to_thread(Store, url, config.data_dir / "blobs")
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())
