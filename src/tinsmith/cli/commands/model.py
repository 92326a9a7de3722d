"""`tinsmith model`: the base models that a server offers, whether it could offer another, and
where a model trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, size_text, text_of, with_output, yes_or_no

_RUNS_ON = {"decoder": "our own decoder", "transformers": "transformers' modules"}


@click.group("model")
def command() -> None:
    """List available models, check others, and move those that train."""


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
        ["Ranks", ", ".join(map(str, (1, *found.ranks)))],
        ["Parameters", f"{found.num_parameters:,}"],
        ["Device", f"{found.device}, {found.dtype}"],
        ["Weights", size_text(found.weights_bytes)],
        ["In few bits", ", ".join(f"{k} {size_text(n)}" for k, n in found.few_bits_bytes.items())],
        [f"Adapter of rank {rank}", f"{size_text(found.adapter_bytes)} while it trains"],
        ["Sampling", f"{size_text(1000 * found.token_bytes)} for 1,000 tokens"],
    ]
    if found.image_tokens:
        rows.insert(4, ["Images", f"PNG and JPEG, at most {found.image_tokens:,} tokens each"])
    if found.stored_as is not None:
        files = f"{found.stored_as}: {size_text(found.converted_bytes)} in the cache when served"
        rows.insert(1, ["Stored as", files])
    if found.sequence_bytes:
        rows.append(["", f"{size_text(found.sequence_bytes)} for each sequence beside them"])
    does_fit = "fits" if found.fits else "too little for weights, one adapter and activations"
    if found.fits_in and not found.fits:
        does_fit = f"fits with --base-weights {' or '.join(found.fits_in)}"
    rows.append(["Memory", f"{size_text(found.memory_bytes)}: {does_fit}"])
    output.show(
        {
            **dataclasses.asdict(found),
            "adapted": list(found.adapted),
            "fits": found.fits,
            "fits_in": list(found.fits_in),
        },
        Table(["Property", "Value"], rows),
    )


@command.command("move")
@click.argument("run_id")
@click.argument("slot", type=click.IntRange(min=0))
@with_output
def move(output: Output, run_id: str, slot: int) -> None:
    """Have a model train in another engine of the server, from its next operation on.

    RUN_ID is the run's id, the beginning of it, or its name; SLOT is a number from `tinsmith
    cluster status`. The run goes on as if nothing had happened.
    """
    from tinsmith.cli import naming
    from tinsmith.client.rest import RestClient
    from tinsmith.types.observing import MoveModelRequest
    from tinsmith.wire import endpoints

    client = RestClient()
    whole = naming.run_id(client, run_id)
    call = endpoints.MOVE_MODEL.at(run_id=whole)
    message = MoveModelRequest(slot=slot)
    moved = client.holder.submit(lambda: client.holder.api.call(call, message)).result()
    if output.is_json:
        output.show_json(moved.model_dump())
    else:
        before = "no engine holds it now" if moved.before is None else f"now in slot {moved.before}"
        click.echo(f"{whole} goes on in slot {slot} ({before}).")
