"""Uploading a checkpoint to the Hugging Face Hub, as a PEFT adapter with a model card."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output
from tinsmith.cli.weights import checkpoint_files

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from tinsmith.client.rest import RestClient
    from tinsmith.types import WeightsInfoResponse

_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    repo_id: str | None
    """None: named after the base model and the run, in a branch named after the checkpoint."""
    is_private: bool
    revision: str | None
    commit_message: str | None
    create_pr: bool
    allow: tuple[str, ...]
    ignore: tuple[str, ...]
    with_model_card: bool


def push(client: RestClient, path: str, upload: Upload) -> str:
    """Upload a checkpoint; the repository that it is in now."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise CommandError(
            "huggingface_hub is required for this command.",
            "Install it with: pip install huggingface_hub, then run: hf auth login",
        ) from error
    from tinsmith.cli.weights.peft_layout import to_peft

    parsed = checkpoint_files.parse_downloadable(path)
    if upload.create_pr and upload.revision is not None:
        raise CommandError("Cannot specify both --create-pr and --revision")
    api = HfApi()
    try:
        api.whoami()
    except Exception as error:  # the library has many; whichever it is, there is no account
        raise CommandError("Not logged in", "Run: hf auth login") from error
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint_files.fetch(client, path, folder, Output(is_json=True))
        _check_is_adapter(folder)
        to_peft(folder)
        info = client.get_weights_info_by_tinker_path(path).result()
        _name_base_model(folder / "adapter_config.json", info.base_model)
        revision = upload.revision
        repo_id = upload.repo_id
        if repo_id is None:
            base = info.base_model.rpartition("/")[2]
            repo_id = repository_name(f"tinker-{base}-{parsed.training_run_id}")
            if not upload.create_pr:
                revision = revision or repository_name(parsed.checkpoint_id)
        try:
            # A name without an owner is completed by the hub.
            repo_id = api.create_repo(
                repo_id=repo_id, private=upload.is_private, exist_ok=True
            ).repo_id
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id=repo_id, branch=revision, exist_ok=True)
            _check_holds_nothing_else(repo_id, revision, path)
            card = folder / "README.md"
            if upload.with_model_card and not card.exists():
                card.write_text(model_card(path, repo_id, info), encoding="utf-8")
            _upload(api, folder, repo_id, revision, upload)
        except (ValueError, OSError) as error:
            raise CommandError(f"Failed to upload to the hub: {error}") from error
        return repo_id


def _upload(api: HfApi, folder: Path, repo_id: str, revision: str | None, upload: Upload) -> None:
    ignore = list(upload.ignore)
    if not upload.allow:
        ignore.append("checkpoint_complete")
    api.upload_folder(
        folder_path=str(folder),
        repo_id=repo_id,
        path_in_repo="",
        revision=revision,
        commit_message=upload.commit_message,
        create_pr=upload.create_pr,
        allow_patterns=list(upload.allow) or None,
        ignore_patterns=ignore or None,
    )


def repository_name(text: str) -> str:
    """
    >>> repository_name("tinker-Qwen3 8B-abc:train:0")
    'tinker-Qwen3-8B-abc-train-0'
    """
    return re.sub(r"-{2,}", "-", re.sub(r"[^\w.-]", "-", text, flags=re.ASCII)).strip("-_ .")


def model_card(path: str, repo_id: str, info: WeightsInfoResponse) -> str:
    """What a visitor of the repository reads first, with the fields that the hub understands."""
    from tinsmith.engine.local.config import EMBEDDED_MODEL

    trained = f"attn={info.train_attn}, mlp={info.train_mlp}, unembed={info.train_unembed}"
    copy = " It was trained on a copy that was converted from GGUF (Q4_1)."
    lines = [
        "---",
        f"base_model: {info.base_model}",
        "library_name: peft",
        "tags:",
        "- tinker",
        "- peft",
        "- lora",
        f"- base_model:adapter:{info.base_model}",
        f"tinker_path: {path}",
        "---",
        "",
        f"# A LoRA adapter for {info.base_model}",
        "",
        f"Exported from `{path}`.{copy if info.base_model == EMBEDDED_MODEL else ''}",
        "",
        "```python",
        "from peft import AutoPeftModelForCausalLM",
        "",
        f'model = AutoPeftModelForCausalLM.from_pretrained("{repo_id}")',
        "```",
        "",
        f"- Rank: {info.lora_rank}",
        f"- Trained: {trained}",
        "",
    ]
    return "\n".join(lines)


def _check_is_adapter(folder: Path) -> None:
    has_weights = any((folder / name).exists() for name in _ADAPTER_FILES)
    if not has_weights or not (folder / "adapter_config.json").exists():
        raise CommandError(
            "Checkpoint does not contain a PEFT adapter.",
            "Expected adapter_config.json and adapter_model.safetensors (or adapter_model.bin). "
            "Encrypted (.age) external weights cannot be uploaded.",
        )


def _name_base_model(file: Path, base_model: str) -> None:
    settings: dict[str, Any] = json.loads(file.read_text("utf-8"))
    if not isinstance(settings.get("base_model_name_or_path"), str):
        settings["base_model_name_or_path"] = base_model
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_holds_nothing_else(repo_id: str, revision: str | None, path: str) -> None:
    """Refuse to put a checkpoint over another one."""
    from huggingface_hub import hf_hub_download

    try:
        card = hf_hub_download(repo_id=repo_id, filename="README.md", revision=revision)
        text = Path(card).read_text("utf-8", errors="ignore")
    except Exception:  # no card, no branch: nothing that could be overwritten
        return
    found = re.search(r"tinker://[^\s`]+", text)
    if found and found[0] != path:
        raise CommandError(
            "Repo ID appears to contain a different Tinker checkpoint.",
            f"Found {found[0]}, expected {path}.",
        )
