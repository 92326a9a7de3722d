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
from typing import Any, TypedDict, TypeVar, Unpack, cast

from tinsmith.client.uplink.stats import Stats
from tinsmith.errors import APIError, APIResponseValidationError, ValidationError
from tinsmith.transport import urls
from tinsmith.transport.base import Request, Response, Transport
from tinsmith.transport.config import PROTOCOL_VERSION, ClientConfig
from tinsmith.transport.http import Http
from tinsmith.transport.limits import BillingPause
from tinsmith.transport.retry import FailureObserver, Repeater, Retrying, RetryPolicy
from tinsmith.transport.tokens import Authenticating, TokenSource
from tinsmith.types.model import Model
from tinsmith.types.protocol import JSON
from tinsmith.wire import endpoints
from tinsmith.wire import json as wire_json
from tinsmith.wire.endpoints import Endpoint

logger = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")


class Options(TypedDict, total=False):
    """What one request may have beside its message."""

    headers: Mapping[str, str]
    query: Mapping[str, object]
    timeout_seconds: float
    retry: RetryPolicy | None
    sdk_method: str
    """Which public method it came from, so that a service can see who uses what."""


class Api:
    """Runs on the I/O loop."""

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

    async def call(
        self, endpoint: Endpoint[Req, Resp], message: Req | bytes, **options: Unpack[Options]
    ) -> Resp:
        """Send a message, or one that is encoded already, and read the answer."""
        response = await self.send(endpoint, message, **options)
        if endpoint.response is endpoints.NOTHING:
            return cast(Resp, None)
        return decode(endpoint.response, response)

    async def send(
        self, endpoint: Endpoint[Req, Any], message: Req | bytes, **options: Unpack[Options]
    ) -> Response:
        """Like `call`, for callers that read the answer themselves or need none."""
        request = self._request(endpoint, message, **options)
        with self.stats.watch(endpoint.connection):
            response = await self._transport.send(request)
        if note := response.headers.get("x-deprecation-note"):
            self._log_deprecation(note, response.headers.get("x-deprecation-level"))
        return response

    @contextlib.asynccontextmanager
    async def stream(
        self, endpoint: Endpoint[Req, Any], message: Req
    ) -> AsyncIterator[tuple[Response, AsyncIterator[bytes]]]:
        """The head of an answer and its body as it comes. Sent once: what has been read cannot be
        taken back."""
        request = self._request(endpoint, message, headers={"Accept": endpoint.gives[0]})
        with self.stats.watch(endpoint.connection):
            async with self.http.stream(await self.signer.sign(request)) as opened:
                yield opened

    def _request(
        self, endpoint: Endpoint[Req, Any], message: Req | bytes, **options: Unpack[Options]
    ) -> Request:
        timeout = options.get("timeout_seconds", self.config.timeout_seconds)
        headers = dict(self._headers)
        headers["X-Stainless-Read-Timeout"] = f"{timeout:g}"
        content: bytes | None = None
        if message is not None:
            content = message if isinstance(message, bytes) else wire_json.encode(message)
            headers["Content-Type"] = endpoint.takes[0]
        if endpoint.method != "GET":
            headers["X-Idempotency-Key"] = f"stainless-python-retry-{self._unique_id()}"
        if sdk_method := options.get("sdk_method"):
            headers["x-sdk-version"] = PROTOCOL_VERSION
            headers["x-sdk-method"] = sdk_method
        headers.update(options.get("headers", {}))
        return Request(
            method=endpoint.method,
            url=urls.join(self.config.base_url, endpoint.full_path, options.get("query")),
            headers=headers,
            content=content,
            connection=endpoint.connection,
            timeout_seconds=timeout,
            retry=options.get("retry"),
        )

    async def exchange(self, credential: TokenSource) -> str:
        """A short-lived token for a credential."""
        signer = Authenticating(self.http, credential)
        transport = Retrying(signer, self.config.retry, self.repeater)
        request = self._request(endpoints.AUTH_TOKEN, b"{}")
        return decode(endpoints.AUTH_TOKEN.response, await transport.send(request)).jwt

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


def decode(kind: type[Resp], response: Response) -> Resp:
    """The message in an answer; one that breaks the protocol is an error that shows it."""
    assert issubclass(kind, Model), f"{kind.__name__} is read by the caller"
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
