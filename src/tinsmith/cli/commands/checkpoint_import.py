"""`tinsmith checkpoint import`: a PEFT adapter as a checkpoint of the server."""

from __future__ import annotations

from typing import Literal

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.fetching import DownloadBars
from tinsmith.cli.output import Output, Table, with_output


@click.command("import")
@click.argument("source")
@click.option("--base", "base_model", help="The server's base model; default: the adapter's own.")
@click.option("--name", default="imported", show_default=True, help="The checkpoint's name.")
@click.option(
    "--as",
    "kind",
    type=click.Choice(["training", "sampler"]),
    default="training",
    show_default=True,
    help="A checkpoint to train on from, or one to sample from.",
)
@click.option("--ttl", "ttl_seconds", type=int, help="Seconds until it expires.")
@with_output
def command(
    output: Output,
    source: str,
    base_model: str | None,
    name: str,
    kind: Literal["training", "sampler"],
    ttl_seconds: int | None,
) -> None:
    """Bring a PEFT adapter to the server as a checkpoint.

    SOURCE is a folder with adapter_config.json and adapter_model.safetensors, or a repository of
    the Hugging Face Hub, as in hf:owner/name or hf:owner/name@revision. Every tensor is used, or
    the adapter is refused with the reason. The optimizer starts afresh.

    \b
    tinsmith checkpoint import ./my-adapter --base Qwen/Qwen3-8B --name start
    tinsmith checkpoint import hf:owner/my-adapter --as sampler
    """
    from tinsmith.cli.weights.adapter_source import adapter_folder, trained_on
    from tinsmith.client.rest import RestClient
    from tinsmith.client.uploads import import_adapter

    folder = adapter_folder(source)
    named = trained_on(folder)
    base_model = base_model or named
    if base_model is None:
        raise CommandError(
            "The adapter does not say which base model it is for",
            "Name one of the server's models with --base.",
        )
    if named is not None and named != base_model:
        output.note(f"The adapter was trained on {named}; it is imported for {base_model}.")
    holder = RestClient().holder
    with DownloadBars(output) as bars:
        imported = holder.submit(
            import_adapter,
            holder,
            folder,
            base_model=base_model,
            name=name,
            kind=kind,
            ttl_seconds=ttl_seconds,
            user_metadata={"imported_from": source[:200]},
            on_progress=bars,
        ).result()
    output.show(
        {
            "checkpoint_path": imported.tinker_path,
            "base_model": base_model,
            "lora_rank": imported.lora_rank,
            "kind": kind,
        },
        Table(
            ["Property", "Value"],
            [
                ["Checkpoint Path", imported.tinker_path],
                ["Base Model", base_model],
                ["LoRA Rank", str(imported.lora_rank)],
                ["Kind", kind],
            ],
            f"Checkpoint Import: {source}",
        ),
    )
