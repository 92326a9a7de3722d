"""A description of the API in OpenAPI form, generated from the endpoint table and the types."""

from __future__ import annotations

from typing import Any

import orjson

from tinsmith.types.protocol import JSON
from tinsmith.wire.endpoints import (
    ENDPOINTS,
    GENERATE_API,
    NOTHING,
    OPENAI_API,
    Endpoint,
    Promised,
    parameters,
    plain_path,
)
from tinsmith.wire.schema import schema

_SECURITY: dict[str, list[dict[str, list[str]]]] = {
    "key": [{"key": []}],
    "signed": [{"signature": [], "expires": []}],
    "anyone": [],
}


def description(version: str) -> dict[str, Any]:
    messages = schema()["$defs"]
    paths: dict[str, dict[str, Any]] = {}
    for name, row in ENDPOINTS.items():
        operation = _operation(name, row, messages)
        paths.setdefault(plain_path(row.full_path), {})[row.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinsmith", "version": version},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": _moved(messages),
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "signature": {"type": "apiKey", "in": "query", "name": "signature"},
                "expires": {"type": "apiKey", "in": "query", "name": "expires"},
            },
        },
    }


def _operation(name: str, row: Endpoint[Any, Any], messages: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": row.summary,
        "description": _description(row),
        "security": _SECURITY[row.access],
        "parameters": [_parameter(each, "path") for each in parameters(row.path)]
        + [_parameter(each, "query") for each in row.query],
        "responses": _responses(row, messages),
    }
    if row.request is not NOTHING:
        content = {media: _schema(row.request, media, messages) for media in row.takes}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _description(row: Endpoint[Any, Any]) -> str:
    sentences = [] if row.method == "GET" else [f"The same request again {row.repeat.value}."]
    if isinstance(row, Promised):
        sentences.append(f"The promised result is a {row.result.__name__}.")
    return " ".join(sentences)


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _responses(row: Endpoint[Any, Any], messages: dict[str, Any]) -> dict[str, Any]:
    reason = "error.message" if row.prefix in (OPENAI_API, GENERATE_API) else "detail"
    refused = {"description": f"refused; `{reason}` says why"}
    if row.response is NOTHING:
        return {"204": {"description": "done"}, "4XX": refused}
    content = {media: _schema(row.response, media, messages) for media in row.gives}
    return {"200": {"description": "done", "content": content}, "4XX": refused}


def _schema(message: type, media: str, messages: dict[str, Any]) -> dict[str, Any]:
    """The schemas describe the JSON form; other forms, and what is no message, have none."""
    known = [cls.__name__ for cls in message.__mro__ if cls.__name__ in messages]
    if media != JSON or not known:
        return {}
    return {"schema": {"$ref": f"#/components/schemas/{known[0]}"}}


def _moved(definitions: dict[str, Any]) -> dict[str, Any]:
    """The definitions, referring to each other at their place in this document."""
    text = orjson.dumps(definitions).replace(b'"#/$defs/', b'"#/components/schemas/')
    moved: dict[str, Any] = orjson.loads(text)
    return moved
