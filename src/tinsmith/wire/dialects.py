"""Serving every client release at once: which form a body has, and which form a client reads.

The official releases from 0.3.0 on differ in three ways that matter on the wire. Passes were JSON
until 0.24.1 and are protobuf since 0.25.0. Results of passes and samples were JSON until protobuf
came in with 0.18.1 and 0.19.0, and are protobuf only since 0.25.0; the client says which it reads
in `Accept`. And some fields did not exist yet: absent means what it meant then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    LoadWeightsRequest,
    SampleResponse,
    TelemetrySendRequest,
)
from tinsmith.types.convert import read_field
from tinsmith.types.model import Model
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import json, proto
from tinsmith.wire.limits import DEFAULT_LIMITS, Limits

M = TypeVar("M", bound=Model)

# What a field's absence meant in the releases that did not have it.
_BEFORE_THE_FIELD: dict[type[Model], dict[str, Any]] = {
    # 0.3 to 0.5 had one way to load; its counterpart saved weights and optimizer together.
    LoadWeightsRequest: {"optimizer": True},
    TelemetrySendRequest: {"process_uuid": ""},
}

_KEPT = ("user_metadata", "tags", "display_name", "project_id", "sdk_version", "detail")
"""Fields that stay with a session or checkpoint, whatever the message is."""


def decode(kind: type[M], body: bytes, limits: Limits = DEFAULT_LIMITS) -> M:
    """A control message from any release."""
    older = _BEFORE_THE_FIELD.get(kind)
    if older is None:
        message = json.decode(kind, body, limits)
    else:
        sent = {
            name: value
            for name, value in json.parse_message(body, limits).items()
            if value is not None
        }
        message = json.built(kind.model_validate, {**older, **sent}, body)
    for name in _KEPT:
        _check_kept(name, getattr(message, name, None), limits)
    return message


def decode_pass(
    body: bytes, content_type: str, *, forward_only: bool = False, limits: Limits = DEFAULT_LIMITS
) -> ForwardBackwardRequest | ForwardRequest:
    """The body of `/forward_backward`, or of `/forward` (`forward_only`), from any release."""
    if media_type(content_type) == PROTOBUF:
        return proto.decode_pass(body, limits)
    if media_type(content_type) != JSON:
        raise ValidationError(f"expected {PROTOBUF} or {JSON}, got {content_type[:80]!r}")
    name = "forward_input" if forward_only else "forward_backward_input"
    cls = ForwardRequest if forward_only else ForwardBackwardRequest

    def build(fields: dict[str, Any]) -> ForwardBackwardRequest | ForwardRequest:
        return cls(*_pass_parts(fields, name, limits))

    return json.built(build, json.parse_message(body, limits), body)


def _pass_parts(
    fields: dict[str, Any], name: str, limits: Limits
) -> tuple[ForwardBackwardInput, str, int | None]:
    """The input of a pass under its name, its model and its number."""
    for unknown in fields.keys() - {name, "model_id", "seq_id", "type"}:
        raise ValidationError("the request has no such field", unknown[:80])
    inputs = fields.get(name)
    if not isinstance(inputs, Mapping):
        raise ValidationError("the request needs this object", name)
    data = inputs.get("data")
    if isinstance(data, list) and len(data) > limits.max_datums:
        raise TooLargeError(f"more than {limits.max_datums} datums", f"{name}.data")
    try:
        parsed = ForwardBackwardInput.model_validate(inputs)
    except ValidationError as error:
        raise error.under(name) from None
    model_id = read_field("model_id", str, fields.get("model_id"))
    seq_id = read_field("seq_id", int | None, fields.get("seq_id"))
    return parsed, model_id, seq_id


def accepts_protobuf(accept: str) -> bool:
    """Whether a client with this Accept header reads passes' and samples' results as protobuf."""
    return PROTOBUF in accept.lower()


def result_as_json(result: ForwardBackwardOutput | SampleResponse) -> bytes:
    """The result of a pass or a sample in the form that old clients read."""
    is_output = isinstance(result, ForwardBackwardOutput)
    return json.encode_long(result.to_wire(), "loss_fn_outputs" if is_output else "sequences")


def _check_kept(name: str, value: Any, limits: Limits) -> None:
    """What is kept with a session or checkpoint, and read again at every start, is small."""
    if not value:
        return
    if not isinstance(value, str) and len(value) > limits.max_metadata_entries:
        most = limits.max_metadata_entries
        raise TooLargeError(f"has {len(value)} entries; the limit is {most}", name)
    if (size := len(json.encode(value))) > limits.max_metadata_bytes:
        most = limits.max_metadata_bytes
        raise TooLargeError(f"has {size} bytes as JSON; the limit is {most}", name)
    if _depth(value) > limits.max_metadata_depth:
        raise TooLargeError(f"is more than {limits.max_metadata_depth} levels deep", name)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def media_type(content_type: str) -> str:
    """`application/json` of `application/json; charset=utf-8`."""
    return content_type.partition(";")[0].strip().lower()
