"""`tinsmith model`: the base models that a server offers."""

from __future__ import annotations

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, text_of, with_output, yes_or_no


@click.group("model")
def command() -> None:
    """List available models."""


@command.command("list")
@click.argument("substring", required=False)
@with_output
def list_models(output: Output, substring: str | None) -> None:
    """List the models that can be trained and sampled.

    SUBSTRING keeps those whose name contains it, in any case.
    """
    from tinsmith.client.service import ServiceClient

    service = ServiceClient()
    models = service.get_server_capabilities().supported_models
    if substring is not None:
        wanted = substring.lower()
        models = [each for each in models if wanted in (each.model_name or "").lower()]
        if not models:
            raise CommandError(
                f"No model name contains '{substring}'",
                "Run 'tinsmith model list' to see every model of this server.",
            )
    output.show(
        {"models": [each.model_dump() for each in models]},
        Table(
            ["Model", "Max Context", "Trainable", "Sampleable"],
            [
                [
                    text_of(each.model_name),
                    text_of(each.max_context_length),
                    yes_or_no(each.trainable),
                    yes_or_no(each.sampleable),
                ]
                for each in models
            ],
        ),
    )
