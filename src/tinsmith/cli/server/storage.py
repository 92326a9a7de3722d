"""What a server's storage holds, and bringing back what was deleted; a server need not run.

Looking and restoring work beside a running server, which reads its store anew each time. Binding
a storage to a store, and emptying the trash, are for whoever holds the data folder's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.cli.server.local_server import with_store
from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.storage import binding, checking
from tinsmith.server.storage.checking import Findings
from tinsmith.server.storage.folder import is_weights
from tinsmith.server.storage.opening import open_storage
from tinsmith.server.store.errors import ForeignStoreError
from tinsmith.server.store.records import AuditRecord, CheckpointRecord, WeightsRecord
from tinsmith.server.store.store import Store
from tinsmith.server.trash import TrashEntry

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

    storage = open_storage(config)

    async def ask(store: Store) -> list[Room]:
        trash = await storage.trashed(store.file_names)
        blobs = [name for name in await storage.names() if not is_weights(name)]
        sizes = await storage.sizes(blobs)
        return [
            *(Room(*row) for row in await store.weights.room()),
            Room("requests and results", "", len(sizes), sum(sizes.values())),
            Room("trash", "", len(trash), sum(entry.size_bytes for entry in trash)),
        ]

    return with_store(config, ask)


def trashed(config: ServerConfig) -> Sequence[TrashEntry]:
    storage = open_storage(config)
    return with_store(config, lambda store: storage.trashed(store.file_names))


def empty_trash(config: ServerConfig) -> int:
    """Delete for good all that is in the trash; how many things that were."""
    storage = open_storage(config)

    async def empty(store: Store) -> int:
        await binding.check(storage, store)
        return await storage.empty_trash(time.time() + 1, None, store.file_names)

    with DataFolder(config.data_dir).locked():
        return with_store(config, empty)


def restore(config: ServerConfig, entry_id: str) -> str:
    """Bring back what an entry of the trash holds; what that is called now."""
    storage = open_storage(config)

    async def bring_back(store: Store) -> str:
        await binding.check(storage, store)
        entries = await storage.trashed(store.file_names)
        entry = next((e for e in entries if e.entry_id == entry_id), None)
        if entry is None:
            raise ValidationError(
                f"the trash has no entry {entry_id!r}; see: tinsmith storage trash"
            )
        name = await _enter(store, entry)
        await storage.take_out(entry)
        return name

    return with_store(config, bring_back)


def check(config: ServerConfig, *, reads: bool = True) -> Findings:
    """How a database and its storage differ."""
    storage = open_storage(config)

    async def compare(store: Store) -> Findings:
        await binding.check(storage, store)
        return await checking.check(storage, store, reads=reads)

    return with_store(config, compare)


def repair(config: ServerConfig) -> Findings:
    """Mark what is lost, put what is unknown into the trash; what that was. In a folder a server
    that runs may be writing what seems unknown."""
    storage = open_storage(config)

    async def mend(store: Store) -> Findings:
        await binding.check(storage, store)
        found = await checking.check(storage, store)
        await checking.repair(storage, store, found.faults)
        return found

    folder = DataFolder(config.data_dir)
    with contextlib.nullcontext() if storage.is_shared else folder.locked():
        return with_store(config, mend)


def adopt(config: ServerConfig) -> tuple[int, int]:
    """Bind the storage and the database to each other, whatever they belonged to before.

    How much of what the database knows is there, and how much is missing. What lies in the trash
    and is known to the database comes back. Sessions end: if the database is older than what its
    clients have seen, they must not go on as if it were not.
    """
    storage = open_storage(config)

    async def bind(store: Store) -> tuple[int, int]:
        await store.keep_others_out()
        try:
            await binding.check(storage, store)
        except ForeignStoreError:
            await store.set_back(_SET_BACK)
        await binding.adopt(storage, store)
        known, here = await store.file_names(), await storage.names()
        for entry in await storage.trashed(_nothing):
            if entry.name in known - here:
                await storage.take_out(entry)
        here = await storage.names()
        return len(known & here), len(known - here)

    with DataFolder(config.data_dir).locked():
        return with_store(config, bind)


async def _enter(store: Store, entry: TrashEntry) -> str:
    """Record in the store what an entry holds; the entry stays in the trash."""
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


async def _nothing() -> set[str]:
    return set()
