"""Uplinks that several clients share: those of one process, and those of several.

An uplink that crosses to another process travels as a `SharedUplink`; the receiver opens an
uplink of its own to the same session.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tinsmith.client.uplink.uplink import ExistingSession, Uplink
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.tokens import static_key
from tinsmith.types import ClientConfigResponse, ClientDynamicConfigResponse


@dataclass(frozen=True, slots=True)
class SharedUplink:
    """An uplink in a form that another process can open."""

    base_url: str
    default_headers_overrides: dict[str, str]
    client_config: dict[str, Any]
    client_dynamic_config: dict[str, Any]
    api_key: str | None = field(default=None, repr=False)

    def without_credentials(self) -> SharedUplink:
        return replace(self, api_key=None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def share(uplink: Uplink) -> SharedUplink:
    """What another process needs to use the uplink's session."""
    return SharedUplink(
        base_url=uplink.config.base_url,
        default_headers_overrides=dict(uplink.config.header_overrides),
        client_config=uplink.get_client_config().model_dump(),
        client_dynamic_config=uplink.get_client_dynamic_config().model_dump(),
        api_key=static_key(uplink.config),
    )


class UplinkCache:
    """Uplinks that several clients of a process share, by what they were made from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shadows: weakref.WeakValueDictionary[str, Uplink] = weakref.WeakValueDictionary()
        self._rest: dict[str, Uplink] = {}

    def shadow(self, session_id: str, shared: SharedUplink) -> Uplink:
        """The session of another process."""
        key = f"{session_id} {_digest(sorted(shared.as_dict().items()))}"
        with self._lock:
            uplink = self._shadows.get(key)
            if uplink is None:
                config = ClientConfig.from_env(
                    base_url=shared.base_url,
                    api_key=shared.api_key,
                    headers=shared.default_headers_overrides,
                )
                uplink = self._shadows[key] = Uplink(
                    config,
                    session=ExistingSession(
                        session_id=session_id,
                        flags=ClientConfigResponse.model_validate(shared.client_config),
                        switches=ClientDynamicConfigResponse.model_validate(
                            shared.client_dynamic_config
                        ),
                    ),
                )
            return uplink

    def rest(self, config: ClientConfig) -> Uplink:
        """For REST calls alone; it stays for the life of the process, so that clients which are
        made and dropped find its sockets open."""
        key = _digest(
            [config.base_url, config.api_key, config.credential_command, dict(config.headers)]
        )
        with self._lock:
            uplink = self._rest.get(key)
            if uplink is None or uplink.is_closed:
                uplink = self._rest[key] = Uplink(config)
            return uplink


def _digest(parts: object) -> str:
    # The keys of a cache that lives as long as the process hold no credentials.
    return hashlib.sha256(repr(parts).encode()).hexdigest()


UPLINKS = UplinkCache()
