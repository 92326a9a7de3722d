"""Lists of numbers as arrays: fast, and with errors that name what does not fit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tinsmith.errors import ValidationError
from tinsmith.types.convert import kind_of

TensorDtype = Literal["int64", "float32"]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}

_PIECE_VALUES = 16 * 1024
"""How many values of a list are looked at in one call, during which no other thread runs."""

_NATIVE: dict[str, tuple[str, np.dtype[Any]]] = {
    "int64": ("q", np.dtype("int64")),
    "float32": ("f", np.dtype("float32")),
    "int32": ("i", np.dtype("int32")),
}


def int_array(values: Any, dtype: str = "int32") -> npt.NDArray[Any]:
    """A list (or anything sequence-like) of integers as a fresh or shared flat numpy array."""
    target = _NATIVE[dtype][1]
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu":
            raise ValidationError(f"expected integers, got an array of {values.dtype}")
        if values.dtype == target:
            return values
        if values.size and not _fits(values, target):
            raise ValidationError(f"a value does not fit {dtype}")
        return values.astype(target)
    if not isinstance(values, (list, tuple)):
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
            raise ValidationError(f"expected a list of integers, got {kind_of(values)}")
        values = list(values)
    _refuse_booleans(values)
    try:
        return _packed(values, dtype)
    except (struct.error, OverflowError):
        raise _first_bad_integer(values, target) from None


def as_array(data: Any, dtype: TensorDtype) -> npt.NDArray[Any]:
    """The values of a tensor as an array of its dtype; lists of lists keep their shape."""
    target = NUMPY_DTYPES[dtype]
    if isinstance(data, np.ndarray):
        if data.dtype == target:
            return data
        if data.dtype.kind not in "fiu" or (dtype == "int64" and data.dtype.kind == "f"):
            raise ValidationError(f"an array of {data.dtype} is not {dtype}", "data")
        return data.astype(target)
    if data is None:
        return np.empty(0, dtype=target)
    if not isinstance(data, (list, tuple)) and (
        isinstance(data, (str, bytes)) or not isinstance(data, Sequence)
    ):
        raise ValidationError(f"expected a list of numbers, got {kind_of(data)}", "data")
    if data and isinstance(data[0], (list, tuple)):
        return _nested_array(data, target)
    if dtype == "int64":
        _refuse_booleans(data, "data")
    try:
        return _packed(data, dtype)
    except (struct.error, OverflowError):
        return _coerced_array(data, dtype)


def short_array(values: npt.NDArray[Any], *, limit: int = 8) -> str:
    """A flat array for people: the first few numbers and how many there are."""
    head = ", ".join(f"{value:.6g}" for value in values[:limit])
    return f"[{head}]" if len(values) <= limit else f"[{head}, … {len(values)} values]"


def _packed(values: Sequence[Any], dtype: str) -> npt.NDArray[Any]:
    """A list of plain numbers as an array: struct reads one over twice as fast as numpy.

    A long one is read in pieces, so that other threads do not wait for all of it.
    """
    if len(values) > _PIECE_VALUES:
        starts = range(0, len(values), _PIECE_VALUES)
        return np.concatenate([_packed(values[s : s + _PIECE_VALUES], dtype) for s in starts])
    pack, native = _packing(len(values), dtype)
    # A call whose only arguments are the list's items hands them over with one copy; and the
    # bytearray keeps the array writable.
    return np.frombuffer(bytearray(pack(*values)), native)


@lru_cache(maxsize=4096)
def _packing(length: int, dtype: str) -> tuple[Callable[..., bytes], np.dtype[Any]]:
    code, native = _NATIVE[dtype]
    return struct.Struct(f"{length}{code}").pack, native


def _refuse_booleans(values: Sequence[Any], path: str = "") -> None:
    """They would pass for the integers 1 and 0, which no list of tokens means."""
    if values and isinstance(values[0], bool):
        raise ValidationError("expected integers, got booleans", path)


def _fits(values: npt.NDArray[Any], target: np.dtype[Any]) -> bool:
    info = np.iinfo(target)
    return bool(values.min() >= info.min and values.max() <= info.max)


def _first_bad_integer(values: Sequence[Any], target: np.dtype[Any]) -> ValidationError:
    least, most = int(np.iinfo(target).min), int(np.iinfo(target).max)
    for index, value in enumerate(values):
        if not hasattr(value, "__index__"):
            return ValidationError(f"expected an integer, got {kind_of(value)}", f"[{index}]")
        if not least <= int(value) <= most:
            return ValidationError(f"{int(value)} does not fit {target}", f"[{index}]")
    return ValidationError("expected a list of integers")


def _nested_array(data: Sequence[Any], target: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        values = _rows(data)
    except ValueError:
        raise ValidationError("rows differ in length; a tensor is rectangular", "data") from None
    if values.dtype.kind not in "fiu" or (target.kind == "i" and values.dtype.kind == "f"):
        raise ValidationError(f"expected numbers that fit {target}", "data")
    return values.astype(target)


def _rows(data: Sequence[Any]) -> npt.NDArray[Any]:
    """What numpy makes of lists of lists, some rows at a time."""
    num_rows = max(1, _PIECE_VALUES // max(1, len(data[0])))
    starts = range(0, len(data), num_rows)
    parts = [np.asarray(data[start : start + num_rows]) for start in starts]
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
        return np.asarray(data)  # numpy says what they are together
    return np.concatenate(parts)


def _coerced_array(data: Sequence[Any], dtype: TensorDtype) -> npt.NDArray[Any]:
    """The slow way, for lists that hold something else than plain numbers: find what it is."""
    target = NUMPY_DTYPES[dtype]
    if dtype == "int64":
        whole = [int(v) if isinstance(v, float) and v.is_integer() else v for v in data]
        try:
            return _packed(whole, dtype)
        except (struct.error, OverflowError):
            raise _first_bad_integer(whole, target).under("data") from None
    for index, value in enumerate(data):
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            problem = f"expected a number, got {kind_of(value)}"
            raise ValidationError(problem, f"data[{index}]")
    try:
        with np.errstate(over="raise"):
            return np.asarray([float(value) for value in data], dtype=target)
    except (OverflowError, FloatingPointError):
        raise ValidationError("a number is too large for float32", "data") from None


assert set(get_args(TensorDtype)) == set(NUMPY_DTYPES)
