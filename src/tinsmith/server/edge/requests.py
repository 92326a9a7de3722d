"""Requests whose headers are looked up in a dict.

Starlette's go through the list of headers for each name, and raise an error inside for each that is
not there. A dozen names are asked for in every request, and most are not there.
"""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send


class ApiHeaders(Headers):
    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        # Of two with one name the first counts, as it does there.
        self._values = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.raw)
        }

    def __getitem__(self, key: str) -> str:
        return self._values[key.lower()]

    def __contains__(self, key: Any) -> bool:
        return key.lower() in self._values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key.lower(), default)


class ApiRequest(Request):
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._headers = ApiHeaders(scope)

    @property
    def headers(self) -> Headers:
        return self._headers
