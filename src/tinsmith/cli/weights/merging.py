"""An adapter merged into its base model: a folder that any library loads as a plain model.

Works on the files, one tensor at a time and without torch, so that a model needs no more memory
than its largest matrix. Each changed matrix is computed in float32 and stored in the type that
the base model has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tinsmith.cli.progress import Tell
from tinsmith.engine.stored_tensors import (
    Stored,
    encode,
    encode_header,
    stored_tensors,
    weight_files,
)
from tinsmith.errors import ValidationError

_HEAD = "lm_head.weight"
_HEADS = (_HEAD, "embed_out.weight")
_WRAPPERS = ("model", "language_model", "backbone")
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
_MIXTRAL = {
    ".mlp.": ".block_sparse_moe.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth")


def merge(base: Path, adapter: Path, target: Path, tell: Tell) -> int:
    """Write the merged model into the folder `target`; how many matrices were changed."""
    settings = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    config = json.loads((base / "config.json").read_text("utf-8"))
    scale = settings["lora_alpha"] / settings["r"]
    weights = stored_tensors(weight_files(base))
    changes = stored_tensors([adapter / "adapter_model.safetensors"])
    pairs = {}
    for name, pair in _pairs(changes).items():
        found = _tensor_of(name, weights)
        if found is None and name == _HEAD:
            # The output matrix was the embedding; from now on it is one of its own.
            weights[_HEAD] = weights[_embedding(weights, base)]
            for part in (config, config.get("text_config")):
                if isinstance(part, dict):
                    part["tie_word_embeddings"] = False
            found = _HEAD
        if found is None:
            raise ValidationError(
                f"the adapter changes {name!r}, which the base model in {base} does not have; "
                "experts are merged where the model's files have a matrix for each"
            )
        pairs[found] = pair
    target.mkdir(parents=True, exist_ok=True)
    with (target / "model.safetensors").open("wb") as file:
        entries = {name: stored.entry for name, stored in weights.items()}
        file.write(encode_header(entries, {"format": "pt"}))
        for number, (name, stored) in enumerate(weights.items(), 1):
            if name in pairs:
                a, b = (changes[each].read() for each in pairs[name])
                file.write(encode(stored.read() + scale * (b @ a), stored.dtype))
            else:
                file.write(stored.read_bytes())
            tell(number, len(weights), name)
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return len(pairs)


def _tensor_of(name: str, weights: Mapping[str, Stored]) -> str | None:
    """The tensor in the files that a module's weight is loaded from.

    `transformers` renames on the way: what wraps the text part of a model that also sees images
    has changed places, and some families call their output matrix by another name.
    """
    if name in weights:
        return name
    if (mixtral := _mixtral_name(name)) in weights:
        return mixtral
    wanted = _HEADS if name == _HEAD else (_bare(name),)
    found = [each for each in weights if _bare(each) in wanted]
    return found[0] if len(found) == 1 else None


def _mixtral_name(name: str) -> str:
    """What its files call a matrix of an expert."""
    for plain, own in _MIXTRAL.items():
        name = name.replace(plain, own)
    return name


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _embedding(weights: Mapping[str, Stored], base: Path) -> str:
    found = [each for each in weights if each.endswith(_EMBEDDINGS)]
    if len(found) != 1:
        raise ValidationError(
            f"the adapter changes the output matrix, which is the embedding in {base}, and "
            f"{len(found)} tensors there could be the embedding"
        )
    return found[0]


def _pairs(changes: dict[str, Stored]) -> dict[str, tuple[str, str]]:
    """From the name of a base matrix to the names of its A and B."""
    pairs = {}
    for name in changes:
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            pairs[f"{stem.removeprefix('base_model.model.')}.weight"] = (
                name,
                f"{stem}.lora_B.weight",
            )
    if 2 * len(pairs) != len(changes):
        other = next(name for name in changes if ".lora_" not in name)
        raise ValidationError(f"only plain LoRA adapters can be merged; this one has {other!r}")
    return pairs
