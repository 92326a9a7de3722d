"""An adapter merged into its base model: a folder that any library loads as a plain model.

Works on the files, one tensor at a time and without torch, so that a model needs no more memory
than its largest matrix. Each changed matrix is computed in float32 and stored in the type that
the base model has.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tinsmith.cli.progress import Tell
from tinsmith.engine.stored_tensors import Array, Stored, stored_tensors
from tinsmith.errors import ValidationError

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth")


def merge(base: Path, adapter: Path, target: Path, tell: Tell) -> int:
    """Write the merged model into the folder `target`; how many matrices were changed."""
    settings = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    config = json.loads((base / "config.json").read_text("utf-8"))
    scale = settings["lora_alpha"] / settings["r"]
    weights = stored_tensors(sorted(base.glob("*.safetensors")))
    changes = stored_tensors([adapter / "adapter_model.safetensors"])
    pairs = _pairs(changes)
    if _HEAD in pairs and _HEAD not in weights:
        # The output matrix was the embedding; from now on it is one of its own.
        weights[_HEAD] = weights[_EMBEDDING]
        config["tie_word_embeddings"] = False
    unknown = sorted(pairs.keys() - weights.keys())
    if unknown:
        raise ValidationError(
            f"the adapter changes {unknown[0]!r}, which the base model in {base} does not have"
        )
    target.mkdir(parents=True, exist_ok=True)
    with (target / "model.safetensors").open("wb") as file:
        file.write(_header(weights))
        for number, (name, stored) in enumerate(weights.items(), 1):
            if name in pairs:
                a, b = (changes[each].read() for each in pairs[name])
                file.write(_encoded(stored.read() + scale * (b @ a), stored.dtype))
            else:
                file.write(stored.read_bytes())
            tell(number, len(weights), name)
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return len(pairs)


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


def _header(tensors: dict[str, Stored]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in tensors.items():
        begin, end = end, end + stored.num_bytes
        entries[name] = {
            "dtype": stored.dtype,
            "shape": stored.shape,
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _encoded(values: Array, dtype: str) -> bytes:
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4").view("<u4")
    # To the nearest, halves to even, as bfloat16 conversions do everywhere.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    encoded: bytes = rounded.astype("<u2").tobytes()
    return encoded
