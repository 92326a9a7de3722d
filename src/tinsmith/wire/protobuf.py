"""Protobuf's encoding, as far as our messages need it: varints, doubles and length-prefixed bytes.

Why by hand: the general library copies every array two or three times and makes a Python object
for every field. Here a message is written as a list of buffers that is joined once, and read by
position in the body, so tensors are never copied. A field that must not repeat but does counts with
its last value (docs/decisions/0002-protobuf-by-hand.md).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.wire.limits import NO_NUL

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Buffer = bytes | memoryview

_SMALL = [bytes([n]) for n in range(128)]
_HEADS = [bytes([number << 3 | BYTES, size]) for number in range(16) for size in range(128)]
"""The head of a field with content, by number and size: nearly all are so small."""
_DOUBLE = struct.Struct("<d")


class Writer:
    """A message under construction: buffers in order, and their total size."""

    __slots__ = ("parts", "size")

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        self.size = 0

    def varint(self, number: int, value: int) -> None:
        self._put(key(number, VARINT) + varint(value))

    def double(self, number: int, value: float) -> None:
        self._put(key(number, FIXED64) + _DOUBLE.pack(value))

    def data(self, number: int, value: Buffer) -> None:
        size = len(value)
        self._put(_head(number, size))
        if size:
            self.parts.append(value)
            self.size += size

    def text(self, number: int, value: str) -> None:
        self.data(number, value.encode())

    def array(self, number: int, value: npt.NDArray[Any]) -> None:
        """An array's bytes, without copying them if they are contiguous."""
        self.data(number, array_bytes(value))

    def packed(self, number: int, values: list[int]) -> None:
        if values:
            self.data(number, b"".join(varint(value) for value in values))

    def message(self, number: int, value: Writer) -> None:
        self._put(_head(number, value.size))
        self.parts += value.parts
        self.size += value.size

    def to_bytes(self) -> bytes:
        return b"".join(self.parts)

    def _put(self, piece: bytes) -> None:
        self.parts.append(piece)
        self.size += len(piece)


def key(number: int, kind: int) -> bytes:
    return _SMALL[number << 3 | kind]  # every field number we use is below 16


def _head(number: int, size: int) -> bytes:
    """What stands before content of so many bytes."""
    if size < 128:
        return _HEADS[number << 7 | size]
    return _SMALL[number << 3 | BYTES] + varint(size)


def varint(value: int) -> bytes:
    if 0 <= value < 128:
        return _SMALL[value]
    if 0 < value < 1 << 14:
        return bytes((value & 127 | 128, value >> 7))
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def array_bytes(value: npt.NDArray[Any]) -> Buffer:
    if value.size == 0:
        return b""
    return np.ascontiguousarray(value).data.cast("B")


# A field as found in a body: (number, start, stop), where body[start:stop] is its content;
# or (number, value, NUMBER) for a varint, which has no content of its own.
Field = tuple[int, int, int]
NUMBER = -1

MAX_FIELDS = 1 << 18
"""Most fields of one message; the list of them takes up to seventy times their bytes."""


def fields(body: bytes, start: int, stop: int) -> list[Field]:
    """The fields of the message at body[start:stop], in order.

    Positions instead of slices: a datum has some twenty fields, and making an object for each
    would cost more than reading them. What a field means, and whether it is known, is for the
    caller to say.
    """
    found: list[Field] = []
    position = start
    try:
        while position < stop:
            if len(found) == MAX_FIELDS:
                raise TooLargeError(f"a message has more than {MAX_FIELDS} fields")
            tag = body[position]
            position += 1
            if tag >= 128:
                tag, position = _varint(body, position - 1)
            if tag < 8:
                raise ValidationError("protobuf field number 0 is not allowed")
            kind = tag & 7
            if kind == BYTES:
                size = body[position]
                position += 1
                if size >= 128:
                    # Two bytes is the common case, worth the line.
                    size = size & 127 | body[position] << 7
                    position += 1
                    if size >= 1 << 14:
                        size, position = _varint(body, position - 2)
                begin = position
                position += size
                found.append((tag >> 3, begin, position))
            elif kind == VARINT:
                value = body[position]
                position += 1
                if value >= 128:
                    value, position = _varint(body, position - 1)
                found.append((tag >> 3, value, NUMBER))
            elif kind in (FIXED64, FIXED32):
                begin = position
                position += 8 if kind == FIXED64 else 4
                found.append((tag >> 3, begin, position))
            else:
                raise ValidationError(f"unsupported protobuf wire type {kind}")
    except IndexError:
        position = stop + 1
    if position > stop:
        raise ValidationError("the protobuf message ends too early")
    return found


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = body[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, position
    raise ValidationError("a protobuf number is longer than ten bytes")


def as_int(start: int, stop: int) -> int:
    """A varint as a signed 64-bit integer."""
    if stop != NUMBER:
        raise ValidationError("expected a number")
    return start - (1 << 64) if start >= 1 << 63 else start


def as_int32(start: int, stop: int) -> int:
    number = as_int(start, stop)
    if not -(1 << 31) <= number < 1 << 31:
        raise ValidationError(f"{number} does not fit a 32-bit integer")
    return number


def as_bytes(body: bytes, start: int, stop: int) -> bytes:
    if stop == NUMBER:
        raise ValidationError("expected bytes")
    return body[start:stop]


def as_text(body: bytes, start: int, stop: int) -> str:
    try:
        text = as_bytes(body, start, stop).decode()
    except UnicodeDecodeError:
        raise ValidationError("expected UTF-8 text") from None
    if "\0" in text:
        raise ValidationError(NO_NUL)
    return text


def as_double(body: bytes, start: int, stop: int) -> float:
    if start == stop:
        return 0.0  # a map entry may leave out a value that is the default
    if stop - start != _DOUBLE.size:
        raise ValidationError("expected a 64-bit number")
    number: float = _DOUBLE.unpack_from(body, start)[0]
    return number


def as_message(body: bytes, start: int, stop: int) -> list[Field]:
    """The fields of a message inside the message."""
    if stop == NUMBER:
        raise ValidationError("expected a message")
    return fields(body, start, stop)


def as_packed(body: bytes, start: int, stop: int) -> list[int]:
    """Repeated integers: one entry of the unpacked form, or a packed run."""
    if stop == NUMBER:
        return [as_int(start, stop)]
    numbers: list[int] = []
    position = start
    while position < stop:
        try:
            number, position = _varint(body, position)
        except IndexError:
            position = stop + 1
        if position > stop:
            raise ValidationError("a packed list of numbers ends too early")
        if len(numbers) == MAX_FIELDS:
            raise TooLargeError(f"a packed list has more than {MAX_FIELDS} numbers")
        numbers.append(as_int(number, NUMBER))
    return numbers


def as_array(body: bytes, start: int, stop: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A read-only view of the bytes as an array."""
    size = stop - start
    if stop == NUMBER or size % dtype.itemsize:
        problem = "a number" if stop == NUMBER else f"{size} bytes"
        raise ValidationError(f"{problem} where a whole number of {dtype} values should be")
    if not size:
        return np.empty(0, dtype=dtype)
    return np.frombuffer(body, dtype=dtype, count=size // dtype.itemsize, offset=start)
