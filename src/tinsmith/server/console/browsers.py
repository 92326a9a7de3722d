"""Browsers that were let in: a key, or a link that works once, is exchanged for a random cookie.

A page never holds a key. The cookie stands for the key that it was given for, ends with it, and
counts for looking and for the few actions that the endpoint table names. Only its hash is stored.
"""

from __future__ import annotations

import secrets
import time

from tinsmith.server.edge.auth import Auth, Caller, hash_key
from tinsmith.server.store.records import BrowserSessionRecord
from tinsmith.server.store.store import Store

SESSION_SECONDS = 30 * 24 * 3600
LINK_SECONDS = 15 * 60
_MAX_KNOWN = 10_000


class Browsers:
    def __init__(self, store: Store, auth: Auth) -> None:
        self._store = store
        self._auth = auth
        self._known: dict[str, BrowserSessionRecord] = {}
        """By hash, as read from the store."""
        self._links: dict[str, tuple[int, float]] = {}
        """By the hash of a link's token: its key, and until when it works."""

    def new_link(self, key_id: int) -> str:
        """A token that lets one browser in with a key, once and soon."""
        token = secrets.token_urlsafe(32)
        self._links[hash_key(token)] = (key_id, time.time() + LINK_SECONDS)
        return token

    async def follow_link(self, token: str) -> str | None:
        """A cookie for a link's token; None for one that was used, is too old or never was."""
        key_id, until = self._links.pop(hash_key(token), (0, 0.0))
        if until < time.time():
            return None
        caller = await self._auth.of_key(key_id, None)
        return None if caller is None else await self.let_in(caller)

    async def let_in(self, caller: Caller) -> str:
        """A fresh cookie that stands for the caller's key."""
        cookie, now = secrets.token_urlsafe(32), time.time()
        await self._store.browsers.add(
            BrowserSessionRecord(
                cookie_hash=hash_key(cookie),
                key_id=caller.key_id,
                created_at=now,
                expires_at=now + SESSION_SECONDS,
            )
        )
        # The store may have ended the key's oldest one for it.
        self._known = {h: s for h, s in self._known.items() if s.key_id != caller.key_id}
        return cookie

    async def caller(self, cookie: str) -> Caller | None:
        """Whom a cookie stands for, while it and its key are good."""
        digest = hash_key(cookie)
        session = self._known.get(digest)
        if session is None:
            session = await self._store.browsers.get(digest)
            if session is None:
                return None
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[digest] = session
        if session.expires_at < time.time():
            return None
        return await self._auth.of_key(session.key_id, int(session.expires_at))

    async def send_away(self, cookie: str) -> None:
        digest = hash_key(cookie)
        self._known.pop(digest, None)
        # Anybody may come with any cookie: those that never were are not worth a commit.
        if await self._store.browsers.get(digest) is not None:
            await self._store.browsers.delete(digest)
