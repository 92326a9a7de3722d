"""Numbered places of one size: who reads each, which are free, and which are kept though unread.

A page that nobody reads any more is free, unless it was to be kept: then it stays until room is
needed. The scope that keeps most unread pages gives way first, with the one that was read least
recently.
"""

from __future__ import annotations

from collections import OrderedDict


class Pages:
    def __init__(self, count: int, num_spare: int = 0) -> None:
        """`count` pages, and some more that are handed out only to whoever insists."""
        self.count = count + num_spare
        self.users = [0] * self.count
        """How many read each."""
        self._num_spare = num_spare
        self._free = list(range(self.count - 1, -1, -1))
        self._kept: dict[int, str] = {}
        """The scope of each page that is kept, read or not."""
        self._unread: dict[str, OrderedDict[int, None]] = {}
        """For each scope its kept pages without readers, the one read last at the end."""

    @property
    def num_used(self) -> int:
        """Pages that are read or kept."""
        return self.count - len(self._free)

    def has_room(self, count: int, *, force: bool = False) -> bool:
        """Whether so many pages are free; `force` counts the spare ones too."""
        return count <= len(self._free) - (0 if force else self._num_spare)

    def take(self) -> int:
        """A free page, with one reader."""
        page = self._free.pop()
        self.users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One reader more of a page that is read or kept."""
        if not self.users[page]:
            self._wake(page)
        self.users[page] += 1

    def leave(self, page: int) -> None:
        """One reader less."""
        self.users[page] -= 1
        if self.users[page]:
            return
        if page in self._kept:
            self._unread.setdefault(self._kept[page], OrderedDict())[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int, scope: str) -> None:
        """Let a page that is read now stay when nobody reads it any more."""
        self._kept[page] = scope

    def drop(self, page: int) -> None:
        """Keep a page no longer."""
        if not self.users[page]:
            self._wake(page)
            self._free.append(page)
        del self._kept[page]

    def drop_oldest(self) -> int | None:
        """Free an unread page; see the module's notes on which. None where there is none."""
        if not self._unread:
            return None
        pages = max(self._unread.values(), key=len)
        oldest = next(iter(pages))
        self.drop(oldest)
        return oldest

    def _wake(self, page: int) -> None:
        scope = self._kept[page]
        del self._unread[scope][page]
        if not self._unread[scope]:
            del self._unread[scope]
