"""The keys of a data folder, read and changed whether or not a server runs on it.

A server on the same data folder sees a change with its next request; one on another machine, with
which only the database is shared, within a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tinsmith.cli.server.local_server import with_store
from tinsmith.server.config import ServerConfig
from tinsmith.server.edge import auth
from tinsmith.server.store.records import KeyRecord


def create(
    config: ServerConfig, owner: str, name: str, note: str = "", seconds: float | None = None
) -> tuple[str, KeyRecord]:
    """A fresh key and its record. Only the hash is kept: this is the one time the key is seen."""
    return with_store(
        config, lambda store: auth.create_key(store, owner, name, note, seconds=seconds)
    )


def list_keys(config: ServerConfig) -> Sequence[KeyRecord]:
    """All keys, those that were revoked too."""
    return with_store(config, lambda store: store.keys.list())


def revoke(config: ServerConfig, key_id: int) -> bool:
    """False when there is no such key, or it is revoked already."""
    was_active = with_store(config, lambda store: store.keys.revoke(key_id, time.time()))
    auth.note_key_change(config.data_dir)
    return was_active
