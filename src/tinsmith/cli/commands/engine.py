"""`tinsmith engine`: an engine for a slot of a server on another machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tinsmith.errors import TinkerError


@click.command("engine")
@click.option(
    "--credentials",
    type=click.Path(path_type=Path),
    required=True,
    help="The slot's file: engines/slot-NUMBER.json in the server's data folder.",
)
@click.option(
    "--connect", metavar="HOST:PORT", help="The server's address, if not the one in the file."
)
def command(credentials: Path, connect: str | None) -> None:
    """Run the engine of a slot, until the server ends the connection.

    For a server that was started with --cluster manual. Its data folder has to be here, too, under
    the same path. An engine that has died or lost its connection is not let in again: start another
    one, with what is in the file then.
    """
    from tinsmith.engine.remote.credentials import Credentials
    from tinsmith.engine.remote.joining import join

    try:
        sys.exit(join(Credentials.load(credentials), connect))
    except TinkerError as error:
        raise click.ClickException(str(error)) from None
