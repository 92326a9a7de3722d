"""Where an adapter to be imported is: a folder, or a repository of a hub, whose two files are
fetched."""

from __future__ import annotations

import json
from pathlib import Path

from tinsmith.cli.failures import CommandError
from tinsmith.types.imports import ADAPTER_FILES

HUB = "hf:"
"""What the names of a hub's repositories begin with, as in hf:owner/name@revision."""


def adapter_folder(source: str) -> Path:
    """The folder of this machine that has the adapter's files."""
    folder = _fetched(source.removeprefix(HUB)) if source.startswith(HUB) else Path(source)
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise CommandError(
                f"There is no {name} in {source}",
                "A PEFT adapter has adapter_config.json and adapter_model.safetensors. One saved "
                "as .bin can run code when it is read: save it again with "
                "save_pretrained(..., safe_serialization=True).",
            )
    return folder


def trained_on(folder: Path) -> str | None:
    """The base model that the adapter's description names, if it names one."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        name = settings.get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CommandError(f"{folder / 'adapter_config.json'} is not a JSON object") from error
    return name if isinstance(name, str) else None


def _fetched(repository: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise CommandError(
            "huggingface_hub is required to import from a hub.",
            "Install it with: pip install huggingface_hub",
        ) from error
    repo_id, _, revision = repository.partition("@")
    try:
        files = [
            hf_hub_download(repo_id=repo_id, filename=name, revision=revision or None)
            for name in ADAPTER_FILES
        ]
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise CommandError(
            f"{HUB}{repository} could not be fetched: {error}",
            "It must hold adapter_config.json and adapter_model.safetensors; for a private "
            "repository run: hf auth login",
        ) from error
    return Path(files[0]).parent
