"""The data folder: where things lie in it, its lock, and what it says of itself.

The lock is held as long as the process lives, by the system's own means, so a server that was
killed leaves nothing behind that the next one would have to clear away.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith import disk
from tinsmith.errors import TinkerError
from tinsmith.server.store.errors import ForeignStoreError
from tinsmith.server.store.records import IdentityRecord, NotedIdentity

logger = logging.getLogger(__name__)

_SHARED_DRAFT_SECONDS = 3600.0
"""A draft that is older is nobody's, where another server may be writing one now."""


class DataFolderInUseError(TinkerError):
    """Another server has the data folder."""


class DataFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "tinsmith.db"
        self.weights = root / "weights"
        self.blobs = root / "blobs"
        self.trash = root / "trash"
        self.uploads = root / "uploads"
        self.cache = root / "cache"
        """Copies of weights whose originals are in object storage."""
        self._identity = root / "identity.json"
        self._position = root / "position"
        self._is_position_noted = True
        """Whether the last position was written; only a change of this is logged."""

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
            self._sweep_drafts(time.time() - _SHARED_DRAFT_SECONDS if is_shared else math.inf)
            yield
        finally:
            os.close(descriptor)

    def _sweep_drafts(self, changed_before: float) -> None:
        """Remove files of the folder itself that were not written to the end."""
        for path in filter(disk.is_draft, [*self.root.iterdir()]):
            if path.is_file() and _changed_at(path) < changed_before:
                disk.discard_file(path)

    def identity(self) -> NotedIdentity | None:
        """What the folder says of itself; None when it was never bound to a store."""
        try:
            facts = json.loads(self._identity.read_text())
            return NotedIdentity(
                store_id=str(facts["store_id"]),
                epoch=int(facts["epoch"]),
                position=self._noted_position(),
                expected_epoch=int(facts.get("expected_epoch", 0)),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ForeignStoreError(
                f"the data folder {self.root}", f"{self._identity.name} is damaged ({error})"
            ) from None

    def expect_epoch(self, epoch: int) -> None:
        """Note, before the store counts up, how far. Nothing is noted in a folder that belongs to
        no store yet."""
        noted = self.identity()
        if noted is not None and epoch > noted.expected_epoch:
            self._publish_identity(noted.store_id, noted.epoch, epoch)

    def write_identity(self, identity: IdentityRecord) -> None:
        """Note how far the store has counted, unless a later epoch is there: a server that was
        stopped may come here when others have led since. Epoch 0 is a new identity, and begins at
        position 0, wherever the one before it was."""
        if identity.epoch == 0:
            disk.discard_file(self._position)
            self._publish_identity(identity.store_id, 0, 0)
            return
        noted = self.identity()
        if noted is None or noted.store_id != identity.store_id:
            self._publish_identity(identity.store_id, identity.epoch, 0)
        elif identity.epoch > noted.epoch:
            self._publish_identity(identity.store_id, identity.epoch, noted.expected_epoch)

    def _publish_identity(self, store_id: str, epoch: int, expected_epoch: int) -> None:
        facts: dict[str, str | int] = {"store_id": store_id, "epoch": epoch}
        if expected_epoch > epoch:
            facts["expected_epoch"] = expected_epoch
        disk.publish_file(self._identity, json.dumps(facts).encode())

    def names(self, changed_before: float | None = None) -> set[str]:
        """The weights, requests and results in the folder, by the names that a store knows; only
        those that were not changed since a moment, where one is given. What is deleted meanwhile
        is not among these."""
        found = [*self.blobs.glob("??/*")]
        if self.weights.exists():
            found += self.weights.iterdir()
        present = [path for path in found if not disk.is_draft(path)]
        if changed_before is None:
            return {path.name for path in present}
        return {path.name for path in present if _changed_at(path) <= changed_before}

    def blob(self, name: str) -> Path:
        """Where a request or result lies."""
        return self.blobs / name[:2] / name

    def blob_drafts(self) -> list[Path]:
        """Requests and results that were not written to the end, or are being written now."""
        return [*filter(disk.is_draft, self.blobs.glob("??/.*"))]

    def note_position(self, position: int) -> None:
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


def _changed_at(path: Path) -> float:
    """When a file or folder was changed; never before now, if it has gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
