"""`tinsmith model`: the base models that a server offers, and whether it could offer another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, size_text, text_of, with_output, yes_or_no

_RUNS_ON = {"decoder": "our own decoder", "transformers": "transformers' modules"}


@click.group("model")
def command() -> None:
    """List available models, and check others."""


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


@command.command("check")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--rank",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Rank of the adapter whose memory is counted.",
)
@with_output
def check(output: Output, folder: Path, rank: int) -> None:
    """Say whether, how and in how much memory a model would run on this machine.

    FOLDER has the model's `config.json` and safetensors. Weights are not loaded. Ends with exit
    code 1 and the reason if the model cannot be served.
    """
    from tinsmith import extras
    from tinsmith.errors import EngineError, ValidationError

    try:
        from tinsmith.engine.local.model.checking import check_model
    except ImportError as error:
        raise CommandError(
            f"Checking a model needs the engine: {error}",
            f"Install it with: {extras.install_line('engine')}",
        ) from error
    try:
        found = check_model(folder, rank)
    except (EngineError, ValidationError) as error:
        raise CommandError(
            f"{folder.name} cannot be served: {error}",
            "The page 'Models' of the documentation lists the types that work.",
        ) from error
    rows = [
        ["Model type", f"{found.model_type} ({found.architecture})"],
        ["Runs on", _RUNS_ON[found.runs_on]],
        ["Adapted", ", ".join(found.adapted)],
        ["Max context", text_of(found.max_context_length)],
        ["Parameters", f"{found.num_parameters:,}"],
        ["Device", f"{found.device}, {found.dtype}"],
        ["Weights", size_text(found.weights_bytes)],
        [f"Adapter of rank {rank}", f"{size_text(found.adapter_bytes)} while it trains"],
        ["Sampling", f"{size_text(1000 * found.token_bytes)} for 1,000 tokens"],
    ]
    if found.image_tokens:
        rows.insert(4, ["Images", f"PNG and JPEG, at most {found.image_tokens:,} tokens each"])
    if found.sequence_bytes:
        rows.append(["", f"{size_text(found.sequence_bytes)} for each sequence beside them"])
    does_fit = "fits" if found.fits else "too little for weights, one adapter and activations"
    rows.append(["Memory", f"{size_text(found.memory_bytes)}: {does_fit}"])
    output.show(
        {**dataclasses.asdict(found), "adapted": list(found.adapted), "fits": found.fits},
        Table(["Property", "Value"], rows),
    )
