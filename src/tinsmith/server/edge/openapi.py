"""A description of the API in OpenAPI form, generated from the routes and the types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from tinsmith.server.edge.http import ApiRoute
from tinsmith.wire.schema import schema

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


def description(routes: Sequence[ApiRoute], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinsmith", "version": version},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": _moved(schema()["$defs"]),
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "done"}
    if route.gives is not None:
        answer["content"] = _json(route.gives)
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {"2XX": answer, "4XX": {"description": "refused; `detail` says why"}},
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(route.path)
        ],
    }
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _json(route.takes)}
    if route.is_open:
        operation["security"] = []
    return operation


def _json(message: type) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{message.__name__}"}
    return {"application/json": {"schema": reference}}


def _moved(definitions: dict[str, Any]) -> dict[str, Any]:
    """The definitions, referring to each other at their place in this document."""
    text = orjson.dumps(definitions).replace(b'"#/$defs/', b'"#/components/schemas/')
    moved: dict[str, Any] = orjson.loads(text)
    return moved
