"""The data folder: where things lie in it, its lock, and which store it belongs to.

The lock is held as long as the process lives, by the system's own means, so a server that was
killed leaves nothing behind that the next one would have to clear away.

A store and its folder carry one random id, an epoch, which counts up while they are used, and the
number of commits. They are compared before a server touches either: a store that does not know what
is in the folder (a new one, another's, an older copy) must not take it for rubbish.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith import disk
from tinsmith.errors import TinkerError
from tinsmith.server.store.records import IdentityRecord
from tinsmith.server.store.store import Store

logger = logging.getLogger(__name__)

_ADOPT = "to use them together all the same: tinsmith storage adopt"


class DataFolderInUseError(TinkerError):
    """Another server has the data folder."""


class ForeignStoreError(TinkerError):
    """The database and the data folder do not belong together; the message says why."""


class DataFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "tinsmith.db"
        self.weights = root / "weights"
        self.blobs = root / "blobs"
        self.trash = root / "trash"
        self.uploads = root / "uploads"
        self._identity = root / "identity.json"
        self._position = root / "position"
        self._is_position_noted = True
        """Whether the last commit's was; what changes is said, not each commit."""

    def create(self) -> None:
        """Make the folder where there is none; it is for this user alone in any case."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)

    @contextmanager
    def locked(self, *, is_shared: bool = False) -> Iterator[None]:
        """Keep the data folder to ourselves, or to servers that share it."""
        self.create()
        file = self.root / "server.lock"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
                raise DataFolderInUseError(
                    f"another server (process {holder}) uses the data folder {self.root}; "
                    "stop it first, or give this one a folder of its own with --data-dir"
                ) from None
            os.ftruncate(descriptor, 0)
            if not is_shared:
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def check_belongs(self, store_id: str | None) -> None:
        """Refuse a store that another folder belongs to, while a server may be at work on both."""
        here = self.identity()
        if store_id is not None and (here is None or here.store_id != store_id):
            raise self._foreign("the database belongs to another data folder")

    async def check(self, store: Store) -> None:
        """Refuse a store that this folder does not belong to. Changes nothing."""
        ours, here = await store.identity.get(), self.identity()
        if here is None and (ours is None or ours.epoch == 0):
            await self._check_contents(store)
        elif here is None:
            if self.names() or await store.file_names():
                raise self._foreign("the database belongs to another data folder")
        elif ours is None:
            raise self._foreign("the database is new, and the folder belongs to another one")
        elif ours.store_id != here.store_id:
            raise self._foreign("each belongs to another one")
        elif ours.epoch < here.epoch or ours.position < here.position:
            raise self._foreign("the database is an older copy of the one last used here")
        elif ours.epoch > here.epoch + 1:
            raise self._foreign("the folder is an older copy of the one last used with it")

    async def bind(self, store: Store) -> None:
        """After `check`: the two belong together from here on."""
        if await store.identity.get() is None or self.identity() is None:
            await self.adopt(store)
        store.identity.count_commits(self._note_position)
        await self.advance(store)

    async def adopt(self, store: Store) -> None:
        """Give both a new identity, whatever they belonged to before; copies made until now of
        either are strangers to both."""
        fresh = IdentityRecord(store_id=uuid.uuid4().hex, epoch=0)
        await store.identity.put(fresh)
        disk.discard_file(self._position)
        self._write_identity(fresh)
        await self.advance(store)

    async def advance(self, store: Store) -> None:
        """Count up, so that copies made before this moment are told from what is here now.

        The database goes first: after a crash in between it is one ahead, never behind.
        """
        self._write_identity(await store.identity.advance())

    def identity(self) -> IdentityRecord | None:
        """What the folder says of itself; None when it was never bound to a store."""
        try:
            facts = json.loads(self._identity.read_text())
            return IdentityRecord(
                store_id=str(facts["store_id"]),
                epoch=int(facts["epoch"]),
                position=self._noted_position(),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign(f"{self._identity.name} is damaged ({error})") from None

    def names(self) -> set[str]:
        """The weights, requests and results in the folder, by the names that a store knows."""
        found = {f.name for f in self.blobs.glob("??/*")}
        if self.weights.exists():
            found |= {f.name for f in self.weights.iterdir()}
        return {name for name in found if not disk.is_draft(Path(name))}

    async def _check_contents(self, store: Store) -> None:
        """Before the first binding: do they look as if they belong together?"""
        here, known = self.names(), await store.file_names()
        if here and not known:
            raise self._foreign(f"the database knows none of the {len(here)} items in the folder")
        if known and not here & known:
            raise self._foreign(f"none of the {len(known)} items that the database knows is there")

    def _write_identity(self, identity: IdentityRecord) -> None:
        facts = {"store_id": identity.store_id, "epoch": identity.epoch}
        disk.publish_file(self._identity, json.dumps(facts).encode())

    def _note_position(self, position: int) -> None:
        """Called for each commit. Not synced: after a power cut the folder may know less than the
        store, or nothing, which is no mismatch."""
        was_noted = self._is_position_noted
        try:
            disk.mark(self._position, f"{position:020d}\n".encode())
            self._is_position_noted = True
        except OSError as error:
            self._is_position_noted = False
            if was_noted:
                logger.warning("an older copy of the database may not be noticed: %s", error)
        if self._is_position_noted and not was_noted:
            logger.info("an older copy of the database would be noticed again")

    def _noted_position(self) -> int:
        try:
            text = self._position.read_text(errors="replace").strip()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdecimal() else 0

    def _foreign(self, reason: str) -> ForeignStoreError:
        return ForeignStoreError(
            f"this database and the data folder {self.root} do not belong together: {reason}. "
            "Nothing was changed. Check --data-dir and --database-url, or restore both from one "
            f"backup; {_ADOPT}"
        )
