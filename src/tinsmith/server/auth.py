"""Who makes a request: keys, tokens exchanged for keys, and signatures on download URLs.

Keys are random, so a plain hash keeps them safe; only the hash is stored. Tokens are JSON web
tokens signed with a secret of this data folder.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tinsmith.server.store.base import KeyRecord, Store

KEY_PREFIX = "tml-"
TOKEN_PREFIX = "eyJ"
LOCAL_OWNER = "local"
"""Who everybody is when the server runs without authentication."""

_KEY_CACHE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. What is made in it belongs to `owner`."""

    owner: str
    key_id: int
    key_name: str = ""
    key_note: str = ""

    @property
    def user_urn(self) -> str:
        return f"tml:organization_user:{self.owner}"


class Auth:
    def __init__(self, store: Store, secret: bytes, *, is_required: bool) -> None:
        self._store = store
        self._secret = secret
        self._is_required = is_required
        self._keys: dict[str, KeyRecord] = {}
        self._read_at = 0.0

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
            if claims is None:
                return None
            key = next((k for k in await self._current() if k.key_id == claims.get("key_id")), None)
            return None if key is None else _caller(key)
        digest = hash_key(credential)
        if digest not in self._keys or time.monotonic() - self._read_at > _KEY_CACHE_SECONDS:
            await self._current(refresh=True)
        key = self._keys.get(digest)
        return None if key is None else _caller(key)

    def issue_token(self, caller: Caller, seconds: int) -> str:
        """A token that stands for the caller for a while."""
        claims = {
            "iss": "passport-tinsmith",
            "sub": caller.user_urn,
            "org_id": caller.owner,
            "email": "",
            "key_id": caller.key_id,
            "iat": int(time.time()),
            "exp": int(time.time()) + seconds,
        }
        head = _b64(orjson.dumps({"alg": "HS256", "typ": "JWT"}))
        signed = f"{head}.{_b64(orjson.dumps(claims))}"
        return f"{signed}.{_b64(self._sign(signed))}"

    def sign_path(self, path: str, expires: int) -> str:
        """A signature that lets anybody fetch `path` until `expires`."""
        return _b64(self._sign(f"GET {path} {expires}"))

    def is_signed(self, path: str, expires: str, signature: str) -> bool:
        if not (expires.isascii() and expires.isdigit()) or int(expires) < time.time():
            return False
        return hmac.compare_digest(self.sign_path(path, int(expires)), signature)

    async def _current(self, *, refresh: bool = False) -> list[KeyRecord]:
        if refresh or time.monotonic() - self._read_at > _KEY_CACHE_SECONDS:
            keys = await self._store.list_keys()
            self._keys = {k.key_hash: k for k in keys if k.revoked_at is None}
            self._read_at = time.monotonic()
        return list(self._keys.values())

    def forget_keys(self) -> None:
        """Look at the store again before the next decision."""
        self._keys = {}
        self._read_at = 0.0

    def _verified(self, token: str) -> dict[str, Any] | None:
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(_b64(self._sign(signed)), signature):
            return None
        try:
            claims = orjson.loads(_unb64(signed.partition(".")[2]))
        except ValueError:
            return None
        if not isinstance(claims, dict) or not claims.get("exp", 0) > time.time():
            return None
        return claims

    def _sign(self, text: str) -> bytes:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).digest()


def credential_in(headers: Mapping[str, str]) -> str | None:
    """The key or token of a request: `X-API-Key`, or a bearer token as OpenAI clients send."""
    if key := headers.get("x-api-key"):
        return key
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def create_key(store: Store, owner: str, name: str, note: str = "") -> tuple[str, KeyRecord]:
    """A fresh key and its record; the key itself is not kept."""
    key = new_key()
    record = KeyRecord(
        owner=owner, name=name, note=note, key_hash=hash_key(key), created_at=time.time()
    )
    return key, await store.add_key(record)


def _caller(key: KeyRecord) -> Caller:
    return Caller(key.owner, key.key_id, key.name, key.note)


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
