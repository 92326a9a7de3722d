"""What a command shows: a table for people, JSON for programs.

Tables are drawn on a terminal that is wide enough, and never cut: a narrow one gets a line for each
cell. A pipe sees plain columns, one line per row.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go: the form that the caller asked for."""

    is_json: bool = False

    def show(self, data: Any, table: Table) -> None:
        """Show the same thing as `data` or as `table`."""
        if self.is_json:
            self.show_json(data)
        elif sys.stdout.isatty():
            _draw(table)
        else:
            click.echo("\n".join(_plain_lines(table)))

    def show_json(self, data: Any) -> None:
        click.echo(json.dumps(data, indent=2, default=str))

    def note(self, text: str) -> None:
        """A remark about the work, for people: on the error stream, and not beside JSON."""
        if not self.is_json:
            click.echo(text, err=True)


def with_output(function: Callable[Concatenate[Output, P], R]) -> Callable[P, R]:
    """Give a command `--json` and, as its first argument, the output to show its result with."""

    @functools.wraps(function)
    def command(*args: Any, is_json: bool, **kwargs: Any) -> R:
        chosen: Output = click.get_current_context().find_root().obj or Output()
        return function(Output(is_json=True) if is_json else chosen, *args, **kwargs)

    option = click.option(
        "--json", "is_json", is_flag=True, help="The same as `tinsmith --format json`."
    )
    return option(command)  # type: ignore[return-value]  # one keyword more, which click fills


def _draw(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as Drawing

    # Ids contain words between colons, which rich would take for emoji and for markup.
    console = Console(emoji=False, markup=False)
    if console.width < _drawn_width(table):
        click.echo("\n".join(_record_lines(table)))
        return
    drawing = Drawing(title=table.title)
    for number, column in enumerate(table.columns):
        if number == 0:
            drawing.add_column(column, style="bright_cyan", no_wrap=True)
        else:
            drawing.add_column(column)
    for row in table.rows:
        drawing.add_row(*row)
    console.print(drawing)


def _drawn_width(table: Table) -> int:
    """Columns of the terminal that show every cell whole, on one line."""
    widths = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    return sum(widths) + 3 * len(widths) + 1


def _record_lines(table: Table) -> list[str]:
    """A table that is too wide for the terminal: a line for each cell, so that nothing is cut."""
    lines = [table.title] if table.title else []
    if len(table.columns) == 2:  # names and values already
        return lines + [f"{name}: {value}" for name, value in table.rows]
    for row in table.rows:
        lines.append("")
        lines += [f"{name}: {cell}" for name, cell in zip(table.columns, row, strict=True)]
    return lines


def _plain_lines(table: Table) -> list[str]:
    lines = [table.title] if table.title else []
    cells = [list(table.columns), *(list(row) for row in table.rows)]
    if not table.columns:
        return lines
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
    return lines


# --- values as people read them ---------------------------------------------------------------


def size_text(num_bytes: int | None) -> str:
    """
    >>> size_text(1536)
    '1.5 KB'
    """
    if num_bytes is None or num_bytes < 0:
        return "N/A"
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KB", "MB", "GB", "TB", "PB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} EB"


def moment(seconds: float) -> datetime:
    """Since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


def time_text(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago or ahead, in the largest unit; the date when that is over a month.

    >>> time_text(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 2, 30, tzinfo=UTC))
    '2 hours ago'
    """
    if moment is None:
        return "N/A"
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    away = (now or datetime.now(UTC)) - moment
    is_future = away.total_seconds() < 0
    away = abs(away)
    seconds = int(away.total_seconds())
    if away.days > 30:
        return moment.strftime("%Y-%m-%d")
    # Exactly one of a unit counts in the next smaller one; a week is the exception, above 7 days.
    for count, unit, is_enough in (
        (away.days // 7, "week", away.days > 7),
        (away.days, "day", away.days > 0),
        (seconds // 3600, "hour", seconds > 3600),
        (seconds // 60, "minute", seconds > 60),
    ):
        if is_enough:
            text = f"{count} {unit}{'s' if count > 1 else ''}"
            return f"in {text}" if is_future else f"{text} ago"
    return "in less than a minute" if is_future else "just now"


def yes_or_no(value: bool | None) -> str:
    return "N/A" if value is None else "Yes" if value else "No"


def text_of(value: object) -> str:
    return "N/A" if value is None else str(value)
