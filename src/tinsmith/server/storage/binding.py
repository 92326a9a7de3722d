"""Which store a storage belongs to.

Both carry one random id, an epoch, which counts up while they are used, and the number of commits.
They are compared before a server touches either: a store that does not know what is in a storage (a
new one, another's, an older copy) must not delete it as unknown.
"""

from __future__ import annotations

import uuid

from tinsmith.server.storage.base import Storage
from tinsmith.server.store.errors import ForeignStoreError
from tinsmith.server.store.records import IdentityRecord
from tinsmith.server.store.store import Store


async def check(storage: Storage, store: Store) -> None:
    """Refuse a store that this storage does not belong to. Changes nothing."""
    # In this order: beside a server that counts up, the database is ahead and never behind.
    here = await storage.identity()
    ours = await store.identity.get()
    if here is None and (ours is None or ours.epoch == 0):
        await _check_contents(storage, store)
    elif here is None:
        if await storage.names() or await store.file_names():
            raise ForeignStoreError(
                storage.title, "the database belongs to another data folder or storage"
            )
    elif ours is None:
        raise ForeignStoreError(
            storage.title, "the database is new, and what is there belongs to another one"
        )
    elif ours.store_id != here.store_id:
        raise ForeignStoreError(
            storage.title,
            "the database belongs to another storage, and this storage to another database",
        )
    elif ours.epoch < here.epoch or ours.position < here.position:
        raise ForeignStoreError(
            storage.title, "the database is an older copy of the one last used here"
        )
    elif ours.epoch > max(here.epoch, here.expected_epoch) + 1 and not storage.is_shared:
        # Several servers count up and write that down in any order. One ahead is what a server of
        # an earlier release leaves, which counts up without a word before.
        raise ForeignStoreError(
            storage.title, "the folder is an older copy of the one last used with it"
        )


async def check_belongs(storage: Storage, store_id: str | None) -> None:
    """Refuse a store that another storage belongs to, while a server may be at work on both."""
    here = await storage.identity()
    if store_id is not None and (here is None or here.store_id != store_id):
        reason = "the database belongs to another data folder or storage"
        raise ForeignStoreError(storage.title, reason)


async def bind(storage: Storage, store: Store) -> None:
    """After `check`: the two belong together from here on."""
    if await store.identity.get() is None or await storage.identity() is None:
        if storage.is_shared:
            # Another server may be doing the same: both write the id that the database has.
            await store.identity.ensure(_fresh())
        else:
            await adopt(storage, store)
    store.identity.count_commits(storage.note_position)
    await advance(storage, store)


async def adopt(storage: Storage, store: Store) -> None:
    """Give both a new identity, whatever they belonged to before; earlier copies of either no
    longer fit."""
    fresh = _fresh()
    await store.identity.put(fresh)
    await storage.write_identity(fresh)
    await advance(storage, store)


async def advance(storage: Storage, store: Store) -> None:
    """Count up, so that copies made before this moment are told from what is here now.

    The storage is told before and after. However many servers die in between, one after another,
    the database is never behind the storage, nor ahead of what the storage was told to expect.
    """
    present = await store.identity.get()
    assert present is not None, "a store is bound before it counts up"
    await storage.expect_epoch(present.epoch + 1)
    await storage.write_identity(await store.identity.advance())


async def _check_contents(storage: Storage, store: Store) -> None:
    """Before the first binding: do they look as if they belong together?"""
    here, known = await storage.names(), await store.file_names()
    if here and not known:
        raise ForeignStoreError(
            storage.title, f"the database knows none of the {len(here)} items that are there"
        )
    if known and not here & known:
        raise ForeignStoreError(
            storage.title, f"none of the {len(known)} items that the database knows is there"
        )


def _fresh() -> IdentityRecord:
    return IdentityRecord(store_id=uuid.uuid4().hex, epoch=0)
