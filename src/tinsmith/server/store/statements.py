"""Statements that run for every operation or commit: compiled once, carried out by the driver.

SQLAlchemy looks up, binds and wraps each statement anew, which costs several times what the
database takes for a small one. What is written stays an expression over the tables of `schema`;
here it becomes text and an order of values. It is for statements whose values the drivers take as
they are: texts, numbers, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

Run = Callable[[sa.Connection, Mapping[str, Any]], Any]
"""Carries out a statement within the connection's transaction, with values by name; the driver's
cursor. Errors are SQLAlchemy's."""


def prepared(dialect: sa.Dialect, statement: sa.Executable, names: Sequence[str] = ()) -> Run:
    """`names` are the values that change from one time to the next."""
    compiled = statement.compile(dialect=dialect, column_keys=list(names))  # type: ignore[attr-defined]  # of every statement
    assert isinstance(compiled, sa.sql.compiler.SQLCompiler)
    text, order = str(compiled), compiled.positiontup
    fixed = {name: value for name, value in compiled.params.items() if name not in names}
    if order is None:
        return lambda connection, values: _execute(connection, text, {**fixed, **values})

    def run(connection: sa.Connection, values: Mapping[str, Any]) -> Any:
        given = {**fixed, **values}
        return _execute(connection, text, [given[name] for name in order])

    return run


def appender(
    dialect: sa.Dialect, table: sa.Table
) -> Callable[[sa.Connection, Sequence[Any]], None]:
    """A function that adds a row, given its values in the order of the columns."""
    columns = [column.name for column in table.c]
    run = prepared(dialect, sa.insert(table), columns)
    return lambda connection, row: run(connection, dict(zip(columns, row, strict=True)))


def begin_in_sqlite(connection: sa.Connection) -> None:
    _execute(connection, "BEGIN", ())


def _execute(connection: sa.Connection, text: str, values: Any) -> Any:
    driver: Any = connection.connection.dbapi_connection
    dialect = connection.dialect
    base: type[Exception] = dialect.loaded_dbapi.Error
    try:
        return driver.execute(text, values)
    except base as error:
        if dialect.is_disconnect(error, driver, None):  # type: ignore[arg-type]  # as any of a driver's
            connection.invalidate(error)
        raise sa.exc.DBAPIError.instance(text, values, error, base, dialect=dialect) from error
