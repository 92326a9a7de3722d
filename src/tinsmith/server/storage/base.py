"""The interface of a storage.

The database says what there should be, a storage holds the bytes. Engines read and write folders
of this machine whatever the storage is. Nothing here is changed once it has its name; it only
comes and goes, so several servers may share a storage that says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from tinsmith.disk import FileRecord
from tinsmith.server.store.records import IdentityRecord, NotedIdentity, WeightsRecord
from tinsmith.server.trash import TrashEntry

FilesOf = Callable[[str], Awaitable[Mapping[str, FileRecord]]]
"""The files that weights have, as they were when they were written."""

Names = Callable[[], Awaitable[Collection[str]]]

Confirm = Callable[[], Awaitable[None]]
"""Raises when another server has taken over: its files must not be taken for stray ones."""


class Storage(Protocol):
    title: str
    """What it is called in messages, as "the data folder /data"."""

    is_shared: bool
    """Whether other servers may use it at the same time."""

    # Weights

    def folder_for(self, weights_id: str) -> Path:
        """Where an engine writes new weights."""
        ...

    async def keep(self, weights_id: str) -> None:
        """Make the weights that an engine has written, if it has, durable here."""
        ...

    def reading(self, weights_id: str, files_of: FilesOf) -> AbstractAsyncContextManager[Path]:
        """A folder with weights, to be read as long as the context lasts."""
        ...

    async def files(self, weights_id: str, files_of: FilesOf) -> list[str]:
        """The names of the files of weights, relative to their folder; none when there are none."""
        ...

    async def discard(self, weights_ids: Collection[str]) -> None:
        """Delete weights that nobody could ask for. What cannot be deleted now is found later."""
        ...

    async def sweep_drafts(self, writing: Collection[str], confirm: Confirm) -> None:
        """Delete what an engine was writing when it died; `writing` is what others write."""
        ...

    async def urls(
        self, weights_id: str, names: Collection[str], seconds: int
    ) -> dict[str, str] | None:
        """Where clients may fetch files from the storage itself; None when they may not."""
        ...

    # What is here

    async def names(self, changed_before: float | None = None) -> set[str]:
        """The weights, requests and results that are here whole, by the names that a store knows;
        only those that nothing was added to since a moment, where one is given."""
        ...

    async def sizes(self, names: Collection[str]) -> dict[str, int]:
        """The bytes of each of these that is here."""
        ...

    async def describe(self, name: str) -> dict[str, FileRecord]:
        """The files of weights, read now; none when they are missing."""
        ...

    # The trash

    async def announce(self, stray: Sequence[WeightsRecord]) -> dict[str, TrashEntry]:
        """Write down those that were checkpoints, so that they have their names in the trash
        whatever happens; the entries by weights."""
        ...

    async def let_go(
        self, gone: set[str], stray: Sequence[WeightsRecord], announced: dict[str, TrashEntry]
    ) -> None:
        """The store has forgotten `gone`: what was announced goes to the trash, the rest is
        deleted. What the store has not forgotten stays."""
        ...

    async def put_in_trash(self, names: Collection[str]) -> None:
        """The store does not know these."""
        ...

    async def trashed(self, known: Names) -> list[TrashEntry]:
        """What is in the trash, the newest first; what the store knows is not."""
        ...

    async def take_out(self, entry: TrashEntry) -> None:
        """Bring something back."""
        ...

    async def empty_trash(
        self, moved_before: float, max_owner_bytes: int | None, known: Names
    ) -> int:
        """Delete for good what came before a moment, and the oldest of each owner beyond a size;
        how many there were. Never what the store knows."""
        ...

    async def sweep_trash(self, confirm: Confirm) -> None:
        """Remove what a move that did not end left behind. Only while nothing is moved there."""
        ...

    # Which store it belongs to

    async def identity(self) -> NotedIdentity | None:
        """None where it was never bound to a store."""
        ...

    async def expect_epoch(self, epoch: int) -> None:
        """The store is about to count up to this epoch; it is not certain that it will."""
        ...

    async def write_identity(self, identity: IdentityRecord) -> None:
        """The store has this identity; one of epoch 0 is new."""
        ...

    def note_position(self, position: int) -> None:
        """The store has made a commit. Called for each, so it is quick or does nothing."""
        ...
