"""Tensors, dense and CSR, and the dtypes on the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import (
    TensorData,
    TensorDtype,
)
from tinsmith.types.arrays import int_array
from tinsmith.wire.limits import DEFAULT_LIMITS, Limits
from tinsmith.wire.proto.parts import ABSENT, by_number
from tinsmith.wire.protobuf import (
    Writer,
    as_array,
    as_int,
    as_message,
    as_packed,
)

_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
DTYPE_CODES: dict[TensorDtype, int] = {"float32": _FLOAT32, "int64": _INT64}
DTYPES: dict[int, tuple[TensorDtype, np.dtype[Any]]] = {
    _FLOAT32: ("float32", np.dtype("<f4")),
    _INT64: ("int64", np.dtype("<i8")),
    _INT32: ("int64", np.dtype("<i4")),
    _BFLOAT16: ("float32", np.dtype("<u2")),
}
I8, I4, F4 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")


def write_tensor(tensor: TensorData, *, narrow: bool = False) -> Writer:
    """`narrow` sends integers as int32, where the protocol says so."""
    writer = Writer()
    values = int_array(tensor.numpy) if narrow and tensor.dtype == "int64" else tensor.numpy
    if tensor.csr_rows is not None and tensor.csr_columns is not None:
        csr = Writer()
        for number, part in ((1, values), (2, tensor.csr_rows), (3, tensor.csr_columns)):
            if part.size:
                csr.array(number, part)
        writer.message(2, csr)
    else:
        writer.array(1, values)
    writer.varint(3, _INT32 if values.dtype == I4 else DTYPE_CODES[tensor.dtype])
    if tensor.shape is not None:
        writer.packed(4, tensor.shape)
    return writer


def read_tensor(body: bytes, start: int, stop: int, limits: Limits = DEFAULT_LIMITS) -> TensorData:
    dense, csr = ABSENT, None
    code, shape = 0, []
    for number, begin, end in as_message(body, start, stop):
        if number == 1:
            dense, csr = (begin, end), None
        elif number == 3:
            code = as_int(begin, end)
        elif number == 4:
            shape += as_packed(body, begin, end)
        elif number == 2:
            csr = (begin, end)
    if code not in DTYPES:
        raise ValidationError(f"unknown dtype code {code}", "dtype")
    if len(shape) > limits.max_tensor_rank:
        raise TooLargeError(f"more than {limits.max_tensor_rank} dimensions", "shape")
    if csr is None:
        flat = widen(body, *dense, code)
        # No shape means a vector; a scalar looks the same on the wire.
        return TensorData.dense(flat, shape or [flat.size])
    parts = by_number(as_message(body, *csr))
    return TensorData(
        widen(body, *parts.get(1, ABSENT), code),
        DTYPES[code][0],
        shape,
        as_array(body, *parts.get(2, ABSENT), I8),
        as_array(body, *parts.get(3, ABSENT), I8),
    )


def widen(body: bytes, start: int, stop: int, code: int) -> npt.NDArray[Any]:
    """The bytes of an array as one of the two public dtypes."""
    raw = as_array(body, start, stop, DTYPES[code][1])
    if code == _INT32:
        return raw.astype(I8)
    if code == _BFLOAT16:
        return (raw.astype("<u4") << 16).view(F4)
    return raw
