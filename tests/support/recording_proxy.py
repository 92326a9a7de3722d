"""A proxy on loopback that passes every request on to a server and remembers it."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

from tests.support.scripted_server import Answer, Recorded, ScriptedServer

_OF_ONE_CONNECTION = ("connection", "content-length", "host", "transfer-encoding", "keep-alive")


class RecordingProxy(ScriptedServer):
    """`change` may rewrite the body of an answer; it is given the path and the body."""

    def __init__(self, upstream: str, change: Callable[[str, bytes], bytes]) -> None:
        super().__init__()
        self._upstream = urlsplit(upstream)
        self._change = change
        self.default = self._pass_on

    async def _pass_on(self, request: Recorded) -> Answer:
        return await asyncio.to_thread(self._exchange, request)

    def _exchange(self, request: Recorded) -> Answer:
        assert self._upstream.hostname is not None
        connection = http.client.HTTPConnection(
            self._upstream.hostname, self._upstream.port, timeout=120
        )
        try:
            query = f"?{urlencode(request.query, doseq=True)}" if request.query else ""
            connection.request(
                request.method,
                request.path + query,
                body=request.body,
                headers=_without_hops(request.headers),
            )
            answer = connection.getresponse()
            headers = _without_hops({k.lower(): v for k, v in answer.getheaders()})
            body = self._change(request.path, answer.read())
            return Answer(answer.status, body, headers)
        finally:
            connection.close()


def _without_hops(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in _OF_ONE_CONNECTION}
