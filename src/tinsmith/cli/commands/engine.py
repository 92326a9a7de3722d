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
@click.option("--connect", metavar="HOST:PORT", help="The server, if not as the file says.")
def command(credentials: Path, connect: str | None) -> None:
    """Be the engine of a slot, until the server lets go.

    For a server that was started with --cluster manual. Its data folder has to be here, too, under
    the same path. An engine that has died is not taken again: start another, with what is in the
    file then.
    """
    from tinsmith.engine.remote.credentials import Credentials
    from tinsmith.engine.remote.joining import join

    try:
        sys.exit(join(Credentials.load(credentials), connect))
    except TinkerError as error:
        raise click.ClickException(str(error)) from None
