"""The store on SQLite or Postgres, over one set of tables. Each group of tables has a module."""

from __future__ import annotations

from tinsmith.server.store.accounts import AccountTables
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.logs import LogTables
from tinsmith.server.store.sessions import SessionTables
from tinsmith.server.store.weights import WeightTables

__all__ = ["SqlStore", "sqlite_url"]


class SqlStore(AccountTables, SessionTables, LogTables, WeightTables):
    """See `tinsmith.server.store.base.Store` for what the methods promise."""
