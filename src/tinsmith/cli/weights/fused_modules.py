"""Adapters of modules that are rows of one matrix in the model, joined to one adapter of it.

Queries, keys and values of Qwen3.5's linear attention have an adapter each, and so have the gate
and x of a Mamba layer, though the model has one matrix of them all. PEFT knows the model's modules
only. In one adapter of the sum of their ranks, A has those of the modules one above the other, and
B has theirs along the diagonal; rows that belong to none of them are zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinsmith.engine.adapter_names import FUSED
from tinsmith.engine.stored_tensors import Entry, Stored, stored_tensors, weight_files
from tinsmith.errors import ValidationError

_WITH_OTHER_ROWS = ("in_proj",)


@dataclass(frozen=True, slots=True)
class JoinedFactor:
    """The A or B of several modules as one, in the form of a `Stored` tensor."""

    parts: tuple[Stored, ...]
    num_rows: int | None
    """Of B; None for A."""

    @property
    def shape(self) -> list[int]:
        if self.num_rows is None:
            return [sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]]
        return [self.num_rows, sum(part.shape[1] for part in self.parts)]

    @property
    def entry(self) -> Entry:
        return Entry("F32", self.shape, 4 * math.prod(self.shape))

    def read_bytes(self) -> bytes:
        if self.num_rows is None:
            return np.concatenate([part.read() for part in self.parts]).astype("<f4").tobytes()
        whole = np.zeros(self.shape, "<f4")
        row = column = 0
        for part in self.parts:
            num_rows, rank = part.shape
            whole[row : row + num_rows, column : column + rank] = part.read()
            row, column = row + num_rows, column + rank
        return whole.tobytes()


def join_modules(
    stored: Mapping[str, Stored], base: Path | None
) -> dict[str, Stored | JoinedFactor]:
    """An adapter's tensors, those of modules that the model has as one joined, in their order."""
    joined: dict[str, Stored | JoinedFactor] = {}
    for name, tensor in stored.items():
        whole, parts = _whole_of(name, stored)
        if whole is None:
            joined[name] = tensor
        elif whole not in joined:
            is_b = name.endswith(".lora_B.weight")
            joined[whole] = JoinedFactor(parts, _num_rows(whole, parts, base) if is_b else None)
    return joined


def joined_ranks(tensors: Mapping[str, Stored | JoinedFactor]) -> dict[str, int]:
    """The last parts of the names of joined modules, and their ranks."""
    return {
        name.split(".")[-3]: tensor.shape[0]
        for name, tensor in tensors.items()
        if isinstance(tensor, JoinedFactor) and tensor.num_rows is None
    }


def _whole_of(name: str, stored: Mapping[str, Stored]) -> tuple[str | None, tuple[Stored, ...]]:
    """The name of the joined tensor that this one is a part of, and all of its parts."""
    layer, module, ending = name.rsplit(".", 3)[0], name.split(".")[-3], name.split(".")[-2]
    for whole, modules in FUSED.items():
        names = [f"{layer}.{each}.{ending}.weight" for each in modules]
        if module in modules and all(each in stored for each in names):
            parts = tuple(stored[each] for each in names)
            return f"{layer}.{whole}.{ending}.weight", parts
    return None, ()


def _num_rows(name: str, parts: tuple[Stored, ...], base: Path | None) -> int:
    """Rows of the model's matrix, which may have more than the modules have."""
    module = name.split(".")[-3]
    if module not in _WITH_OTHER_ROWS:
        return sum(part.shape[0] for part in parts)
    if base is None:
        raise ValidationError(
            f"the adapter changes some rows of {module!r}, and how many there are is in the base "
            "model; give its folder with --base"
        )
    wanted = name.partition(".layers.")[2].removesuffix(".lora_B.weight") + ".weight"
    for each, tensor in stored_tensors(weight_files(base)).items():
        if each.partition(".layers.")[2] == wanted:
            return tensor.shape[0]
    raise ValidationError(f"the base model in {base} has no {wanted!r}, which the adapter changes")
