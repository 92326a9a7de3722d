"""The store: everything a server remembers, on SQLite or Postgres. Each subject is a part of it.

Every method that writes returns only after what it wrote is on disk; reads see all earlier writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinsmith.server.store.account import Account
from tinsmith.server.store.blobs import Blobs
from tinsmith.server.store.checkpoints import Checkpoints
from tinsmith.server.store.database import Database
from tinsmith.server.store.keys import Keys
from tinsmith.server.store.log import Log
from tinsmith.server.store.losses import CustomLosses
from tinsmith.server.store.models import Models
from tinsmith.server.store.samplers import Samplers
from tinsmith.server.store.sessions import Sessions
from tinsmith.server.store.weights import Weights


class Store:
    def __init__(
        self,
        url: str,
        blob_folder: Path,
        on_commit: Callable[[float, int], None] = lambda seconds, writes: None,
    ) -> None:
        """Opens the database, creating or migrating its tables as needed. Blocks; call it once.

        `on_commit` hears the seconds and the number of writes of every commit.
        """
        self.database = Database(url, on_commit)
        self._blobs = Blobs(blob_folder, self.database.in_thread)
        self.keys = Keys(self.database)
        self.sessions = Sessions(self.database)
        self.samplers = Samplers(self.database)
        self.models = Models(self.database, self._blobs)
        self.log = Log(self.database, self._blobs)
        self.weights = Weights(self.database)
        self.checkpoints = Checkpoints(self.database)
        self.losses = CustomLosses(self.database)
        self.account = Account(self.database)

    async def prepare(self) -> None:
        """For the one server of this store: keep others out, and clear away what a write that
        did not end left behind. Tools that only read or add keys do without."""
        await self.database.keep_others_out()
        await self._blobs.sweep(await self.log.blob_names())

    async def close(self) -> None:
        await self.database.close()
