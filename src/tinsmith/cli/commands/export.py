"""`tinsmith export`: a checkpoint as files for other tools."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinsmith.cli import naming
from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, size_text, with_output

if TYPE_CHECKING:
    from tinsmith.cli.progress import Tell
    from tinsmith.client.rest import RestClient
    from tinsmith.engine.local.adapter_files.exports import Form

_FORMATS = {"peft": "PEFT adapter", "merged": "merged model", "gguf": "GGUF file"}


@click.command("export")
@click.argument("checkpoint_path")
@click.option(
    "--output",
    "-o",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to write, or the file for GGUF; it must not exist yet.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(list(_FORMATS)),
    default="peft",
    show_default=True,
    help="The adapter by itself, or merged into its base model: as safetensors, or one GGUF file.",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The base model's folder, where this machine does not have it in a cache.",
)
@click.option(
    "--quantize",
    "quantization",
    metavar="q8_0|q4_k_m|int8|int4",
    help=(
        "Matrices in fewer bits. With --format gguf: q8_0 or q4_k_m (with the package xllamacpp); "
        "with --format merged: int8 or int4 (with the package compressed-tensors)."
    ),
)
@with_output
def command(
    output: Output,
    checkpoint_path: str,
    target: Path,
    form: Form,
    base: Path | None,
    quantization: str | None,
) -> None:
    """Write a training or external checkpoint as files for other tools.

    `peft` and vLLM load the adapter, every library loads the merged model, and llama.cpp and
    its relatives load GGUF. What was written is loaded back, and its logits are compared with
    the adapter's on the base model; it is kept only if they agree.
    """
    from tinsmith.cli.weights import checkpoint_files
    from tinsmith.cli.weights.peft_layout import to_peft
    from tinsmith.client.rest import RestClient

    checkpoint_files.parse_downloadable(checkpoint_path)
    quantization = quantization and quantization.lower()
    _check_quantization(quantization, form)
    if target.exists():
        raise CommandError(f"{target} exists already", "Choose another name with --output.")
    client = RestClient()
    checkpoint_path = naming.checkpoint_path(client, checkpoint_path)
    base = base or _base_folder(client, checkpoint_path, is_needed=form != "peft")
    if form == "gguf" and base is not None:
        from tinsmith.cli.weights import gguf_file

        gguf_file.check_family(base)  # before anything is fetched
    if form == "merged" and base is not None and quantization is not None:
        from tinsmith.cli.weights import packed_ints

        packed_ints.check(base)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as name:
        made = {each: Path(name) / each for each in _FORMATS}
        made["peft"].mkdir()
        checkpoint_files.fetch(client, checkpoint_path, made["peft"], output)
        checkpoint_files.check_is_readable(made["peft"], checkpoint_path)
        to_peft(made["peft"], base)
        if base is not None and form != "peft":
            _merge(base, made["peft"], made["merged"], output)
        if form == "gguf":
            _write_gguf(made["merged"], made["gguf"], target.stem, quantization, output)
        elif quantization is not None:
            made["packed"] = _pack(made["merged"], quantization, output)
        difference = _compare(form, base, made, quantization, output)
        trained_on = _name_base(made["peft"], base, output)
        # It appears whole or not at all.
        shutil.move(made.get("packed", made[form]), target)
    files = [target] if target.is_file() else [each for each in target.rglob("*") if each.is_file()]
    size = sum(each.stat().st_size for each in files)
    output.show(
        {
            "checkpoint_path": checkpoint_path,
            "destination": str(target),
            "kind": form,
            "file_size_bytes": size,
            "difference": difference,
            "base_model": trained_on,
        },
        Table(
            ["Property", "Value"],
            [
                ["Checkpoint Path", checkpoint_path],
                ["Kind", _FORMATS[form]],
                ["Base Model", trained_on],
                ["Total Size", size_text(size)],
                ["Loaded back", "not compared" if difference is None else f"±{difference:.1g}"],
                ["Written to", str(target)],
            ],
        ),
    )


def _base_folder(client: RestClient, path: str, *, is_needed: bool) -> Path | None:
    """Where this machine has the base model; nothing is fetched for a mere comparison."""
    from tinsmith.engine.local.config import EMBEDDED_MODEL, EMBEDDED_SOURCE, LocalEngineConfig
    from tinsmith.engine.local.model.sources import embedded_folder, model_folder
    from tinsmith.errors import EngineError

    name = client.get_weights_info_by_tinker_path(path).result().base_model
    config = LocalEngineConfig()
    if name == EMBEDDED_MODEL and not is_needed:
        folder = embedded_folder(config.cache_folder)
        return folder if folder.is_dir() else None
    try:
        return model_folder(EMBEDDED_SOURCE if name == EMBEDDED_MODEL else name, config)
    except EngineError as error:
        if not is_needed:
            return None
        raise CommandError(str(error), "Give the base model's folder with --base.") from error


def _check_quantization(quantization: str | None, form: Form) -> None:
    if quantization is None:
        return
    from tinsmith.cli.weights import k_quants
    from tinsmith.cli.weights.gguf_file import QUANTIZATIONS
    from tinsmith.cli.weights.packed_ints import NUM_BITS

    known = {"gguf": tuple(QUANTIZATIONS), "merged": tuple(NUM_BITS)}
    if form not in known:
        raise CommandError("--quantize needs --format gguf or --format merged")
    if quantization not in known[form]:
        raise CommandError(
            f"A {_FORMATS[form]} is quantized to {' or '.join(known[form])}, not to {quantization}",
            "For other types of GGUF export without --quantize, and let llama.cpp do it: "
            f"llama-quantize model.gguf small.gguf {quantization.upper()}"
            if form == "gguf"
            else None,
        )
    if quantization == "q4_k_m":
        k_quants.check()


def _name_base(adapter: Path, base: Path | None, output: Output) -> str:
    """The base model that the adapter's description names: what it was trained on.

    A served name may be a hub's, while the weights are a converted or another copy. Where this
    machine has that copy, the description leads to it; a hub's own copy keeps the hub's name.
    """
    import json

    from tinsmith.engine.local.config import EMBEDDED_MODEL, LocalEngineConfig

    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text("utf-8"))
    name = str(settings.get("base_model_name_or_path"))
    if base is None and name == EMBEDDED_MODEL:
        output.note(
            f"The adapter was trained on a copy of {name} that was converted from GGUF, which "
            "this machine does not have; on the hub's own weights it will do a little less well."
        )
    if base is None or base.is_relative_to(LocalEngineConfig().hub_folder):
        return name
    settings["base_model_name_or_path"] = str(base.absolute())
    file.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    return str(base.absolute())


def _compare(
    form: Form, base: Path | None, made: dict[str, Path], quantization: str | None, output: Output
) -> float | None:
    """How far the export's logits are from the adapter's; None where nothing can tell."""
    if base is None or importlib.util.find_spec("transformers") is None:
        output.note(
            "Not compared with the base model: that needs its folder (--base) and the extra "
            "'engine' (tinsmith doctor says what is missing)."
        )
        return None
    from tinsmith.engine.local.adapter_files.exports import check_export, check_packed

    with _told("loading back", "", output):
        if quantization is not None and "packed" in made:
            return check_packed(base, made["peft"], made["merged"], made["packed"], quantization)
        return check_export(form, base, made["peft"], made[form], quantization)


def _merge(base: Path, adapter: Path, target: Path, output: Output) -> None:
    from tinsmith.cli.weights import merging

    with _told("merging", f"into {base.name}", output) as tell:
        merging.merge(base, adapter, target, tell)


def _pack(folder: Path, quantization: str, output: Output) -> Path:
    from tinsmith.cli.weights import packed_ints

    target = folder.with_name("packed")
    with _told("packing", f"as {quantization}", output) as tell:
        packed_ints.write(folder, target, quantization, tell)
    return target


def _write_gguf(
    folder: Path, target: Path, name: str, quantization: str | None, output: Output
) -> None:
    from tinsmith.cli.weights import gguf_file

    with _told("writing GGUF", "", output) as tell:
        gguf_file.write(folder, target, name, tell, quantization=quantization)


@contextmanager
def _told(stage_name: str, facts: str, output: Output) -> Iterator[Tell]:
    """A stage that is shown in steps of fifty tensors."""
    from tinsmith.cli.progress import Progress

    with Progress(is_quiet=output.is_json).stage(stage_name, total=1.0) as stage:
        stage.update(0.0, facts)

        def tell(done: int, total: int, name: str) -> None:
            if done == total or done % 50 == 0:
                stage.update(done / total, name)

        yield tell
