"""One typed call to the service: a message goes out, a checked message comes back.

What every request carries (headers, idempotency key) is decided here; how it is sent, signed and
repeated is the transport's business.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import random
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from tinsmith.client.connection.stats import Stats
from tinsmith.errors import APIError, APIResponseValidationError, ValidationError
from tinsmith.transport import urls
from tinsmith.transport.base import ConnectionClass, Request, Response, Transport
from tinsmith.transport.config import PROTOCOL_VERSION, ClientConfig
from tinsmith.transport.http import Http
from tinsmith.transport.limits import BillingPause
from tinsmith.transport.retry import FailureObserver, Repeater, Retrying, RetryPolicy
from tinsmith.transport.tokens import Authenticating, TokenSource
from tinsmith.types import AuthTokenResponse
from tinsmith.types.model import Model
from tinsmith.wire import json as wire_json

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Model)

PREFIX = "/api/v1"
JSON = "application/json"
PROTOBUF = "application/x-protobuf"


class Api:
    """Lives on the I/O loop, except for `request`, which only builds."""

    def __init__(self, config: ClientConfig, tokens: TokenSource) -> None:
        self.config = config
        self.http = Http(config)
        self.billing = BillingPause()
        self.repeater = Repeater(billing=self.billing)
        self.stats = Stats()
        self.on_failure: FailureObserver | None = None
        self.signer = Authenticating(self.http, tokens)
        self._transport: Transport = Retrying(
            self.signer, config.retry, self.repeater, self._note_failure
        )
        self._headers = {**_platform_headers(), **config.headers}
        self._notes_seen: set[str] = set()
        # uuid4 asks the system for randomness each time, which costs more than building a request.
        self._random = random.Random()

    def use_tokens(self, tokens: TokenSource) -> None:
        self.signer.tokens = tokens

    async def call(self, kind: type[M], method: str, path: str, **options: Any) -> M:
        """Send (see `send` for the options) and read the answer as a `kind`."""
        return decode(kind, await self.send(method, path, **options))

    async def send(
        self,
        method: str,
        path: str,
        *,
        connection: ConnectionClass,
        message: Model | Mapping[str, Any] | None = None,
        content: bytes | None = None,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        timeout_seconds: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> Response:
        """The body is either `message`, as JSON, or `content` as it is."""
        request = self.request(
            method,
            path,
            connection=connection,
            content=wire_json.encode(message) if message is not None else content,
            content_type=content_type,
            headers=headers,
            query=query,
            timeout_seconds=timeout_seconds,
            retry=retry,
        )
        with self.stats.watch(connection):
            response = await self._transport.send(request)
        if note := response.headers.get("x-deprecation-note"):
            self._log_deprecation(note, response.headers.get("x-deprecation-level"))
        return response

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        connection: ConnectionClass,
        message: Model,
        headers: Mapping[str, str],
    ) -> AsyncIterator[tuple[Response, AsyncIterator[bytes]]]:
        """The head of an answer and its body as it comes. Sent once: what has been read cannot be
        taken back."""
        request = self.request(
            method,
            path,
            connection=connection,
            content=wire_json.encode(message),
            headers=headers,
        )
        with self.stats.watch(connection):
            async with self.http.stream(await self.signer.sign(request)) as opened:
                yield opened

    def request(
        self,
        method: str,
        path: str,
        *,
        connection: ConnectionClass,
        content: bytes | None = None,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        timeout_seconds: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> Request:
        timeout = self.config.timeout_seconds if timeout_seconds is None else timeout_seconds
        own = dict(self._headers)
        own["X-Stainless-Read-Timeout"] = f"{timeout:g}"
        if method != "GET":
            own["X-Idempotency-Key"] = f"stainless-python-retry-{self._unique_id()}"
            if content is not None:
                own["Content-Type"] = content_type
        if headers:
            own.update(headers)
        return Request(
            method=method,
            url=urls.join(self.config.base_url, PREFIX + path, query),
            headers=own,
            content=content,
            connection=connection,
            timeout_seconds=timeout,
            retry=retry,
        )

    async def exchange(self, credential: TokenSource) -> str:
        """A short-lived token for a credential."""
        signer = Authenticating(self.http, credential)
        transport = Retrying(signer, self.config.retry, self.repeater)
        request = self.request(
            "POST", "/auth/token", connection=ConnectionClass.AUTH, content=b"{}"
        )
        return decode(AuthTokenResponse, await transport.send(request)).jwt

    async def close(self) -> None:
        await self.http.close()

    def _unique_id(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128), version=4)

    def _note_failure(
        self, request: Request, error: APIError, attempt: int, will_retry: bool
    ) -> None:
        if will_retry:
            self.stats.count_retry(request.connection)
        if self.on_failure is not None:
            self.on_failure(request, error, attempt, will_retry)

    def _log_deprecation(self, note: str, level: str | None) -> None:
        if note not in self._notes_seen:
            self._notes_seen.add(note)
            logger.log(logging.ERROR if level == "error" else logging.WARNING, "%s", note)


def decode(kind: type[M], response: Response) -> M:
    """The message in an answer; one that breaks the protocol is an error that shows it."""
    try:
        return wire_json.decode(kind, response.content)
    except ValidationError as error:
        raise invalid_answer(response, kind.__name__, error) from error


def invalid_answer(
    response: Response, expected: str, error: ValidationError
) -> APIResponseValidationError:
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return APIResponseValidationError(
        response,
        body,
        f"the service's answer to {response.request!r} is not a {expected}: {error}",
    )


def sdk_headers(method: str) -> dict[str, str]:
    """Which public method a REST request came from, so that a service can see who uses what."""
    return {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": method}


def _platform_headers() -> dict[str, str]:
    systems = {"darwin": "MacOS", "linux": "Linux", "win32": "Windows"}
    machines = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
    machine = platform.machine().lower()
    return {
        "Accept": JSON,
        "User-Agent": f"tinsmith/Python (protocol {PROTOCOL_VERSION})",
        "X-Stainless-Package-Version": PROTOCOL_VERSION,
        "X-Stainless-OS": systems.get(sys.platform, "Unknown"),
        "X-Stainless-Arch": machines.get(machine, f"other:{machine}"),
        "X-Stainless-Runtime": sys.implementation.name.replace("cpython", "CPython"),
        "X-Stainless-Runtime-Version": platform.python_version(),
        "X-Stainless-Async": "async:asyncio",
        "X-Stainless-Retry-Count": "0",
    }
