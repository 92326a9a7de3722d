"""Tensors in safetensors files: what their headers say, read one at a time and without torch.

The format is a length, a JSON header that says where each tensor lies, and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinsmith.errors import ValidationError

Array = npt.NDArray[Any]

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own library."""

INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """A tensor as a header describes it, without its offsets."""

    dtype: str
    shape: list[int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    dtype: str
    shape: list[int]
    path: Path
    begin: int
    num_bytes: int

    @property
    def entry(self) -> Entry:
        return Entry(self.dtype, self.shape, self.num_bytes)

    def read_bytes(self, num_rows: int | None = None) -> bytes:
        """All of it, or its first rows."""
        rows = self.shape[0] if self.shape else 1
        num_bytes = self.num_bytes if num_rows is None else self.num_bytes // rows * num_rows
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(num_bytes)

    def read(self) -> Array:
        """As float32."""
        return decode(self.read_bytes(), self.dtype).reshape(self.shape)


def decode(data: bytes, dtype: str) -> Array:
    """Numbers of a type as float32."""
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    raise ValidationError(f"cannot read a matrix of type {dtype}; known: F32, F16, BF16")


def encode(values: Array, dtype: str) -> bytes:
    """Numbers as bytes of a type, each rounded to the nearest."""
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4").view("<u4")
    # To the nearest, halves to even, as bfloat16 conversions do everywhere.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    encoded: bytes = rounded.astype("<u2").tobytes()
    return encoded


def weight_files(folder: Path) -> list[Path]:
    """A model folder's safetensors files: those that its index names, where it has one."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    return [folder / name for name in sorted(names)]


def stored_tensors(
    paths: Iterable[Path], *, max_header_bytes: int = MAX_HEADER_BYTES
) -> dict[str, Stored]:
    """What the headers of some files say is in them."""
    tensors: dict[str, Stored] = {}
    for path in paths:
        size = path.stat().st_size
        try:
            start, header = _read_header(path, max_header_bytes)
            for name, entry in header.items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    if not 0 <= first <= last <= size - start:
                        raise ValueError(f"{name!r} lies outside the file")
                    if not all(type(each) is int and each >= 0 for each in entry["shape"]):
                        raise ValueError(f"{name!r} has the shape {entry['shape']!r}")
                    if not isinstance(entry["dtype"], str):
                        raise ValueError(f"{name!r} has the type {entry['dtype']!r}")
                    tensors[name] = Stored(
                        entry["dtype"], entry["shape"], path, start + first, last - first
                    )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValidationError(f"is not a safetensors file: {error}", path.name) from error
    if not tensors:
        raise ValidationError("there are no safetensors files")
    return tensors


def num_elements(tensors: Mapping[str, Stored | Entry]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """What a file of these tensors begins with; their bytes follow in the same order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.num_bytes
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _read_header(path: Path, max_bytes: int) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and the header."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > max_bytes:
            raise ValueError(f"its header would have {num_bytes} bytes; at most {max_bytes}")
        return 8 + num_bytes, json.loads(file.read(num_bytes))
