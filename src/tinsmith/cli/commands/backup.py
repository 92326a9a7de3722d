"""`tinsmith backup`: copies of a server's database and files, and servers restored from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.output import Output, size_text, with_output
from tinsmith.cli.progress import Progress
from tinsmith.cli.server.local_server import config_of, which_server

if TYPE_CHECKING:
    from tinsmith.server.backups import Backup

_FOLDER = click.Path(path_type=Path)


@click.group("backup")
def command() -> None:
    """Copy a server's database and files, check such a copy, and restore a server from it."""


@command.command("create")
@click.argument("folder", type=_FOLDER)
@which_server
@with_output
def create(output: Output, /, folder: Path, **where: Any) -> None:
    """Copy a server's database and data folder to FOLDER, which must not exist.

    The server may run, and clients may be at work: the copy is of one moment. With --storage the
    objects are copied that the database names.
    """
    from tinsmith.server import backups

    with Progress(is_quiet=output.is_json).stage("copying") as stage:
        made = backups.create(
            config_of(**where),
            folder,
            lambda done, total: stage.update(done / max(total, 1), f"{done} of {total}"),
        )
    _show(output, made, f"Backed up to {folder}")


@command.command("verify")
@click.argument("folder", type=_FOLDER)
@with_output
def verify(output: Output, /, folder: Path) -> None:
    """Read every byte of the backup in FOLDER and compare it with what was written."""
    from tinsmith.server import backups

    _show(output, backups.verify(folder), "The backup is whole")


@command.command("restore")
@click.argument("folder", type=_FOLDER)
@which_server
@with_output
def restore(output: Output, /, folder: Path, **where: Any) -> None:
    """Make a data folder, which must not exist, from the backup in FOLDER.

    With --database-url the database, which must be empty, is filled as well; a backup of a server
    on SQLite can become one on Postgres, and the other way round. With --storage the files go to
    object storage, to a place where there is nothing yet.
    """
    from tinsmith.server import backups
    from tinsmith.server.config_sources import load_config

    config = load_config(where.pop("config_file"), where)
    restored = backups.restore(folder, config)
    _show(output, restored, f"Restored to {config.data_dir}")


def _show(output: Output, backup: Backup, what: str) -> None:
    facts = {
        "made_at": backup.moment,
        "release": backup.release,
        "files": len(backup.files),
        "bytes": backup.num_bytes,
    }
    if output.is_json:
        output.show_json(facts)
    else:
        size = size_text(backup.num_bytes)
        click.echo(f"{what}: {len(backup.files)} files, {size}, as of {backup.moment}.")
