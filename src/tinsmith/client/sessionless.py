"""What the clients that need no session have in common: the connection, and how it is found."""

from __future__ import annotations

from tinsmith.client.connection.connection import Connection
from tinsmith.client.connection.sharing import CONNECTIONS
from tinsmith.client.connection.telemetry import Telemetry
from tinsmith.transport.config import ClientConfig


class SessionlessClient:
    """A client of a service; clients with the same address and key share one connection."""

    def __init__(
        self,
        _holder: Connection | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is None:
            _holder = CONNECTIONS.rest(ClientConfig.from_env(base_url=base_url, api_key=api_key))
        elif base_url is not None or api_key is not None:
            raise ValueError("give a holder or base_url/api_key, not both: a holder has its own")
        self.holder = _holder

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.holder.config.base_url}>"

    def get_telemetry(self) -> Telemetry | None:
        """What reports errors to the service; None if that is switched off."""
        return self.holder.get_telemetry()
