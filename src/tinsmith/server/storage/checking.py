"""Comparing a store with its storage, both ways, and saying so in the store.

Looking changes nothing. Repairing deletes nothing: what the store does not know goes to the trash,
and what it knows but can no longer be read is marked as lost, so that requests for it are told why.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tinsmith.server.storage.base import Storage
from tinsmith.server.store.errors import StoreDamagedError
from tinsmith.server.store.records import WeightsRecord
from tinsmith.server.store.store import Store

_YOUNG_SECONDS = 3600.0
"""What is newer may be about to get its record from a server that runs."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in which a store and its storage differ."""

    kind: Literal["missing", "damaged", "unknown", "found"]
    """Found is what was marked as lost and is whole again."""
    name: str
    """Of the weights, request or result."""
    detail: str


@dataclass(frozen=True, slots=True)
class Findings:
    num_known: int
    """How many things there should be."""
    faults: Sequence[Fault]


async def check(storage: Storage, store: Store, *, reads: bool = True) -> Findings:
    """Compare both; without `reads` names and sizes alone, which is quick."""
    here = await storage.names()
    known = await store.file_names()
    weights = {record.weights_id: record for record in await store.weights.all()}
    sizes = await storage.sizes(known & here)
    faults = []
    for name in sorted(known):
        record = weights.get(name)
        if name not in here:
            fault = Fault("missing", name, f"it is not in {storage.title}")
        elif problem := await _damage(storage, store, name, record, sizes[name], reads):
            fault = Fault("damaged", name, problem)
        elif reads and record is not None and record.lost is not None:
            fault = Fault("found", name, "it was marked as lost and is whole")
        else:
            continue
        if fault.kind == "found" or record is None or record.lost is None:
            faults.append(fault)
    # What the server has let go of meanwhile is no fault, and neither is what has just come.
    still = await store.file_names()
    faults = [fault for fault in faults if fault.name in still]
    in_trash = {entry.name for entry in await storage.trashed(store.file_names)}
    for name in sorted(await storage.names(time.time() - _YOUNG_SECONDS) - still - in_trash):
        faults.append(Fault("unknown", name, "the store has no record of it"))
    return Findings(len(known), faults)


async def repair(storage: Storage, store: Store, faults: Sequence[Fault]) -> None:
    """Mark what is lost, and put what is unknown into the trash."""
    await storage.put_in_trash([fault.name for fault in faults if fault.kind == "unknown"])
    for fault in faults:
        reason = f"{fault.name} is {fault.kind}: {fault.detail}"
        if fault.kind == "found":
            await store.weights.mark_lost(fault.name, None)
        elif fault.kind != "unknown":
            await store.weights.mark_lost(fault.name, reason)
            await store.log.mark_lost(fault.name, reason)


async def _damage(
    storage: Storage, store: Store, name: str, weights: WeightsRecord | None, size: int, reads: bool
) -> str | None:
    """What is wrong with something that is there; None when nothing is."""
    if weights is None:
        try:
            await store.blobs.read(name) if reads else None
        except StoreDamagedError as error:
            return str(error)
        return None
    if size != weights.size_bytes:
        return f"it has {size} bytes instead of {weights.size_bytes}"
    if reads and weights.files is not None:  # an earlier release wrote down the size alone
        found = await storage.describe(name)
        for file, expected in weights.file_records.items():
            if found.get(file) != expected:
                return f"{file}: " + ("its checksum differs" if file in found else "it is missing")
    return None
