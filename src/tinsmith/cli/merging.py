"""An adapter merged into its base model: a folder that any library loads as a plain model.

Works on the files, one tensor at a time and without torch, so that a model needs no more memory
than its largest matrix. Each changed matrix is computed in float32 and stored in the type that
the base model has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.errors import ValidationError

Array = npt.NDArray[Any]
Tell = Callable[[int, int, str], None]
"""Called with how many tensors are done, how many there are, and the name of the last."""

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    dtype: str
    shape: list[int]
    path: Path
    begin: int
    num_bytes: int

    def read_bytes(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.num_bytes)

    def read(self) -> Array:
        """As float32."""
        data = self.read_bytes()
        if self.dtype == "F32":
            flat = np.frombuffer(data, "<f4")
        elif self.dtype == "F16":
            flat = np.frombuffer(data, "<f2").astype(np.float32)
        elif self.dtype == "BF16":
            flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            raise ValidationError(f"cannot merge into a matrix of type {self.dtype}")
        return flat.reshape(self.shape)


def merge(base: Path, adapter: Path, target: Path, tell: Tell) -> int:
    """Write the merged model into the folder `target`; how many matrices were changed."""
    settings = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    config = json.loads((base / "config.json").read_text("utf-8"))
    scale = settings["lora_alpha"] / settings["r"]
    weights = _tensors(sorted(base.glob("*.safetensors")))
    changes = _tensors([adapter / "adapter_model.safetensors"])
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


def _pairs(changes: dict[str, _Stored]) -> dict[str, tuple[str, str]]:
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


def _tensors(paths: list[Path]) -> dict[str, _Stored]:
    """What the headers of some files say is in them."""
    tensors: dict[str, _Stored] = {}
    for path in paths:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                tensors[name] = _Stored(
                    entry["dtype"], entry["shape"], path, 8 + num_bytes + first, last - first
                )
    if not tensors:
        raise ValidationError("there are no safetensors files to merge")
    return tensors


def _header(tensors: dict[str, _Stored]) -> bytes:
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
