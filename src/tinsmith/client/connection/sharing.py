"""Connections that several clients share: those of one process, and those of several.

A connection that crosses to another process travels as a `SharedConnection`; the receiver opens a
connection of its own to the same session.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tinsmith.client.connection.connection import Connection, ExistingSession
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.tokens import static_key
from tinsmith.types import ClientConfigResponse, ClientDynamicConfigResponse


@dataclass(frozen=True, slots=True)
class SharedConnection:
    """A connection in a form that another process can open."""

    base_url: str
    default_headers_overrides: dict[str, str]
    client_config: dict[str, Any]
    client_dynamic_config: dict[str, Any]
    api_key: str | None = field(default=None, repr=False)

    def without_credentials(self) -> SharedConnection:
        return replace(self, api_key=None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def share(connection: Connection) -> SharedConnection:
    """What another process needs to use the connection's session."""
    return SharedConnection(
        base_url=connection.config.base_url,
        default_headers_overrides=dict(connection.config.header_overrides),
        client_config=connection.get_client_config().model_dump(),
        client_dynamic_config=connection.get_client_dynamic_config().model_dump(),
        api_key=static_key(connection.config),
    )


class ConnectionCache:
    """Connections that several clients of a process share, by what they were made from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shadows: weakref.WeakValueDictionary[str, Connection] = weakref.WeakValueDictionary()
        self._rest: dict[str, Connection] = {}

    def shadow(self, session_id: str, shared: SharedConnection) -> Connection:
        """The session of another process."""
        key = f"{session_id} {_digest(sorted(shared.as_dict().items()))}"
        with self._lock:
            connection = self._shadows.get(key)
            if connection is None:
                config = ClientConfig.from_env(
                    base_url=shared.base_url,
                    api_key=shared.api_key,
                    headers=shared.default_headers_overrides,
                )
                connection = self._shadows[key] = Connection(
                    config,
                    session=ExistingSession(
                        session_id=session_id,
                        flags=ClientConfigResponse.model_validate(shared.client_config),
                        switches=ClientDynamicConfigResponse.model_validate(
                            shared.client_dynamic_config
                        ),
                    ),
                )
            return connection

    def rest(self, config: ClientConfig) -> Connection:
        """For REST calls alone; it stays for the life of the process, so that clients which are
        made and dropped find its sockets open."""
        key = _digest(
            [config.base_url, config.api_key, config.credential_command, dict(config.headers)]
        )
        with self._lock:
            connection = self._rest.get(key)
            if connection is None or connection.is_closed:
                connection = self._rest[key] = Connection(config)
            return connection


def _digest(parts: object) -> str:
    # The keys of a cache that lives as long as the process hold no credentials.
    return hashlib.sha256(repr(parts).encode()).hexdigest()


CONNECTIONS = ConnectionCache()
