"""An adapter's safetensors files: written piece by piece, so that tensors are not copied, and read.

All of ours are float32. The format is that of `stored_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tinsmith.engine.stored_tensors import Entry, encode_header
from tinsmith.errors import EngineError, ValidationError


def encode_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The pieces of a file with these float32 CPU tensors, in order."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise EngineError(
                f"{name} is {tensor.dtype} on {tensor.device}, not float32 on the CPU"
            )
    entries = {name: Entry("F32", list(t.shape), t.nbytes) for name, t in tensors.items()}
    yield encode_header(entries, metadata)
    for tensor in tensors.values():
        yield memoryview(tensor.detach().contiguous().numpy()).cast("B")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, by name, on the CPU."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValidationError(f"is not a safetensors file: {error}", path.name) from error
