"""The trash: what was deleted on purpose, or has no record, waits here before it is removed.

It lies inside the data folder, so moving something here is a rename. What the server itself made
and let go of (a snapshot that a newer one replaced, an unnamed sampler whose session is over, a
request that a snapshot holds) does not come here: nobody could ask for it, and it would fill disks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith import disk

logger = logging.getLogger(__name__)

_FACTS = "entry.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrashEntry:
    entry_id: str
    name: str
    """What it was called in its folder."""
    moved_at: float
    reason: str
    size_bytes: int
    weights: dict[str, Any] | None = None
    """The fields of the record of the weights, where there was one."""

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """The fields of the checkpoint that it was, where it was one."""
        found: dict[str, Any] | None = (self.weights or {}).get("deleted_checkpoint")
        return found

    @property
    def owner(self) -> str | None:
        return None if self.checkpoint is None else str(self.checkpoint["owner"])


class Trash:
    def __init__(self, root: Path) -> None:
        self._root = root

    def announce(
        self, path: Path, reason: str, weights: dict[str, Any] | None = None
    ) -> TrashEntry:
        """Write down what is about to be moved here, so that it has its name whatever happens."""
        entry = TrashEntry(
            entry_id=uuid.uuid4().hex[:12],
            name=path.name,
            moved_at=time.time(),
            reason=reason,
            size_bytes=disk.size_of(path),
            weights=weights,
        )
        folder = self._root / entry.entry_id
        disk.create_folder(folder)
        facts = dataclasses.asdict(entry)
        disk.publish_file(folder / _FACTS, json.dumps(facts).encode())
        return entry

    def announced(self) -> dict[str, TrashEntry]:
        """What was announced and has not come, by its name."""
        return {e.name: e for e in self._all() if not self.content(e).exists()}

    def take_in(self, entry: TrashEntry, path: Path) -> None:
        """Move here what was announced."""
        disk.move(path, self.content(entry))
        logger.info("moved %s to the trash (%s): %s", path.name, entry.entry_id, entry.reason)

    def withdraw(self, entry: TrashEntry) -> None:
        """Forget an announcement, unless what it announced has come."""
        if not self.content(entry).exists():
            disk.discard_folder(self._root / entry.entry_id)

    def entries(self) -> list[TrashEntry]:
        """What is here, the newest first."""
        whole = [e for e in self._all() if self.content(e).exists()]
        return sorted(whole, key=lambda e: e.moved_at, reverse=True)

    def content(self, entry: TrashEntry) -> Path:
        return self._root / entry.entry_id / entry.name

    def take_out(self, entry: TrashEntry, to: Path) -> None:
        """Move something back."""
        disk.create_folder(to.parent)
        disk.move(self.content(entry), to)
        disk.discard_folder(self._root / entry.entry_id)

    def empty(self, moved_before: float, max_owner_bytes: int | None = None) -> int:
        """Delete for good what came before a moment, and the oldest of each owner beyond a size;
        how many there were. Only for whoever holds the folder's lock."""
        old = {e.entry_id for e in self.entries() if e.moved_at < moved_before}
        if max_owner_bytes is not None:
            old |= beyond(self.entries(), max_owner_bytes)
        for entry_id in old:
            logger.info("deleting %s from the trash", entry_id)
            disk.discard_folder(self._root / entry_id)
        return len(old)

    def sweep(self) -> None:
        """Remove what a move that did not end left behind. Only while nothing is moved here."""
        if self._root.exists():
            whole = {e.entry_id for e in self.entries()}
            for folder in self._root.iterdir():
                if folder.name not in whole and not _has_content(folder):
                    disk.discard_folder(folder)

    def _all(self) -> list[TrashEntry]:
        if not self._root.exists():
            return []
        found = [self._entry(folder) for folder in self._root.iterdir()]
        return [entry for entry in found if entry is not None]

    def _entry(self, folder: Path) -> TrashEntry | None:
        try:
            return TrashEntry(**json.loads((folder / _FACTS).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def beyond(entries: Sequence[TrashEntry], max_owner_bytes: int) -> set[str]:
    """The ids of each owner's oldest beyond a size; `entries` begin with the newest."""
    together: dict[str, int] = defaultdict(int)
    found = set()
    for entry in entries:
        if entry.owner is not None:
            together[entry.owner] += entry.size_bytes
            if together[entry.owner] > max_owner_bytes:
                found.add(entry.entry_id)
    return found


def _has_content(folder: Path) -> bool:
    return any(f.name != _FACTS and not disk.is_draft(f) for f in folder.iterdir())
