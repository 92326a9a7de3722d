"""The store: everything a server remembers, on SQLite or Postgres. Each subject is a part of it.

Every method that writes returns only after what it wrote is on disk; reads see all earlier writes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.account import Account
from tinsmith.server.store.blobs import INLINE_BYTES, BlobFiles, Blobs, FolderBlobs
from tinsmith.server.store.browsers import Browsers
from tinsmith.server.store.checkpoints import Checkpoints
from tinsmith.server.store.database import LOCK_SECONDS, Database
from tinsmith.server.store.fence import Fence
from tinsmith.server.store.identity import Identity
from tinsmith.server.store.keys import Keys
from tinsmith.server.store.log import Log
from tinsmith.server.store.losses import CustomLosses, LossBounds
from tinsmith.server.store.models import Models
from tinsmith.server.store.observing.curves import Curves
from tinsmith.server.store.observing.examples import Examples
from tinsmith.server.store.observing.steps import Steps
from tinsmith.server.store.retention import Retention
from tinsmith.server.store.samplers import Samplers
from tinsmith.server.store.sessions import Sessions
from tinsmith.server.store.weights import Weights
from tinsmith.server.store.writer import OnCommit, OpenWriter, Writer

R = TypeVar("R")


class Store:
    def __init__(
        self,
        url: str,
        blobs_in: Path | BlobFiles,
        on_commit: OnCommit = lambda seconds, writes: None,
        open_writer: OpenWriter = Writer,
        max_owner_bytes: int | None = None,
        max_example_bytes: int = 0,
        loss_bounds: LossBounds | None = None,
        fence: Fence | None = None,
        lock_seconds: float = LOCK_SECONDS,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """Opens the database, creating or migrating its tables as needed. Blocks; call it once.

        `blobs_in` is where large requests and results are kept: a folder, or what holds them.
        `max_owner_bytes` bounds what one owner's checkpoints and unnamed samplers take, and
        `max_example_bytes` what their examples take; `loss_bounds` do so for losses.
        `open_writer` says how writes are carried out, where that is not by a thread of their own.
        `fence` is of a server among several: nothing is written once another has taken over.
        A Postgres database that another server has is waited for, for `lock_seconds`. Requests and
        results above `inline_bytes` are kept beside the database.
        """
        self.database = Database(url, on_commit, open_writer, fence, lock_seconds)
        if isinstance(blobs_in, Path):
            blobs_in = FolderBlobs(blobs_in, self.database.in_thread)
        self.blobs = blobs = Blobs(blobs_in, inline_bytes)
        self.identity = Identity(self.database)
        self.keys = Keys(self.database)
        self.browsers = Browsers(self.database)
        self.sessions = Sessions(self.database)
        self.samplers = Samplers(self.database)
        self.models = Models(self.database, blobs)
        self.weights = Weights(self.database, max_owner_bytes)
        self.steps = Steps(self.database)
        self.curves = Curves(self.database)
        self.examples = Examples(self.database, max_example_bytes)
        self.log = Log(self.database, blobs, self.weights, self.steps, self.examples)
        self.retention = Retention(self.database, blobs)
        self.checkpoints = Checkpoints(self.database, self.weights)
        self.losses = CustomLosses(self.database, loss_bounds or LossBounds())
        self.account = Account(self.database)

    async def keep_others_out(self) -> None:
        """For the one server of this store. Tools that only read or add keys do without."""
        await self.database.keep_others_out()

    async def confirm(self) -> None:
        """Returns when this server is known to be the one that may write, and raises otherwise:
        files that were seen before are none of another server's."""
        await self.database.confirm()

    async def file_names(self) -> set[str]:
        """The weights, requests and results that the store expects in the data folder."""
        return {*await self.weights.ids(), *await self.log.blob_names()}

    async def set_back(self, reason: str) -> None:
        """End every session, and every operation that waits: this store was put in the place of a
        later one, and programs at work have seen answers that it does not know."""
        sessions, operations = schema.sessions, schema.operations

        def write(connection: sa.Connection) -> None:
            connection.execute(
                sa.update(sessions)
                .where(sessions.c.state == "active")
                .values(state="cancelled", finish_detail=reason)
            )
            connection.execute(
                sa.update(operations)
                .where(operations.c.status == "pending")
                .values(status="failed", finished_at=time.time(), error=reason, category="user")
            )

        await self.database.write(write)

    async def close(self) -> None:
        await self.database.close()


class Remembered(Generic[R]):
    """Records that were read, kept in memory: those used last, and none that has changed.

    Whoever changes a record says so afterwards. What was being read at that moment may be as it
    was before, and is not kept.
    """

    def __init__(
        self,
        read: Callable[[str], Awaitable[R | None]],
        most: int,
        size: Callable[[R], int] = lambda record: 1,
    ) -> None:
        """`read` gets a record from the store by its id; those are kept whose sizes, by default 1,
        are `most` together."""
        self._read = read
        self._most = most
        self._size = size
        self._kept: dict[str, tuple[R, int]] = {}
        """With their sizes, the one used last at the end."""
        self._total = 0
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, name: str, is_wanted: Callable[[R], bool]) -> R | None:
        """A record that is there and wanted; others are not kept."""
        num_changes = self._num_changes
        kept = self._kept.get(name)
        record = await self._read(name) if kept is None else kept[0]
        if record is None or not is_wanted(record):
            return None
        if num_changes == self._num_changes:
            self._drop(name)
            size = self._size(record) if kept is None else kept[1]
            self._kept[name] = record, size
            self._total += size
            while self._total > self._most:
                self._drop(next(iter(self._kept)))
        return record

    def changed(self, is_changed: Callable[[str, R], bool]) -> None:
        """Some records were changed in the store, or deleted."""
        self._num_changes += 1
        for name, (record, _) in list(self._kept.items()):
            if is_changed(name, record):
                self._drop(name)

    def forget(self, name: str) -> None:
        """One record was changed in the store, or deleted, or nobody will ask for it."""
        self._num_changes += 1
        self._drop(name)

    def _drop(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            self._total -= kept[1]
