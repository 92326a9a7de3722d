"""Which model and number the body of an operation names, read without trusting the rest of it.

A refused operation still uses up its number, so both must be known even when the rest of the body
is broken or was never read.
"""

from __future__ import annotations

from tinsmith.errors import ValidationError
from tinsmith.types.protocol import PROTOBUF
from tinsmith.wire import json
from tinsmith.wire.dialects import media_type
from tinsmith.wire.limits import DEFAULT_LIMITS, Limits
from tinsmith.wire.protobuf import as_int32, as_text, fields


def ids_in(
    body: bytes, content_type: str, limits: Limits = DEFAULT_LIMITS
) -> tuple[str, int | None]:
    if media_type(content_type) == PROTOBUF:
        try:
            return _proto_ids(body, len(body))
        except ValidationError:
            if (found := ids_at_front(body)) is None:
                raise
            return found
    message = json.parse_small_fields(body, limits)
    model, given = message.get("model_id"), message.get("seq_id")
    if not isinstance(model, str):
        raise ValidationError("the request needs this text", "model_id")
    if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
        raise ValidationError("must be a whole number", "seq_id")
    return model, given


def ids_at_front(body: bytes) -> tuple[str, int | None] | None:
    """The ids at the beginning of a protobuf message, where clients put them, when the rest of it
    is broken or was not read; None when they are not there."""
    # Field 1, a text of less than 128 bytes; field 2, a number of one to five bytes.
    if len(body) < 4 or body[0] != 0x0A or body[1] >= 128:
        return None
    end = 3 + body[1]
    if body[end - 1 : end] != b"\x10":
        return None
    while end < len(body) and body[end] >= 128:
        end += 1
    try:
        return _proto_ids(body, end + 1) if end < len(body) else None
    except ValidationError:
        return None


def _proto_ids(body: bytes, length: int) -> tuple[str, int | None]:
    model_id, seq_id = "", None
    for number, start, stop in fields(body, 0, length):
        if number == 1:
            model_id = as_text(body, start, stop)
        elif number == 2:
            seq_id = as_int32(start, stop)
    return model_id, seq_id
