"""Who makes a request: keys, tokens exchanged for keys, and signatures on download URLs.

Keys are random, so a plain hash keeps them safe; only the hash is stored. Tokens are JSON web
tokens signed with a secret of this data folder.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tinsmith.server.store.records import KeyRecord
from tinsmith.server.store.store import Store

KEY_PREFIX = "tml-"
TOKEN_PREFIX = "eyJ"
LOCAL_OWNER = "local"
"""The caller of every request when the server runs without authentication."""

KEY_CHANGES = "keys.changed"
"""A file in the data folder, touched whenever another process changes the keys."""

_KEY_CACHE_SECONDS = 0.5
"""How old our list of keys may be, where they may change on machines that do not share the file."""

_LOOK_SECONDS = 0.02
"""How often, at most, the event loop asks the disk whether keys were changed elsewhere."""

_NUMBER = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. What is made in it belongs to `owner`."""

    owner: str
    key_id: int
    key_name: str = ""
    key_note: str = ""
    token_expires_at: int | None = None
    """Until when the token is good with which the request came; None if it came with a key."""

    @property
    def user_urn(self) -> str:
        return f"tml:organization_user:{self.owner}"


class Auth:
    def __init__(
        self, store: Store, secret: bytes, *, is_required: bool, changes: Path | None = None
    ) -> None:
        """`changes` is a file that other processes touch when they change keys."""
        self._store = store
        self._secret = secret
        self._is_required = is_required
        self._changes = changes
        self._by_hash: dict[str, KeyRecord] = {}
        self._by_id: dict[int, KeyRecord] = {}
        self._read_at = 0.0
        self._changed_at = 0.0
        self._seen_change = 0
        self._found_change = 0
        self._looked_at = 0.0
        self._reading = asyncio.Lock()

    async def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """The caller named by a request's headers; None when they name nobody."""
        if not self._is_required:
            return Caller(LOCAL_OWNER, 0, "local", "authentication is off")
        return await self.resolve(credential_in(headers))

    async def resolve(self, credential: str | None) -> Caller | None:
        """The caller behind a key or token."""
        if not credential:
            return None
        if credential.startswith(TOKEN_PREFIX):
            claims = self._verified(credential)
            return None if claims is None else await self.of_key(claims["key_id"], claims["exp"])
        digest = hash_key(credential)
        if digest not in self._by_hash or not self._is_fresh(time.monotonic()):
            await self._refresh()
        return _caller(self._by_hash.get(digest), None)

    async def of_key(self, key_id: int, expires_at: int | None) -> Caller | None:
        """The caller behind what was given out for a key, while the key is good; a moment is the
        end of what was given out."""
        if key_id not in self._by_id or not self._is_fresh(time.monotonic()):
            await self._refresh()
        return _caller(self._by_id.get(key_id), expires_at)

    def issue_token(self, caller: Caller, seconds: int) -> str:
        """A token that stands for the caller for a while; one for a token ends when that does."""
        now = int(time.time())
        claims = {
            "iss": "passport-tinsmith",
            "sub": caller.user_urn,
            "org_id": caller.owner,
            "email": "",
            "key_id": caller.key_id,
            "iat": now,
            "exp": caller.token_expires_at or now + seconds,
        }
        head = _b64(orjson.dumps({"alg": "HS256", "typ": "JWT"}))
        signed = f"{head}.{_b64(orjson.dumps(claims))}"
        return f"{signed}.{_b64(self._sign(signed))}"

    def sign_path(self, path: str, expires: int) -> str:
        """A signature that lets anybody fetch `path` until `expires`."""
        return _b64(self._sign(f"GET {path} {expires}"))

    def is_signed(self, path: str, expires: str, signature: str) -> bool:
        if not _NUMBER.fullmatch(expires) or int(expires) < time.time():
            return False
        return _is_equal(self.sign_path(path, int(expires)), signature)

    def _is_fresh(self, now: float) -> bool:
        """Whether the keys are still as they were read."""
        return (
            not self._has_changed(now)
            and self._read_at > self._changed_at
            and now - self._read_at <= _KEY_CACHE_SECONDS
        )

    async def _refresh(self) -> None:
        """Read the keys again: they may have changed, or one is asked for that is not there.

        Those who ask at the same time share a reading that began after they asked, so that no
        flood of wrong keys becomes one of readings.
        """
        asked_at = time.monotonic()
        async with self._reading:
            if self._read_at > asked_at:
                return
            began, change = time.monotonic(), self.last_change()
            keys = [k for k in await self._store.keys.list() if k.is_good(time.time())]
            self._by_hash = {k.key_hash: k for k in keys}
            self._by_id = {k.key_id: k for k in keys}
            self._read_at, self._seen_change, self._found_change = began, change, change

    def _has_changed(self, now: float) -> bool:
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at, self._found_change = now, self.last_change()
        return self._found_change != self._seen_change

    def last_change(self) -> int:
        """When keys were last made or revoked by another process; only good for comparing."""
        if self._changes is None:
            return 0
        try:
            return self._changes.stat().st_mtime_ns
        except OSError:
            return 0

    def forget_keys(self) -> None:
        """Look at the store again before the next decision.

        A reading that is under way does not count: it may have seen what was before.
        """
        self._changed_at = time.monotonic()

    def _verified(self, token: str) -> dict[str, Any] | None:
        """What we wrote into the token, if it was us and it is still good."""
        signed, _, signature = token.rpartition(".")
        if not _is_equal(_b64(self._sign(signed)), signature):
            return None
        claims: dict[str, Any] = orjson.loads(_unb64(signed.partition(".")[2]))
        return claims if claims["exp"] > time.time() else None

    def _sign(self, text: str) -> bytes:
        return hmac.new(self._secret, text.encode(errors="replace"), hashlib.sha256).digest()


def _caller(key: KeyRecord | None, expires_at: int | None) -> Caller | None:
    if key is None or not key.is_good(time.time()):
        return None
    return Caller(key.owner, key.key_id, key.name, key.note, expires_at)


def credential_in(headers: Mapping[str, str]) -> str | None:
    """The key or token of a request: `X-API-Key`, or a bearer token as OpenAI clients send."""
    if key := headers.get("x-api-key"):
        return key
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


async def create_key(
    store: Store, owner: str, name: str, note: str = "", *, seconds: float | None = None
) -> tuple[str, KeyRecord]:
    """A fresh key and its record, good for some seconds or for ever; the key is not kept."""
    key, now = new_key(), time.time()
    record = KeyRecord(
        owner=owner,
        name=name,
        note=note,
        key_hash=hash_key(key),
        created_at=now,
        expires_at=None if seconds is None else now + seconds,
    )
    return key, await store.keys.add(record)


def note_key_change(data_dir: Path) -> None:
    """Tell a server that runs on this data folder to look at its keys again."""
    file = data_dir / KEY_CHANGES
    file.touch(mode=0o600)
    # Two changes within one tick of the file system's clock must still look like two.
    before = file.stat().st_mtime_ns
    os.utime(file, ns=(before, max(time.time_ns(), before + 1)))


def _is_equal(ours: str, given: str) -> bool:
    """Compares in the same time wherever they differ; texts of any characters."""
    return hmac.compare_digest(ours.encode(), given.encode(errors="replace"))


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
