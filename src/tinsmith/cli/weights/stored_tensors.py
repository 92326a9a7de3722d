"""Tensors in safetensors files, read one at a time and without torch."""

from __future__ import annotations

import json
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


@dataclass(frozen=True, slots=True)
class Stored:
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
            raise ValidationError(
                f"cannot read a matrix of type {self.dtype}; known: F32, F16, BF16"
            )
        return flat.reshape(self.shape)


def stored_tensors(paths: list[Path]) -> dict[str, Stored]:
    """What the headers of some files say is in them."""
    tensors: dict[str, Stored] = {}
    for path in paths:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                tensors[name] = Stored(
                    entry["dtype"], entry["shape"], path, 8 + num_bytes + first, last - first
                )
    if not tensors:
        raise ValidationError("there are no safetensors files")
    return tensors
