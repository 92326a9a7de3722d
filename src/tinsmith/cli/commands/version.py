"""`tinsmith version`."""

from __future__ import annotations

import click

from tinsmith.cli.output import Output, with_output


@click.command("version")
@with_output
def command(output: Output) -> None:
    """Show the version."""
    from tinsmith import __version__
    from tinsmith.transport.config import PROTOCOL_VERSION

    if output.is_json:
        output.show_json({"tinsmith": __version__, "protocol": PROTOCOL_VERSION})
    else:
        click.echo(f"tinsmith {__version__}")
