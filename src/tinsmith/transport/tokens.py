"""Whose request it is: the token in `X-API-Key`, from wherever it comes.

A static key, a command that prints one, or a short-lived JWT for which either is exchanged. A JWT
is renewed while it is still good, in the background; callers wait only when it is about to end.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import orjson

from tinsmith.errors import TinkerError
from tinsmith.transport import urls
from tinsmith.transport.base import Request, Response, Transport
from tinsmith.transport.config import DEFAULT_BASE_URL, ClientConfig
from tinsmith.transport.credentials import CredentialsFile, official_key

logger = logging.getLogger(__name__)

MISSING_KEY = (
    "no API key for {address}: pass api_key to the client, set TINKER_API_KEY or "
    "TINKER_CREDENTIAL_CMD, or store a key with `tinsmith auth login`"
)


NO_KEY = "tml-none"
"""Sent to this machine's own servers where there is no key: they may want none, and say so if
they do."""


class TokenSource(Protocol):
    async def token(self) -> str: ...


class Authenticating:
    """A transport that signs what passes through it."""

    def __init__(self, inner: Transport, tokens: TokenSource) -> None:
        self._inner = inner
        self.tokens = tokens

    async def send(self, request: Request) -> Response:
        return await self._inner.send(await self.sign(request))

    async def sign(self, request: Request) -> Request:
        token = await self.tokens.token()
        return replace(request, headers={**request.headers, "X-API-Key": token})


class StaticKey:
    def __init__(self, key: str) -> None:
        if not key.startswith(("tml-", "eyJ")):
            raise TinkerError(
                f"the API key must start with 'tml-'; the one given starts with {key[:4]!r}"
            )
        self.key = key

    async def token(self) -> str:
        return self.key


class CredentialCommand:
    """Runs the user's command for every token."""

    def __init__(self, command: str | None) -> None:
        if not command:
            raise TinkerError(
                "the service asks for changing credentials: set TINKER_CREDENTIAL_CMD to a "
                "command that prints one"
            )
        self._command = command

    async def token(self) -> str:
        process = await asyncio.create_subprocess_shell(
            self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        output, complaints = await process.communicate()
        token = output.decode().strip()
        if not token:
            detail = complaints.decode(errors="replace").strip()[-500:]
            raise TinkerError(
                f"TINKER_CREDENTIAL_CMD printed no credential (exit status {process.returncode})"
                f"{': ' + detail if detail else ''}"
            )
        return token


class ExchangedToken:
    """A JWT, fetched with another credential and renewed before it ends."""

    RENEW_BEFORE_SECONDS = 300.0
    WAIT_BEFORE_SECONDS = 60.0
    PAUSE_AFTER_FAILURE_SECONDS = 60.0

    def __init__(
        self, fetch: Callable[[], Awaitable[str]], *, now: Callable[[], float] = time.time
    ) -> None:
        self._fetch = fetch
        self._now = now
        self._token = ""
        self._expires = 0.0
        self._renew_at = 0.0
        self._renewal: asyncio.Task[None] | None = None

    async def token(self) -> str:
        now = self._now()
        if not self._token or self._expires - now <= self.WAIT_BEFORE_SECONDS:
            await self._renewed(must_wait=True)
        elif now >= self._renew_at:
            await self._renewed(must_wait=False)
        return self._token

    async def _renewed(self, *, must_wait: bool) -> None:
        """One renewal at a time, for all who ask; a failed one is fatal only without a token."""
        if self._renewal is None:
            if self._token and self._now() < self._renew_at:
                return
            self._renewal = asyncio.create_task(self._renew(), name="tinsmith-token")
            self._renewal.add_done_callback(_note_failure)
        if must_wait:
            try:
                await asyncio.shield(self._renewal)
            except Exception:
                if not self._token:
                    raise

    async def _renew(self) -> None:
        try:
            token = await self._fetch()
            now = self._now()
            self._token, self._expires = token, _expiry(token, now)
            lifetime = self._expires - now
            # A short-lived token is renewed at half of its life, not continuously.
            self._renew_at = now + max(lifetime - self.RENEW_BEFORE_SECONDS, lifetime / 2)
        except Exception:
            self._renew_at = self._now() + self.PAUSE_AFTER_FAILURE_SECONDS
            raise
        finally:
            self._renewal = None


def _note_failure(renewal: asyncio.Task[None]) -> None:
    if not renewal.cancelled() and (error := renewal.exception()) is not None:
        logger.warning("The access token could not be renewed: %s", error)


def jwt_claims(jwt: str) -> dict[str, Any]:
    """What a token says about itself, unverified: it came from the service over TLS."""
    try:
        payload = jwt.split(".")[1]
        claims = orjson.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError) as error:
        raise ValueError(f"not a JWT: {error}") from error
    return claims if isinstance(claims, dict) else {}


def _expiry(jwt: str, now: float) -> float:
    try:
        return float(jwt_claims(jwt)["exp"])
    except (ValueError, KeyError, TypeError):
        logger.debug("A token without a readable expiry is renewed every minute.")
        return now + ExchangedToken.WAIT_BEFORE_SECONDS * 2


def static_key(config: ClientConfig) -> str | None:
    """The key at hand, without running anything: given, from the environment, or stored for the
    server."""
    if config.api_key is not None:
        return config.api_key
    if config.credential_command is not None:
        return None  # the command goes before the stored key
    found = CredentialsFile(config.credentials_file).find(config.base_url)
    if found is not None:
        return found[1].key
    if urls.is_same_server(config.base_url, DEFAULT_BASE_URL):
        return official_key(config.official_credentials_file)
    return None


def key_to_send(config: ClientConfig) -> str:
    """The key at hand, or what a server on this machine gets where there is none."""
    key = static_key(config)
    if key is None and config.credential_command is None and urls.is_loopback(config.base_url):
        return NO_KEY
    if key is None:
        raise TinkerError(MISSING_KEY.format(address=config.base_url))
    return key


def raw_tokens(config: ClientConfig, *, command_only: bool = False) -> TokenSource:
    """The credential as the user has it, before any exchange."""
    key = config.api_key
    if key is not None and key.startswith("eyJ"):
        return StaticKey(key)
    if command_only:
        return CredentialCommand(config.credential_command)
    if key is not None:
        try:
            return StaticKey(key)
        except TinkerError:
            if config.credential_command is None:
                raise
    if config.credential_command is not None:
        return CredentialCommand(config.credential_command)
    return StaticKey(key_to_send(config))
