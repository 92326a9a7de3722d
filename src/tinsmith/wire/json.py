"""Control messages as JSON.

`decode` takes what any release sends: a field that is null where the message has a default reads
as absent, so that old clients, which send null for what their caller left out, are served alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types.model import Model
from tinsmith.wire.limits import DEFAULT_LIMITS, Limits
from tinsmith.wire.sliced_json import WHOLE_BYTES, count, free, has, loads, small_fields

M = TypeVar("M", bound=Model)
T = TypeVar("T")


def encode(message: Any) -> bytes:
    """The body of a message: anything with `to_wire`, or plain data."""
    return orjson.dumps(
        message.to_wire() if hasattr(message, "to_wire") else message,
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def encode_long(message: Mapping[str, Any], name: str) -> bytes:
    """Like `encode`, for plain data with a long list under `name`, item by item: encoding holds
    up all other threads, so that it must not take long at a stretch."""
    start = encode({key: value for key, value in message.items() if key != name})
    items = b",".join(encode(item) for item in message[name])
    return start[:-1] + (b"," if len(start) > 2 else b"") + b'"%b":[%b]}' % (name.encode(), items)


def decode(kind: type[M], body: bytes, limits: Limits = DEFAULT_LIMITS) -> M:
    """The message in a body, checked field by field."""
    return built(kind.model_validate, _without_nulls(kind, parse_message(body, limits)), body)


def built(build: Callable[[dict[str, Any]], T], fields: dict[str, Any], body: bytes) -> T:
    """What `build` makes of the fields of a body, which are then freed: a piece at a time, where
    they are many."""
    if len(body) <= WHOLE_BYTES:
        return build(fields)
    try:
        message = build(fields)
    except BaseException:
        free(fields, is_unused=True)
        raise
    free(fields, is_unused=False)
    return message


SMALLER = "; JSON allows no more: send less at a time, or passes as application/x-protobuf"
"""The end of a sentence about a limit."""


def parse_message(body: bytes, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """`parse`, and a check of all texts, for a message that is needed whole."""
    value = parse(body, limits)
    # JSON has no other spelling of it, so few bodies have to be searched.
    if not limits.allows_nul and has(body, b"\\u0000"):
        _refuse_nul(value, "")
    return value


def _refuse_nul(value: Any, path: str) -> None:
    if isinstance(value, str) and "\0" in value:
        raise ValidationError("text may not hold the character NUL; leave it out", path)
    if isinstance(value, dict):
        for name, each in value.items():
            if "\0" in name:
                raise ValidationError(
                    f"the name {name[:80]!r} holds the character NUL; leave it out", path
                )
            _refuse_nul(each, f"{path}.{name}" if path else name)
    if isinstance(value, list):
        for number, each in enumerate(value):
            _refuse_nul(each, f"{path}[{number}]")


def parse(body: bytes, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """The JSON object in a body, as plain data."""
    return _object(loads, body, limits)


def parse_small_fields(body: bytes, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """`parse`, for its small fields: a large one is null, and has not been looked at."""
    return _object(small_fields, body, limits)


def _object(parsed: Callable[[bytes], Any], body: bytes, limits: Limits) -> dict[str, Any]:
    most = min(limits.max_body_bytes, limits.max_json_bytes)
    if len(body) > most:
        raise TooLargeError(f"the body has {len(body)} bytes; the limit is {most}{SMALLER}")
    # A tiny object takes fifty times its bytes, so they are counted before any is made. Braces
    # in strings count too, which the limit leaves room for.
    if count(body, b"{") + count(body, b"[") > limits.max_json_parts:
        raise TooLargeError(f"the body has more than {limits.max_json_parts} objects and lists")
    if count(body, b",") > limits.max_json_values:
        raise TooLargeError(f"the body has more than {limits.max_json_values} values{SMALLER}")
    if count(body, b'"') > 2 * limits.max_json_texts:
        raise TooLargeError(f"the body has more than {limits.max_json_texts} texts")
    try:
        value = parsed(body)
    except ValueError as error:  # orjson's error is one
        raise ValidationError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValidationError("the body must be a JSON object")
    return value


def _without_nulls(kind: type[Model], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` less those that are null although the message has a default for them."""
    declared = kind.model_fields
    return {
        name: value
        for name, value in fields.items()
        if value is not None or name not in declared or declared[name].is_required()
    }
