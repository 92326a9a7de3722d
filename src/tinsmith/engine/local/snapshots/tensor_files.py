"""safetensors files: written piece by piece, so that tensors are not copied on the way, and read.

The format is a length, a JSON header that says where each tensor lies, and the tensors' bytes.
All of ours are float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tinsmith.errors import EngineError, ValidationError


def encode_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The pieces of a file with these float32 CPU tensors, in order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise EngineError(
                f"{name} is {tensor.dtype} on {tensor.device}, not float32 on the CPU"
            )
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little")
    yield encoded
    for tensor in tensors.values():
        yield memoryview(tensor.detach().contiguous().numpy()).cast("B")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, by name, on the CPU."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValidationError(f"is not a safetensors file: {error}", path.name) from error


def tensor_names(path: Path) -> list[str]:
    """The names in a file's header, without reading the tensors."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValidationError(f"is not a safetensors file: {error}", path.name) from error
