"""A model in few bits as one in full: written once, a tensor at a time.

What comes out is a model folder like any other, so that everything that reads a base model (the
decoder, `transformers`, exports, comparisons) reads this one. Its weights have the type that the
model's settings name; what was stored in full is copied as it is.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinsmith.engine.local.model.packed_files.layouts import (
    Packed,
    is_of_activations,
    layout_name,
    packed_weights,
    quantization_of,
)
from tinsmith.engine.local.model.settings import read_settings
from tinsmith.engine.stored_tensors import (
    INDEX,
    Entry,
    Stored,
    encode_header,
    stored_tensors,
    weight_files,
)
from tinsmith.errors import EngineError

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_STORED_TYPES = {
    **_TORCH,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}

VERSION = 2
"""Raised when a conversion writes other numbers than before: those made earlier are not used any
more. 2 reads a GPTQ zero point of zero."""

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """The model in a folder whose settings speak of weights in few bits."""

    folder: Path
    layout: str
    """What the settings call the way in which its weights are stored."""

    settings: dict[str, Any]
    stored: Mapping[str, Stored]
    packed: Mapping[str, Packed]

    @staticmethod
    def of(folder: Path) -> PackedFiles | None:
        """None where nothing is in few bits; a layout that is not known is an error."""
        if not (folder / "config.json").is_file():
            return None
        settings = read_settings(folder / "config.json")
        quantization = quantization_of(settings)
        if quantization is None:
            return None
        stored = stored_tensors(weight_files(folder))
        return PackedFiles(
            folder,
            layout_name(quantization),
            settings,
            stored,
            packed_weights(quantization, stored),
        )

    def entries(self) -> dict[str, Entry]:
        """The tensors that are written, by name."""
        return {
            name: entry for file in self._files().values() for name, entry in self._of(file).items()
        }

    def nbytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries().values())

    def write(self, target: Path, progress: Progress) -> None:
        """The whole model into a folder that is there and empty."""
        self.write_settings(target)
        whole, done = self.nbytes(), 0
        files = self._files()
        for file, names in files.items():
            entries = self._of(names)
            with (target / file.name).open("wb") as written:
                written.write(encode_header(entries, {"format": "pt"}))
                for name, entry in entries.items():
                    written.write(self._bytes(name, entry))
                    done += entry.num_bytes
                    progress(done / whole)
        if len(files) > 1:
            places = {name: file.name for file, names in files.items() for name in self._of(names)}
            index = {"metadata": {"total_size": whole}, "weight_map": places}
            (target / INDEX).write_text(json.dumps(index, indent=2), "utf-8")

    def write_settings(self, target: Path) -> None:
        """All but the weights: settings that say nothing of few bits, and the other files."""
        for path in sorted(self.folder.iterdir()):
            is_weights = path.name.endswith((*_WEIGHTS, ".index.json"))
            if path.is_file() and not is_weights and path.name != "config.json":
                shutil.copyfile(path, target / path.name)
        settings = copy.deepcopy(self.settings)
        for part in (settings, settings.get("text_config")):
            if isinstance(part, dict):
                part.pop("quantization_config", None)
        (target / "config.json").write_text(json.dumps(settings, indent=2), "utf-8")

    def _files(self) -> dict[Path, list[str]]:
        """For each file the names, in full, of what it is to hold."""
        parts = {part for packed in self.packed.values() for part in packed.parts.values()}
        first = {next(iter(packed.parts.values())): name for name, packed in self.packed.items()}
        files: dict[Path, list[str]] = {}
        for name, tensor in self.stored.items():
            if name in first:
                files.setdefault(tensor.path, []).append(first[name])
            elif name not in parts and not is_of_activations(name):
                files.setdefault(tensor.path, []).append(name)
        return files

    def _of(self, names: list[str]) -> dict[str, Entry]:
        return dict(self._entries(names))

    def _entries(self, names: list[str]) -> Iterator[tuple[str, Entry]]:
        dtype = self._dtype()
        for name in names:
            if name in self.packed:
                shape = self.packed[name].shape
                size = math.prod(shape) * _TORCH[dtype].itemsize
                yield name, Entry(dtype, list(shape), size)
            else:
                yield name, self.stored[name].entry

    def _bytes(self, name: str, entry: Entry) -> bytes:
        if name not in self.packed:
            return self.stored[name].read_bytes()
        packed = self.packed[name]
        try:
            read = {role: _tensor(self.stored[part]) for role, part in packed.parts.items()}
            dense = packed.dense(read)
        except (RuntimeError, IndexError, ValueError) as error:
            stored = [(part, self.stored[part].shape) for part in packed.parts.values()]
            parts = ", ".join(f"{part} {shape}" for part, shape in stored)
            raise EngineError(
                f"{name!r} could not be made of its parts, as {self.layout!r} has them: {parts} "
                f"({error})"
            ) from error
        if tuple(dense.shape) != packed.shape:
            raise EngineError(f"{name!r} came out as {tuple(dense.shape)}, not as {packed.shape}")
        written = dense.to(_TORCH[entry.dtype]).contiguous()
        if not written.isfinite().all():
            raise EngineError(f"{name!r} has numbers that are not finite in {entry.dtype}")
        return written.view(torch.uint8).numpy().tobytes()

    def _dtype(self) -> str:
        nested = self.settings.get("text_config")
        for part in (self.settings, nested if isinstance(nested, dict) else {}):
            named = part.get("dtype", part.get("torch_dtype"))
            if named in _DTYPES:
                return _DTYPES[named]
        return "BF16"


def _tensor(stored: Stored) -> torch.Tensor:
    if stored.dtype not in _STORED_TYPES:
        raise EngineError(f"a tensor of type {stored.dtype} is not read from packed files")
    data = torch.frombuffer(bytearray(stored.read_bytes()), dtype=_STORED_TYPES[stored.dtype])
    return data.reshape(stored.shape)
