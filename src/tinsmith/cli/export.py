"""`tinsmith export`: a checkpoint as files for other tools."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, size_text, with_output

if TYPE_CHECKING:
    from tinsmith.client.rest import RestClient


@click.command("export")
@click.argument("checkpoint_path")
@click.option(
    "--output",
    "-o",
    "folder",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to write; it must not exist yet.",
)
@click.option("--merge", is_flag=True, help="Merge the adapter into its base model.")
@click.option(
    "--base",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="With --merge: the base model's folder, where this machine does not have it in a cache.",
)
@with_output
def command(
    output: Output, checkpoint_path: str, folder: Path, merge: bool, base: Path | None
) -> None:
    """Write a training or external checkpoint as a PEFT adapter, or merged as a whole model.

    Both are safetensors: `peft` and vLLM load the adapter, every library loads the merged model.
    """
    from tinsmith.cli import checkpoint_files
    from tinsmith.client.rest import RestClient

    checkpoint_files.parse_downloadable(checkpoint_path)
    if folder.exists():
        raise CommandError(f"{folder} exists already", "Choose another folder with --output.")
    if base is not None and not merge:
        raise CommandError("--base is for --merge: an adapter needs no base model")
    client = RestClient()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        adapter = Path(name) / "adapter"
        adapter.mkdir()
        checkpoint_files.fetch(client, checkpoint_path, adapter, output)
        finished = adapter
        if merge:
            finished = Path(name) / "merged"
            _merge(client, checkpoint_path, base, adapter, finished, output)
        # The folder appears whole or not at all.
        shutil.move(finished, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    kind = "merged model" if merge else "PEFT adapter"
    output.show(
        {
            "checkpoint_path": checkpoint_path,
            "destination": str(folder),
            "kind": "merged" if merge else "peft",
            "file_size_bytes": size,
        },
        Table(
            ["Property", "Value"],
            [
                ["Checkpoint Path", checkpoint_path],
                ["Kind", kind],
                ["Total Size", size_text(size)],
                ["Written to", str(folder)],
            ],
        ),
    )


def _merge(
    client: RestClient,
    path: str,
    base: Path | None,
    adapter: Path,
    target: Path,
    output: Output,
) -> None:
    from tinsmith.cli import merging
    from tinsmith.cli.progress import Progress
    from tinsmith.engine.local.config import EMBEDDED_MODEL, EMBEDDED_SOURCE, LocalEngineConfig
    from tinsmith.engine.local.sources import model_folder

    if base is None:
        name = client.get_weights_info_by_tinker_path(path).result().base_model
        source = EMBEDDED_SOURCE if name == EMBEDDED_MODEL else name
        base = model_folder(source, LocalEngineConfig())
    with Progress(is_quiet=output.is_json).stage("merging", total=1.0) as stage:
        stage.update(0.0, f"into {base.name}")

        def tell(done: int, total: int, name: str) -> None:
            if done == total or done % 50 == 0:
                stage.update(done / total, name)

        merging.merge(base, adapter, target, tell)
