"""The base of all message types: declared fields, checked on construction, immutable.

    class AdamParams(Request):
        learning_rate: float = 0.0001

A `Request` refuses fields it does not know, so that a typing mistake is an error at once; a
`Response` ignores them, so that a newer server does not break an older client. An `Open`
message keeps them: it stands for families that the protocol leaves open.

The methods users know from pydantic (`model_dump`, `model_validate`, `model_copy`, …) are here
under the same names. Two ways out differ on purpose: `model_dump` keeps None, `to_wire` is
what is sent: defaults included, None left out unless the message declares the field in
`__explicit_null__`, where null means "clear it".
"""

from __future__ import annotations

import base64
import copy
import difflib
import inspect
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, ClassVar, Self, dataclass_transform, get_type_hints

import orjson

from tinsmith.errors import ValidationError
from tinsmith.types.convert import Converter, converter, kind_of
from tinsmith.types.non_finite import to_json

REQUIRED: Any = object()


@dataclass(frozen=True)
class Field:
    """What a message declares about one of its fields."""

    name: str
    annotation: Any
    default: Any
    convert: Converter

    def is_required(self) -> bool:
        return self.default is REQUIRED

    def make_default(self) -> Any:
        return copy.copy(self.default) if isinstance(self.default, (list, dict)) else self.default


class _FieldTable:
    """`Message.model_fields`: read from the annotations when first asked for, then kept."""

    def __get__(self, instance: object, cls: type[Model]) -> dict[str, Field]:
        if "_fields" not in cls.__dict__:
            cls._fields = _read_fields(cls)
        return cls._fields


class _Parameters:
    """`Message.__signature__`: the fields as parameters, so that `help` shows them."""

    def __get__(self, instance: object, cls: type[Model]) -> inspect.Signature:
        hints = get_type_hints(cls)
        return inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.is_required() else field.default,
                    annotation=hints[name],
                )
                for name, field in cls.model_fields.items()
            ]
        )


class Frozen:
    """Attributes are set once, when the object is built."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; use model_copy(update=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Model(Frozen):
    """See the module's notes. Subclass `Request`, `Response` or `Open`, not this."""

    __unknown__: ClassVar[str] = "ignore"
    __wire_mode__: ClassVar[str] = "wire"
    __explicit_null__: ClassVar[frozenset[str]] = frozenset()
    _fields: ClassVar[dict[str, Field]]
    model_fields = _FieldTable()
    """The declared fields by name, in order, inherited ones first."""
    __signature__ = _Parameters()

    def __init__(self, **values: Any) -> None:
        values = self._accept(values)
        fields = self.model_fields
        given = self.__dict__
        for name, field in fields.items():
            if name in values:
                try:
                    given[name] = field.convert(values[name])
                except ValidationError as error:
                    raise error.under(name) from None
            elif field.default is REQUIRED:
                raise ValidationError(f"{type(self).__name__} needs this field", name)
            else:
                given[name] = field.make_default()
        if len(values) > len(fields) or not values.keys() <= fields.keys():
            self._meet_unknown({k: v for k, v in values.items() if k not in fields})
        self._check()

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A place for a message to rename what it is given."""
        return values

    def _check(self) -> None:
        """A place for rules that concern several fields."""

    def _meet_unknown(self, extra: dict[str, Any]) -> None:
        if self.__unknown__ == "refuse":
            name = next(iter(extra))
            near = difflib.get_close_matches(str(name)[:80], self.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValidationError(f"{type(self).__name__} has no such field{hint}", str(name)[:80])
        if self.__unknown__ == "keep":
            self.__dict__.update(extra)

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Build from a mapping, or return an instance as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ValidationError(f"expected an object for {cls.__name__}, got {kind_of(obj)}")
        return cls(**{str(key): value for key, value in obj.items()})

    @classmethod
    def model_validate_json(cls, text: str | bytes | bytearray | memoryview) -> Self:
        try:
            return cls.model_validate(orjson.loads(text))
        except orjson.JSONDecodeError as error:
            raise ValidationError(f"not valid JSON: {error}") from None

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: set[str] | None = None,
        exclude: set[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        """A plain dict, nested messages too; `mode="json"` makes every value JSON-ready."""
        result = {}
        fields = self.model_fields
        for name, value in self.__dict__.items():
            if not is_dumped(name, include, exclude):
                continue
            if exclude_none and value is None:
                continue
            if exclude_defaults and name in fields and value == fields[name].default:
                continue
            result[name] = dump(
                value, mode=mode, exclude_none=exclude_none, exclude_defaults=exclude_defaults
            )
        return result

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False) -> str:
        plain = self.model_dump(mode="json", exclude_none=exclude_none)
        return orjson.dumps(plain, option=orjson.OPT_INDENT_2 if indent else 0).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced; unlike pydantic's, the new values are checked."""
        values = {**(copy.deepcopy(self.__dict__) if deep else self.__dict__), **(update or {})}
        return type(self)(**values)

    def to_wire(self) -> dict[str, Any]:
        """What is sent: JSON-ready, defaults included, None left out (see the module's notes)."""
        return {
            name: dump(value, mode=self.__wire_mode__, exclude_none=True, path=name)
            for name, value in self.__dict__.items()
            if value is not None or name in self.__explicit_null__
        }

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={shorten(value)}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({inner})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


class Request(Model):
    """What a client sends, and the values inside it."""

    __unknown__ = "refuse"


class Response(Model):
    """What a service answers."""

    __unknown__ = "ignore"
    __wire_mode__ = "answer"


class Open(Model):
    """A message that keeps fields it does not know as attributes."""

    __unknown__ = "keep"


_PLAIN = frozenset({str, int, bool, type(None)})
"""What every mode writes as it is."""


def is_dumped(name: str, include: set[str] | None, exclude: set[str] | None) -> bool:
    """Whether `model_dump` with these options shows a field."""
    return (include is None or name in include) and name not in (exclude or ())


def dump(
    value: Any,
    *,
    mode: str,
    exclude_none: bool,
    exclude_defaults: bool = False,
    path: str = "",
) -> Any:
    """A field's value as plain data.

    Modes: "python" keeps bytes, dates and numbers as they are; "json" makes them JSON-ready;
    "wire" also refuses numbers that JSON cannot carry, and "answer" writes them as words.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        if mode == "wire" and not math.isfinite(value):
            raise ValidationError(f"{value} cannot be sent as JSON", path)
        return to_json(value) if mode == "answer" else value
    if isinstance(value, Enum):
        return value if mode == "python" else value.value
    if isinstance(value, (str, int)):
        return value
    if mode in ("wire", "answer") and hasattr(value, "to_wire"):
        try:
            return value.to_wire()
        except ValidationError as error:
            raise error.under(path) from None
    options: dict[str, Any] = {
        "mode": mode,
        "exclude_none": exclude_none,
        "exclude_defaults": exclude_defaults,
    }
    if hasattr(value, "model_dump"):
        return value.model_dump(**options)
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):
            return list(value)  # thousands of ids or tokens, in one look
        return [dump(v, path=f"{path}[{i}]", **options) for i, v in enumerate(value)]
    if isinstance(value, dict):
        # Free-form content (metadata, graph arguments): None inside it is the user's own.
        return {k: dump(v, path=f"{path}[{k!r}]", **options) for k, v in value.items()}
    if mode == "python":
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return rfc3339(value)
    raise ValidationError(f"{type(value).__name__} cannot be written as JSON", path)


def rfc3339(moment: datetime) -> str:
    """`2026-11-15T10:00:00Z`; a moment without a zone keeps none."""
    text = moment.isoformat()
    return text[:-6] + "Z" if moment.tzinfo is not None and text.endswith("+00:00") else text


def now() -> datetime:
    return datetime.now(UTC)


def shorten(value: object) -> str:
    """`repr` for people: long lists and strings lose their middle."""
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxstring = self.maxother = 160
        self.maxlevel = 6

    def repr_instance(self, x: Any, level: int) -> str:
        # Our own values shorten themselves.
        return repr(x) if isinstance(x, Frozen) else super().repr_instance(x, level)


_SHORT = _Short()


def _read_fields(cls: type[Model]) -> dict[str, Field]:
    hints = get_type_hints(cls, include_extras=True)
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__):
        for name in inspect.get_annotations(base) if issubclass(base, Model) else ():
            if not name.startswith("_"):
                default = getattr(cls, name, REQUIRED)
                fields[name] = Field(name, hints[name], default, converter(hints[name]))
    return fields


def _rebuild(cls: type[Model], values: dict[str, Any]) -> Model:
    instance = cls.__new__(cls)
    instance.__dict__.update(values)
    return instance
