"""Which slots are to be emptied: a file in the data folder, written by the server's operator.

A server looks at it every second, and again when it starts: a device that is being repaired stays
out of use.
"""

from __future__ import annotations

import logging
from pathlib import Path

import orjson

from tinsmith import disk

logger = logging.getLogger(__name__)

FILE = "slots.draining"


class Draining:
    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / FILE
        self._read_at: int | None = None
        self._known: frozenset[int] = frozenset()

    def read(self) -> frozenset[int]:
        """The numbers of the slots; the file is read again when it has changed. One that cannot be
        read changes nothing."""
        try:
            changed_at = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return frozenset()
        if changed_at != self._read_at:
            self._read_at = changed_at
            try:
                self._known = frozenset(map(int, orjson.loads(self._file.read_bytes())))
            except (OSError, TypeError, ValueError) as error:
                logger.error("%s is no list of slots and is left out: %s", self._file, error)
        return self._known

    def change(self, number: int, *, is_draining: bool) -> None:
        """Add a slot, or take it off."""
        numbers = self.read() | {number} if is_draining else self.read() - {number}
        disk.publish_file(self._file, orjson.dumps(sorted(numbers)))
