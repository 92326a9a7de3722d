"""What the clients that need no session have in common: the uplink, and how it is found."""

from __future__ import annotations

from tinsmith.client.uplink.sharing import UPLINKS
from tinsmith.client.uplink.telemetry import Telemetry
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.transport.config import ClientConfig


class SessionlessClient:
    """A client of a service; clients with the same address and key share one uplink."""

    def __init__(
        self,
        _holder: Uplink | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is None:
            _holder = UPLINKS.rest(ClientConfig.from_env(base_url=base_url, api_key=api_key))
        elif base_url is not None or api_key is not None:
            raise ValueError("give a holder or base_url/api_key, not both: a holder has its own")
        self.holder = _holder

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.holder.config.base_url}>"

    def get_telemetry(self) -> Telemetry | None:
        """What reports errors to the service; None if that is switched off."""
        return self.holder.get_telemetry()
