"""A JSON schema of every message, generated from the types, never written by hand.

The schema describes the JSON form. Requests allow no other fields than theirs; responses do. Every
message is a definition of one document, so that tools can refer to `#/$defs/SampleRequest`.
"""

from __future__ import annotations

import types as stdlib_types
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import orjson

from tinsmith import types
from tinsmith.types import observing
from tinsmith.types.convert import Bounds, Tagged
from tinsmith.types.model import Model, dump
from tinsmith.types.non_finite import WORDS, NonFinite
from tinsmith.types.optimizer import OptimStepRequest

Schema = dict[str, Any]

_OURS = observing.__name__
"""Messages beside the protocol, which the package does not export."""

_WORD = {"enum": list(WORDS)}
_RESULT_NUMBER = {"anyOf": [{"type": "number"}, _WORD]}
_RESULT_NUMBERS = {"type": "array", "items": _RESULT_NUMBER}
_INTEGERS = {"type": "array", "items": {"type": "integer"}}


def _ref(cls: type) -> Schema:
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _pass_schema(name: str) -> Schema:
    """A pass as releases before 0.25.0 sent it; since then it is protobuf."""
    return {
        "type": "object",
        "properties": {
            name: _ref(types.ForwardBackwardInput),
            "model_id": {"type": "string"},
            "seq_id": {"type": ["integer", "null"]},
        },
        "required": [name, "model_id"],
        "additionalProperties": False,
    }


_TENSORS = {"type": "object", "additionalProperties": _ref(types.TensorData)}

# The numpy-backed values, whose JSON form their own code writes.
_BY_HAND: dict[type, Schema] = {
    types.EncodedTextChunk: {
        "type": "object",
        "properties": {
            "tokens": {
                "type": "array",
                "items": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
            },
            "type": {"const": "encoded_text", "default": "encoded_text"},
        },
        "required": ["tokens"],
        "additionalProperties": False,
    },
    types.ModelInput: {
        "type": "object",
        "properties": {
            "chunks": {
                "type": "array",
                "items": {"anyOf": [_ref(chunk) for chunk in get_args(types.ModelInputChunk)]},
            }
        },
        "required": ["chunks"],
        "additionalProperties": False,
    },
    types.TensorData: {
        "type": "object",
        "properties": {
            "data": _RESULT_NUMBERS,
            "dtype": {"enum": ["int64", "float32"]},
            "shape": _INTEGERS,
            "sparse_crow_indices": _INTEGERS,
            "sparse_col_indices": _INTEGERS,
        },
        "required": ["data", "dtype"],
        "additionalProperties": False,
    },
    types.Datum: {
        "type": "object",
        "properties": {"model_input": _ref(types.ModelInput), "loss_fn_inputs": _TENSORS},
        "required": ["model_input"],
        "additionalProperties": False,
    },
    types.ForwardBackwardInput: {
        "type": "object",
        "properties": {
            "data": {"type": "array", "items": _ref(types.Datum)},
            "loss_fn": {"enum": list(get_args(types.LossFnType))},
            "loss_fn_config": {
                "type": ["object", "null"],
                "additionalProperties": {"type": ["number", "string"]},
            },
        },
        "required": ["data", "loss_fn"],
        "additionalProperties": False,
    },
    types.ForwardBackwardRequest: _pass_schema("forward_backward_input"),
    types.ForwardRequest: _pass_schema("forward_input"),
    types.ForwardBackwardOutput: {
        "type": "object",
        "properties": {
            "loss_fn_output_type": {"type": "string"},
            "loss_fn_outputs": {"type": "array", "items": _TENSORS},
            "metrics": {"type": "object", "additionalProperties": _RESULT_NUMBER},
        },
        "required": ["loss_fn_output_type", "loss_fn_outputs", "metrics"],
    },
    types.SampledSequence: {
        "type": "object",
        "properties": {
            "stop_reason": {"enum": list(get_args(types.StopReason))},
            "tokens": _INTEGERS,
            "logprobs": {**_RESULT_NUMBERS, "type": ["array", "null"]},
        },
        "required": ["stop_reason", "tokens"],
    },
    types.SampleResponse: {
        "type": "object",
        "properties": {
            "sequences": {"type": "array", "items": _ref(types.SampledSequence)},
            "prompt_logprobs": {
                "type": ["array", "null"],
                "items": {"anyOf": [_RESULT_NUMBER, {"type": "null"}]},
            },
            "topk_prompt_logprobs": {
                "type": ["array", "null"],
                "items": {
                    "type": ["array", "null"],
                    "items": {
                        "type": "array",
                        "prefixItems": [{"type": "integer"}, _RESULT_NUMBER],
                    },
                },
            },
            "type": {"const": "sample"},
        },
        "required": ["sequences"],
    },
}


def schema() -> Schema:
    """The document: every message under `$defs`, sorted by name."""
    definitions: dict[str, Schema] = {cls.__name__: body for cls, body in _BY_HAND.items()}
    official = {name: getattr(types, name) for name in types.__all__}
    ours = {n: v for n, v in vars(observing).items() if getattr(v, "__module__", "") == _OURS}
    for name, value in (official | ours).items():
        if isinstance(value, type) and issubclass(value, Model):
            definitions[name] = message_schema(value)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of the Tinker protocol, JSON form",
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text() -> str:
    """The document as it stands in the repository."""
    return orjson.dumps(schema(), option=orjson.OPT_INDENT_2).decode() + "\n"


def message_schema(cls: type[Model]) -> Schema:
    properties: dict[str, Schema] = {}
    required = []
    for field in cls.model_fields.values():
        body = _of(field.annotation)
        if field.is_required():
            required.append(field.name)
        elif field.default is not None:
            body = {**body, "default": dump(field.default, mode="json", exclude_none=True)}
        properties[field.name] = body
    if cls is OptimStepRequest:
        _rename_optimizer_fields(properties, required)
    result: Schema = {"type": "object", "properties": properties}
    if cls.__doc__ and cls.__doc__ is not Model.__doc__:
        result["description"] = cls.__doc__.strip().splitlines()[0]
    if required:
        result["required"] = required
    if cls.__unknown__ == "refuse":
        result["additionalProperties"] = False
    return result


def _rename_optimizer_fields(properties: dict[str, Schema], required: list[str]) -> None:
    """On the wire the one Python field has two names, of which one must be there."""
    del properties["optim_params"]
    required.remove("optim_params")
    properties["adam_params"] = {"$ref": "#/$defs/AdamParams"}
    properties["optimizer_params"] = _of(types.OptimParamsBase)


_SIMPLE: dict[Any, Schema] = {
    Any: {},
    object: {},
    str: {"type": "string"},
    int: {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    datetime: {"type": "string", "format": "date-time"},
    type(None): {"type": "null"},
}


def _of(annotation: Any) -> Schema:
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if origin is Literal:
        return {"const": args[0]} if len(args) == 1 else {"enum": list(args)}
    if origin in (Union, stdlib_types.UnionType):
        return {"anyOf": [_of(arg) for arg in args]}
    if origin in (list, Sequence):
        return {"type": "array", "items": _of(args[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _of(args[1])}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {"enum": [member.value for member in annotation]}
    return _ref(annotation)


def _annotated(inner: Any, marks: tuple[Any, ...]) -> Schema:
    body = _of(inner)
    for mark in marks:
        if isinstance(mark, NonFinite):
            body = {"anyOf": [body, _WORD]}
        elif isinstance(mark, Tagged):
            body = {**body, "discriminator": {"propertyName": mark.tag}}
        elif isinstance(mark, Bounds):
            # Where null is allowed, a bound concerns the other case; JSON schema's keywords
            # already pass over values of another type.
            body = {**body, **_bounds(mark, inner)}
    return body


def _bounds(mark: Bounds, inner: Any) -> Schema:
    lengths = ("minItems", "maxItems") if "list" in str(inner) else ("minLength", "maxLength")
    values = {
        "minimum": mark.ge,
        "exclusiveMinimum": mark.gt,
        "maximum": mark.le,
        "exclusiveMaximum": mark.lt,
        lengths[0]: mark.min_length,
        lengths[1]: mark.max_length,
    }
    return {name: value for name, value in values.items() if value is not None}
