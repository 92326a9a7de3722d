"""The parts of a weight in few bits: which there are, of what shapes and types, and words of codes.

A part that does not fit the others is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.stored_tensors import Stored
from tinsmith.errors import EngineError

Tensors = Mapping[str, Stored]

WORD_BITS = 32

_WORDS = ("I32",)
_FLOATS = ("F64", "F32", "F16", "BF16")
_TYPES = {"zeros": _WORDS, "groups": ("I32", "I64"), "scales": _FLOATS}


def expect(stored: Tensors, parts: Mapping[str, str], role: str, *shapes: list[int]) -> None:
    """Refuse codes that are not words, or another part, where there is one, of other numbers than
    it has to have."""
    codes = stored[parts["codes"]]
    if codes.dtype not in _WORDS:
        raise misshapen(parts["codes"], codes)
    if role not in parts:
        return
    part = stored[parts[role]]
    if part.shape not in shapes or part.dtype not in _TYPES[role]:
        raise EngineError(
            f"{parts[role]!r} is stored as {part.dtype} of shape {part.shape}, and beside "
            f"{parts['codes']!r} of shape {codes.shape} it has to be {_TYPES[role][0]} of shape "
            f"{shapes[0]} (group_size, bits)"
        )


def parts_of(
    stored: Tensors, needed: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, str]:
    missing = [name for name in needed.values() if name not in stored]
    if missing:
        has = next(name for name in needed.values() if name in stored)
        raise EngineError(f"the model has {has!r} and no {missing[0]!r}")
    extra = {role: name for role, name in (optional or {}).items() if name in stored}
    return {**needed, **extra}


def dimensions(name: str, tensor: Stored, count: int) -> list[int]:
    if len(tensor.shape) != count:
        raise misshapen(name, tensor)
    return tensor.shape


def misshapen(name: str, tensor: Stored, beside: Stored | None = None) -> EngineError:
    other = f" beside scales of shape {beside.shape}" if beside is not None else ""
    return EngineError(f"{name!r} is stored as {tensor.dtype} of shape {tensor.shape}{other}")


def num_words(numbers: int, bits: int) -> int:
    return math.ceil(numbers * bits / WORD_BITS)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """(rows, count) whole numbers from words (rows, …), of which the lowest bits are the first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers = (words.int()[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)[..., :count]
