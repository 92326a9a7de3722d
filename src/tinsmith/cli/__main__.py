"""The table of commands and what all of them have in common; also `python -m tinsmith.cli`."""

from __future__ import annotations

import sys

import click

from tinsmith import __version__
from tinsmith.cli.failures import explained
from tinsmith.cli.lazy import LazyGroup
from tinsmith.cli.output import Output

COMMANDS = {
    name: f"tinsmith.cli.commands.{module}"
    for name, module in {
        "auth": "auth",
        "backup": "backup",
        "billing": "billing",
        "chat": "chat",
        "checkpoint": "checkpoint",
        "cluster": "cluster",
        "data": "data",
        "demo": "demo",
        "doctor": "doctor",
        "engine": "engine",
        "eval": "eval",
        "export": "export",
        "key": "key",
        "model": "model",
        "run": "run",
        "sample": "sample",
        "serve": "serve",
        "session": "session",
        "storage": "storage",
        "top": "top",
        "train": "train",
        "version": "version",
    }.items()
}


class _Root(LazyGroup):
    def invoke(self, ctx: click.Context) -> object:
        with explained():
            return super().invoke(ctx)


@click.group(cls=_Root, modules=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--format",
    "-f",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How results are shown.",
)
@click.option("--json", "is_json", is_flag=True, help="The same as --format json.")
@click.version_option(__version__, "--version", message="tinsmith %(version)s")
@click.pass_context
def cli(ctx: click.Context, form: str, is_json: bool) -> None:
    """Train and sample language models: a service, and a client for it.

    Begin with `tinsmith demo`. Commands that talk to a server find it in TINKER_BASE_URL and
    TINKER_API_KEY, which `tinsmith serve` prints, or where `tinsmith auth login` has been.

    \b
    Completion in this shell:
      bash  eval "$(_TINSMITH_COMPLETE=bash_source tinsmith)"
      zsh   eval "$(_TINSMITH_COMPLETE=zsh_source tinsmith)"
      fish  _TINSMITH_COMPLETE=fish_source tinsmith | source
    """
    ctx.obj = Output(is_json=is_json or form == "json")


def main(arguments: list[str] | None = None) -> None:
    try:
        cli(arguments, prog_name="tinsmith")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
