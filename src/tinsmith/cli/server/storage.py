"""What a data folder holds, and bringing back what was deleted; a server need not run.

Looking and restoring work beside a running server, which reads its store anew each time. Binding
a folder to a store, and emptying the trash, are for whoever holds the folder's lock.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith import disk
from tinsmith.cli.server.local_server import with_store
from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder, ForeignStoreError
from tinsmith.server.store.records import AuditRecord, CheckpointRecord, WeightsRecord
from tinsmith.server.store.store import Store
from tinsmith.server.trash import Trash, TrashEntry

_SET_BACK = (
    "the service's database was replaced by another, perhaps older one, and this run may have been "
    "set back; begin a new one from a checkpoint"
)


@dataclass(frozen=True, slots=True)
class Room:
    """What takes room on the disk, and why."""

    what: str
    owner: str
    count: int
    num_bytes: int


def room(config: ServerConfig) -> list[Room]:
    """What takes room, by owner where it has one."""

    async def ask(store: Store) -> list[Room]:
        return [Room(*row) for row in await store.weights.room()]

    folder, trash = DataFolder(config.data_dir), _trash(config).entries()
    blobs = [*folder.blobs.glob("??/*")]
    return [
        *with_store(config, ask),
        Room("requests and results", "", len(blobs), sum(map(disk.size_of, blobs))),
        Room("trash", "", len(trash), sum(entry.size_bytes for entry in trash)),
    ]


def trashed(config: ServerConfig) -> Sequence[TrashEntry]:
    return _trash(config).entries()


def empty_trash(config: ServerConfig) -> int:
    """Delete for good all that is in the trash; how many things that were."""
    with DataFolder(config.data_dir).locked():
        return _trash(config).empty(time.time() + 1)


def restore(config: ServerConfig, entry_id: str) -> str:
    """Bring back what an entry of the trash holds; what that is called now."""
    folder, trash = DataFolder(config.data_dir), _trash(config)
    entry = next((e for e in trash.entries() if e.entry_id == entry_id), None)
    if entry is None:
        raise ValidationError(f"the trash has no entry {entry_id!r}; see: tinsmith storage trash")

    async def bring_back(store: Store) -> str:
        await folder.check(store)
        name = await _enter(store, entry)
        trash.take_out(entry, folder.weights / entry.name)
        return name

    return with_store(config, bring_back)


def adopt(config: ServerConfig) -> tuple[int, int]:
    """Bind the data folder and the database to each other, whatever they belonged to before.

    How much of what the database knows is there, and how much is missing. What lies in the trash
    and is known to the database comes back. Sessions end: if the database is older than what its
    clients have seen, they must not go on as if it were not.
    """
    folder, trash = DataFolder(config.data_dir), _trash(config)

    async def bind(store: Store) -> tuple[int, int]:
        await store.keep_others_out()
        try:
            await folder.check(store)
        except ForeignStoreError:
            await store.set_back(_SET_BACK)
        await folder.adopt(store)
        known = await store.file_names()
        weights = set(await store.weights.ids())
        for entry in trash.entries():
            if entry.name in weights and entry.name not in folder.names():
                trash.take_out(entry, folder.weights / entry.name)
        here = folder.names()
        return len(known & here), len(known - here)

    with folder.locked():
        return with_store(config, bind)


async def _enter(store: Store, entry: TrashEntry) -> str:
    """Make the store know what an entry holds; it goes on to lie in the trash."""
    if await store.weights.get(entry.name) is not None:
        return f"weights {entry.name}"
    if entry.weights is None or entry.checkpoint is None:
        raise ValidationError(
            f"nothing is known of {entry.name} but its files, so it cannot become a checkpoint; "
            "copy them from the trash, or start with the database that knows it"
        )
    now = time.time()
    checkpoint = CheckpointRecord(**entry.checkpoint)
    if checkpoint.expires_at is not None and checkpoint.expires_at <= now:
        checkpoint = dataclasses.replace(checkpoint, expires_at=None)
    if await store.checkpoints.get(checkpoint.model_id, checkpoint.checkpoint_id) is not None:
        raise ValidationError(
            f"there is another checkpoint {checkpoint.tinker_path} by now; delete that one first"
        )
    weights = WeightsRecord(**{**entry.weights, "deleted_checkpoint": None})
    audit = AuditRecord(
        owner=checkpoint.owner,
        at=now,
        area="checkpoints",
        event="checkpoint_restored",
        model_id=checkpoint.model_id,
        tinker_path=checkpoint.tinker_path,
    )
    await store.checkpoints.restore(checkpoint, weights, audit)
    return checkpoint.tinker_path


def _trash(config: ServerConfig) -> Trash:
    return Trash(DataFolder(config.data_dir).trash)
