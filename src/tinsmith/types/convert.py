"""From an annotation to a function that checks and normalises a value.

`converter(int)` gives a function that returns an int or raises a `ValidationError` naming what is
wrong. Messages use these for their fields, both when a user builds one and when one comes off
the wire, so there is one answer to "is this value acceptable?".

Numbers are taken as numbers only: `"5"` is not an integer, `True` is not one either, and `3.0`
is (JSON has one kind of number). numpy scalars count as what they hold.
"""

from __future__ import annotations

import base64
import binascii
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from tinsmith.errors import ValidationError
from tinsmith.types.non_finite import NonFinite, from_json

Converter = Callable[[Any], Any]
T = TypeVar("T")

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_NESTING = 100
_BASE64_CHARACTERS = 64 * 1024


@dataclass(frozen=True)
class Bounds:
    """Limits on a number or on a length, as in `Annotated[float, Bounds(ge=0)]`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    finite: bool = False

    def check(self, value: Any) -> None:
        if self.finite and not math.isfinite(value):
            raise ValidationError(f"must be a finite number, got {value}")
        if self.ge is not None and not value >= self.ge:
            raise ValidationError(f"must be at least {self.ge}, got {value}")
        if self.gt is not None and not value > self.gt:
            raise ValidationError(f"must be greater than {self.gt}, got {value}")
        if self.le is not None and not value <= self.le:
            raise ValidationError(f"must be at most {self.le}, got {value}")
        if self.lt is not None and not value < self.lt:
            raise ValidationError(f"must be less than {self.lt}, got {value}")
        if self.min_length is not None and len(value) < self.min_length:
            raise ValidationError(f"must have at least {self.min_length} items, got {len(value)}")
        if self.max_length is not None and len(value) > self.max_length:
            raise ValidationError(f"must have at most {self.max_length} items, got {len(value)}")


@dataclass(frozen=True)
class Tagged:
    """Marks a union whose members are told apart by the field `tag`.

    Without `members`, each member's own literal under that field is its tag; a member whose
    field is an open string takes every tag that no other claims.
    """

    tag: str
    members: tuple[tuple[str, str], ...] = ()
    """(tag value, class name) pairs, for members whose field does not pin one value."""

    reopens: bool = False
    """Whether what a known member refuses goes to the open one, as a newer service may need."""


@cache
def converter(annotation: Any) -> Converter:
    """The check-and-normalise function of an annotation."""
    if isinstance(annotation, (str, ForwardRef)):
        raise TypeError(f"unresolved annotation {annotation!r}")
    simple = _SIMPLE.get(annotation)
    if simple is not None:
        return simple
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if origin is Literal:
        return _literal(args)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin in (list, Sequence):
        return _list(converter(args[0]))
    if origin in (dict, Mapping):
        return _dict(converter(args[1]))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum(annotation)
    if isinstance(annotation, type) and hasattr(annotation, "model_validate"):
        return _instance(annotation)
    if hasattr(annotation, "__supertype__"):
        return converter(annotation.__supertype__)
    raise TypeError(f"no converter for the annotation {annotation!r}")


def fields_of(obj: Any, what: str, known: tuple[str, ...]) -> dict[str, Any]:
    """A mapping that has no other fields than `known`; errors call it `what`."""
    if not isinstance(obj, Mapping):
        raise ValidationError(f"expected an object for {what}, got {kind_of(obj)}")
    for name in obj:
        if name not in known:
            raise ValidationError(f"{what} has no such field", str(name)[:80])
    return dict(obj)


def read_field(name: str, annotation: Any, value: Any) -> Any:
    """A field's value, converted; an error names the field."""
    try:
        return converter(annotation)(value)
    except ValidationError as error:
        raise error.under(name) from None


def kind_of(value: object) -> str:
    """How a message names a value's kind to a user."""
    if value is None:
        return "null"
    return type(value).__name__


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _anything(value: Any, room: int = MAX_NESTING) -> Any:
    """Free-form content, as long as it is not nested too deep to be written again."""
    if isinstance(value, (dict, list, tuple)):
        if not room:
            raise ValidationError(f"nested deeper than {MAX_NESTING} levels")
        for item in value.values() if isinstance(value, dict) else value:
            _anything(item, room - 1)
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValidationError(f"expected a string, got {kind_of(value)}")


def _integer(value: Any) -> int:
    value = _plain(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValidationError(f"expected an integer, got {kind_of(value)}")
    if not INT64_MIN <= value <= INT64_MAX:
        raise ValidationError(f"{value} does not fit a 64-bit integer")
    return value


def _number(value: Any) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValidationError(f"expected a number, got {kind_of(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValidationError("the number is too large for a float") from None


def _boolean(value: Any) -> bool:
    value = _plain(value)
    if isinstance(value, bool):
        return value
    raise ValidationError(f"expected true or false, got {kind_of(value)}")


def _binary(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return b"".join(_base64_pieces(value))
        except (binascii.Error, ValueError):
            raise ValidationError("not valid base64") from None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise ValidationError(f"expected bytes or a base64 string, got {kind_of(value)}")


def _base64_pieces(text: str) -> Iterator[bytes]:
    """The bytes of a text, which may be long, in pieces: no other thread runs during one."""
    for start in range(0, len(text), _BASE64_CHARACTERS):
        piece = text[start : start + _BASE64_CHARACTERS]
        if start + len(piece) < len(text) and "=" in piece:
            raise ValueError("the padding is not at the end")
        yield base64.b64decode(piece, validate=True)


def _moment(value: Any) -> datetime:
    if isinstance(value, datetime):
        return value
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            raise ValidationError(f"not an ISO 8601 date and time: {value[:40]!r}") from None
    raise ValidationError(f"expected a date and time, got {kind_of(value)}")


def _nothing(value: Any) -> None:
    if value is not None:
        raise ValidationError(f"expected null, got {kind_of(value)}")


_SIMPLE: dict[Any, Converter] = {
    Any: _anything,
    object: _anything,
    str: _text,
    int: _integer,
    float: _number,
    bool: _boolean,
    bytes: _binary,
    datetime: _moment,
    type(None): _nothing,
}


def _annotated(inner: Any, marks: tuple[Any, ...]) -> Converter:
    tagged = [mark for mark in marks if isinstance(mark, Tagged)]
    convert = _tagged_union(get_args(inner), tagged[0]) if tagged else converter(inner)
    if any(isinstance(mark, NonFinite) for mark in marks):
        return lambda value: convert(from_json(value))
    bounds = [mark for mark in marks if isinstance(mark, Bounds)]
    if not bounds:
        return convert

    def bounded(value: Any) -> Any:
        result = convert(value)
        if result is not None:
            for bound in bounds:
                bound.check(result)
        return result

    return bounded


def _literal(options: tuple[Any, ...]) -> Converter:
    known = ", ".join(repr(option) for option in options)

    def literal(value: Any) -> Any:
        value = _plain(value)
        for option in options:
            if value == option and type(value) is type(option):
                return option
        raise ValidationError(f"expected one of {known}, got {str(value)[:40]!r}")

    return literal


def _union(members: tuple[Any, ...]) -> Converter:
    """The first member that accepts the value; null goes straight to None where allowed."""
    optional = type(None) in members
    converters = [converter(member) for member in members if member is not type(None)]
    if len(converters) == 1:
        only = converters[0]

        def optional_value(value: Any) -> Any:
            return None if value is None else only(value)

        return optional_value if optional else only

    def union(value: Any) -> Any:
        if value is None and optional:
            return None
        problems = []
        for convert in converters:
            try:
                return convert(value)
            except ValidationError as error:
                problems.append(str(error))
        raise ValidationError("; or ".join(dict.fromkeys(problems)))

    return union


def _tagged_union(members: tuple[Any, ...], mark: Tagged) -> Converter:
    optional = type(None) in members
    classes = [member for member in members if member is not type(None)]
    by_name = {cls.__name__: cls for cls in classes}
    table: dict[str, Any] = {tag: by_name[name] for tag, name in mark.members}
    open_member = None
    for cls in classes:
        annotation = cls.model_fields[mark.tag].annotation
        if get_origin(annotation) is Literal and not mark.members:
            table.update((value, cls) for value in get_args(annotation))
        elif annotation is str:
            open_member = cls
    known = ", ".join(repr(tag) for tag in table)

    def tagged_union(value: Any) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, tuple(classes)):
            return value
        if not isinstance(value, Mapping):
            raise ValidationError(f"expected an object, got {kind_of(value)}")
        tag = value.get(mark.tag)
        if not isinstance(tag, str):
            raise ValidationError(
                f"missing {mark.tag!r}, which says what this is: {known}", mark.tag
            )
        cls = table.get(tag, open_member)
        if cls is None:
            raise ValidationError(f"unknown {mark.tag} {tag[:40]!r}; known: {known}", mark.tag)
        try:
            return cls.model_validate(value)
        except ValidationError:
            if not mark.reopens or open_member is None:
                raise
            return open_member.model_validate(value)

    return tagged_union


def _list(convert: Converter) -> Converter:
    def sequence(value: Any) -> list[Any]:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
            raise ValidationError(f"expected a list, got {kind_of(value)}")
        result = []
        for index, item in enumerate(value):
            try:
                result.append(convert(item))
            except ValidationError as error:
                raise error.under(f"[{index}]") from None
        return result

    return sequence


def _dict(convert: Converter) -> Converter:
    def mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValidationError(f"expected an object, got {kind_of(value)}")
        result = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValidationError(f"keys must be strings, got {kind_of(key)}")
            try:
                result[key] = convert(item)
            except ValidationError as error:
                raise error.under(f"[{key[:40]!r}]") from None
        return result

    return mapping


def _enum(cls: type[Enum]) -> Converter:
    def member(value: Any) -> Enum:
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(option.value) for option in cls)
            raise ValidationError(f"expected one of {known}, got {str(value)[:40]!r}") from None

    return member


def _instance(cls: Any) -> Converter:
    def instance(value: Any) -> Any:
        return value if isinstance(value, cls) else cls.model_validate(value)

    return instance
