"""`tinsmith storage`: what a server's storage holds, and what can be brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli import naming
from tinsmith.cli.output import Output, Table, moment, size_text, time_text, with_output
from tinsmith.cli.server.local_server import config_of, which_server

if TYPE_CHECKING:
    from tinsmith.server.storage.checking import Findings


@click.group("storage")
def command() -> None:
    """See what takes room in a server's data folder, and bring back what was deleted."""


@command.command("show")
@which_server
@with_output
def show(output: Output, /, **where: Any) -> None:
    """Show what takes room, and whose it is."""
    from tinsmith.cli.server import storage

    rooms = storage.room(config_of(**where))
    output.show(
        {
            "storage": [
                {"what": r.what, "owner": r.owner, "count": r.count, "bytes": r.num_bytes}
                for r in rooms
            ]
        },
        Table(
            ["What", "Owner", "Count", "Size"],
            [[r.what, r.owner, str(r.count), size_text(r.num_bytes)] for r in rooms],
        ),
    )


@command.command("trash")
@click.option("--empty", is_flag=True, help="Delete all of it for good. The server must not run.")
@which_server
@with_output
def trash(output: Output, /, empty: bool, **where: Any) -> None:
    """List deleted checkpoints, and files that the store did not know."""
    from tinsmith.cli.server import storage

    config = config_of(**where)
    if empty:
        count = storage.empty_trash(config)
        output.note(f"Deleted {count} from the trash.")
    entries = storage.trashed(config)
    output.show(
        {
            "trash": [
                {
                    "id": e.entry_id,
                    "name": e.name,
                    "moved_at": moment(e.moved_at),
                    "bytes": e.size_bytes,
                    "owner": e.owner,
                    "reason": e.reason,
                }
                for e in entries
            ]
        },
        Table(
            ["ID", "Moved", "Size", "Owner", "Reason"],
            [
                [
                    e.entry_id,
                    time_text(moment(e.moved_at)),
                    size_text(e.size_bytes),
                    e.owner or "",
                    e.reason,
                ]
                for e in entries
            ],
            None if entries else "The trash is empty",
        ),
    )


@command.command("restore")
@click.argument("entry_id")
@which_server
@with_output
def restore(output: Output, /, entry_id: str, **where: Any) -> None:
    """Bring back a checkpoint from the trash, under the name it had.

    The beginning of its id is enough.
    """
    from tinsmith.cli.server import storage

    config = config_of(**where)
    known = (entry.entry_id for entry in storage.trashed(config))
    name = storage.restore(config, naming.trash_entry_id(known, entry_id))
    if output.is_json:
        output.show_json({"restored": name})
    else:
        click.echo(f"Restored {name}.")


@command.command("check")
@click.option("--quick", is_flag=True, help="Compare names and sizes; do not read the files.")
@which_server
@with_output
def check(output: Output, /, quick: bool, **where: Any) -> None:
    """Compare the database with what is in the storage, both ways.

    Changes nothing. Ends with exit code 1 if something is missing, damaged or unknown.
    """
    from tinsmith.cli.server import storage

    found = storage.check(config_of(**where), reads=not quick)
    _show_faults(output, found)
    if found.faults:
        click.get_current_context().exit(1)


@command.command("repair")
@which_server
@with_output
def repair(output: Output, /, **where: Any) -> None:
    """Do what can be done about what `check` finds; nothing is deleted.

    What is missing or damaged is marked as lost, so that requests for it are told why, and what the
    database does not know goes to the trash. The server must not run, unless its storage is object
    storage.
    """
    from tinsmith.cli.server import storage

    config = config_of(**where)
    _show_faults(output, storage.repair(config))


@command.command("adopt")
@click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask.")
@which_server
@with_output
def adopt(output: Output, /, is_sure: bool, **where: Any) -> None:
    """Bind a data folder and a database to each other that did not belong together.

    Deletes nothing: what the database does not know goes to the trash at the next start.
    """
    from tinsmith.cli.server import storage

    config = config_of(**where)
    if not is_sure:
        database = "its database" if config.database_url is None else "the database given"
        click.confirm(f"Bind {config.data_dir} to {database}?", abort=True, err=True)
    num_here, num_missing = storage.adopt(config)
    if output.is_json:
        output.show_json({"known": num_here, "missing": num_missing})
    else:
        click.echo(
            f"Bound. Of what the database knows, {num_here} are in the folder "
            f"and {num_missing} are missing."
        )


def _show_faults(output: Output, found: Findings) -> None:
    faults = found.faults
    output.show(
        {
            "known": found.num_known,
            "faults": [{"kind": f.kind, "name": f.name, "detail": f.detail} for f in faults],
        },
        Table(
            ["Fault", "Name", "Detail"],
            [[f.kind, f.name, f.detail] for f in faults],
            None if faults else f"All {found.num_known} are there and whole",
        ),
    )
