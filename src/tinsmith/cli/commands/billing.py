"""`tinsmith billing`: what was used. Your own server counts tokens and bytes, not money."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import click

from tinsmith.cli.output import Output, Table, with_output

Row = dict[str, Any]

_COST_FIELDS = {
    "training": "effective_rate_usd_per_million_tokens",
    "sampling_prefill": "effective_rate_usd_per_million_tokens",
    "sampling_sample": "effective_rate_usd_per_million_tokens",
    "storage": "effective_rate_usd_per_gigabyte_month",
}
"""Which rate applies to an event; where it is missing a table says so."""


@click.group("billing")
def command() -> None:
    """View billing usage."""


@command.command("usage")
@click.argument("starting_on")
@click.argument("ending_before")
@click.option(
    "--csv", "csv_path", metavar="PATH", help="Write the rows as CSV ('-' for standard output)."
)
@click.option(
    "--sessions-csv",
    "sessions_path",
    metavar="PATH",
    help="Write the sessions and their metadata as CSV ('-' for standard output).",
)
@with_output
def usage(
    output: Output,
    starting_on: str,
    ending_before: str,
    csv_path: str | None,
    sessions_path: str | None,
) -> None:
    """Show what was used, by the hour.

    STARTING_ON and ENDING_BEFORE are whole UTC hours (2026-07-13T00:00:00Z), at most 14 days
    apart. A row is one hour, kind of use, base model and session.
    """
    from tinsmith.client.admin import AdminClient

    response = AdminClient().get_billing_usage(starting_on, ending_before).result()
    data = [event.model_dump(mode="json") for event in response.data]
    if sessions_path is not None:
        _write_csv(
            [
                {
                    "session_id": session_id,
                    "user_metadata": None
                    if session.user_metadata is None
                    else json.dumps(session.user_metadata),
                }
                for session_id, session in response.sessions.items()
            ],
            sessions_path,
        )
    if csv_path is not None:
        _write_csv([_flat(row) for row in data], csv_path)
    if csv_path is not None or sessions_path is not None:
        return
    through = response.cost_data_through
    output.show(
        {
            "data": data,
            "sessions": {
                session_id: session.model_dump(mode="json")
                for session_id, session in response.sessions.items()
            },
            "cost_data_through": None
            if through is None
            else through.isoformat().replace("+00:00", "Z"),
        },
        _table(
            [_with_missing_costs(_flat(row)) for row in data],
            f"{len(data)} hourly usage row(s)" if data else "No billing usage in this window",
        ),
    )


@command.command("checkpoint-storage")
@click.option("--project-id", help="Only what is in this project.")
@click.option(
    "--csv", "csv_path", metavar="PATH", help="Write the rows as CSV ('-' for standard output)."
)
@with_output
def checkpoint_storage(output: Output, project_id: str | None, csv_path: str | None) -> None:
    """Show what checkpoints take up now."""
    from tinsmith.client.admin import AdminClient

    client = AdminClient()
    response = client.get_current_checkpoint_storage_usage(project_id=project_id).result()
    rate = response.effective_rate_usd_per_gigabyte_month
    data = [item.model_dump(mode="json") for item in response.data]
    rows = [{"effective_rate_usd_per_gigabyte_month": rate, **row} for row in data]
    if csv_path is not None:
        _write_csv(rows, csv_path)
        return
    output.show(
        {"effective_rate_usd_per_gigabyte_month": rate, "data": data},
        _table(rows, "Current checkpoint storage" if rows else "No active checkpoint storage"),
    )


def _flat(row: Row) -> Row:
    """An event's own fields beside those that all have."""
    info = row.get("event_info")
    if not isinstance(info, dict):
        return row
    return {**{name: value for name, value in row.items() if name != "event_info"}, **info}


def _with_missing_costs(row: Row) -> Row:
    """An amount that applies and is not known reads `null`; one that does not apply is empty."""
    rate = _COST_FIELDS.get(str(row.get("type")))
    if rate is None:
        return row
    missing = {name: "null" for name in ("estimated_cost_usd", rate) if row.get(name) is None}
    return {**row, **missing}


def _table(rows: Sequence[Row], title: str) -> Table:
    columns = _columns(rows)
    cells = [["" if row.get(c) is None else str(row[c]) for c in columns] for row in rows]
    return Table(columns, cells, title)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _write_csv(rows: Sequence[Row], path: str) -> None:
    def write(file: IO[str]) -> None:
        writer = csv.DictWriter(file, fieldnames=_columns(rows), restval="")
        writer.writeheader()
        writer.writerows(rows)

    if path == "-":
        write(sys.stdout)
        return
    with Path(path).open("w", newline="") as file:
        write(file)
    click.echo(f"Wrote {len(rows)} row(s) to {path}", err=True)
