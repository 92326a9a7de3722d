"""SQLite's write-ahead log goes back into the database beside the commits.

By default the commit that makes the log longer than 4 MB copies it back and waits for the disk,
and everybody whose write is in it, or behind it, waits as well: up to a tenth of a second, once or
twice a second where much is written. Here a thread does so every second, which no writer waits for.
A log to which writes are added all the while is never empty, and grows until a commit copies the
rest of it back: that happens at 64 MB.
"""

from __future__ import annotations

import logging
import sqlite3
import threading

import sqlalchemy as sa

logger = logging.getLogger(__name__)

SETTING = "wal_autocheckpoint=16384"
"""Pages of 4 KiB after which a commit does it."""

_EVERY_SECONDS = 1.0


class WalKeeper:
    def __init__(self, engine: sa.Engine, seconds: float = _EVERY_SECONDS) -> None:
        self._engine = engine
        self._seconds = seconds
        self._has_more = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-wal", daemon=True)
        self._thread.start()

    def committed(self) -> None:
        """The log has become longer."""
        self._has_more.set()

    def close(self) -> None:
        self._is_closed.set()
        self._has_more.set()
        self._thread.join()

    def _run(self) -> None:
        while self._has_more.wait() and not self._is_closed.wait(self._seconds):
            self._has_more.clear()
            try:
                self._copy_back()
            except sqlite3.Error as error:
                logger.warning("the log of the database could not be copied back: %s", error)

    def _copy_back(self) -> None:
        connection = self._engine.raw_connection()
        try:
            connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            connection.close()
