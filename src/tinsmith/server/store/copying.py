"""A whole store as one SQLite file, and back into a database of either kind.

A backup is made beside a running server: everything is read in one transaction, so the copy is the
store as it was at one moment.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa

from tinsmith.errors import ValidationError
from tinsmith.server.store import schema
from tinsmith.server.store.database import create_engine, sqlite_url
from tinsmith.server.store.migrations.migrate import migrate, version_of

_ROWS_AT_ONCE = 500
_WITHOUT_RESULTS = (
    sa.update(schema.operations)
    .where(schema.operations.c.result_file.is_not(None))
    .values(result_file=None, result_bytes=0, result_type="dropped")
)


def copy_out(url: str, file: Path) -> None:
    """Write the store at `url`, as it is at this moment, to a new SQLite file.

    Results that lie in files are left out, as if they had been fetched long ago: those whom they
    were for will not come back to a copy.
    """
    engine = create_engine(url)
    try:
        if engine.dialect.name == "sqlite":
            _vacuum_into(str(engine.url.database), file)
        else:
            _copy_rows_out(engine, file)
    finally:
        engine.dispose()
    copy = create_engine(sqlite_url(file))
    try:
        with copy.begin() as connection:
            connection.execute(_WITHOUT_RESULTS)
    finally:
        copy.dispose()


def copy_in(file: Path, url: str) -> None:
    """Fill the empty Postgres database at `url` with what a file holds; all or nothing.

    The file becomes one of this release, if it was made by an earlier one.
    """
    source, target = create_engine(sqlite_url(file)), create_engine(url)
    try:
        migrate(source)
        _check_empty(target)
        migrate(target)
        with source.connect() as reading, target.begin() as writing:
            _copy_rows(reading, writing)
            _number_on(writing)
    finally:
        source.dispose()
        target.dispose()


def check_sqlite(file: Path) -> list[str]:
    """What SQLite itself finds wrong with a file; nothing where it is whole."""
    try:
        connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def _vacuum_into(database: str, file: Path) -> None:
    # One read transaction: other than the backup API of SQLite it never begins anew, however much
    # is written meanwhile.
    connection = sqlite3.connect(database, timeout=30.0)
    try:
        connection.execute("VACUUM INTO ?", (str(file),))
    finally:
        connection.close()


def _copy_rows_out(engine: sa.Engine, file: Path) -> None:
    target = create_engine(sqlite_url(file))
    try:
        migrate(target)
        with (
            engine.connect().execution_options(isolation_level="REPEATABLE READ") as reading,
            target.begin() as writing,
        ):
            here, there = version_of(reading), version_of(writing)
            if here != there:
                raise ValidationError(
                    f"the database has version {here} of the tables and this release {there}; "
                    "start a server of this release once, or use the release that it was used with"
                )
            _copy_rows(reading, writing)
    finally:
        target.dispose()


def _copy_rows(reading: sa.Connection, writing: sa.Connection) -> None:
    for table in schema.metadata.sorted_tables:
        rows = reading.execution_options(yield_per=_ROWS_AT_ONCE).execute(sa.select(table))
        for part in rows.partitions():
            writing.execute(sa.insert(table), [dict(row._mapping) for row in part])


def _check_empty(engine: sa.Engine) -> None:
    present = set(sa.inspect(engine).get_table_names()) & set(schema.metadata.tables)
    if present:
        raise ValidationError(
            f"the database {engine.url!r} is not empty: it has a table {min(present)!r}. "
            "Give an empty one"
        )


def _number_on(connection: sa.Connection) -> None:
    """Let Postgres number new rows after those that were copied."""
    for table in schema.metadata.sorted_tables:
        column = table.autoincrement_column
        if column is None:
            continue
        sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
        highest = sa.select(sa.func.max(column)).scalar_subquery()
        connection.execute(
            sa.select(sa.func.setval(sequence, highest)).where(
                sequence.is_not(None), highest.is_not(None)
            )
        )
