"""Which web pages and which names of this machine a request may come with.

A browser sends what any page tells it to. A page of another site is refused, whatever it asks; it
could not read the answer, but the deed would be done. Without authentication the name by which the
server was called counts as well: a page can let its own name lead to 127.0.0.1 and is then, for
the browser, the same site as we. Programs that are not browsers send no `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from tinsmith.server.config import ServerConfig

_NETLOC = re.compile(r"(\[[^\[\]@]*\]|[^\[\]@:]*)(?::[0-9]*)?")
_HARMLESS_SITES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` for the server's own pages and for what the user typed."""


class Origins:
    def __init__(self, config: ServerConfig) -> None:
        self._checks_host = not config.auth
        self._public = urlsplit(config.public_url or "").netloc.lower()
        self._names = {config.host.lower(), _host(self._public)}

    def trouble(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Why a request is refused, or None."""
        host = headers.get("host", "")
        if self._checks_host and not self._is_ours(_host(host)):
            return (
                f"this server has no authentication and is not known as {host[:100]!r}; "
                "call it by a loopback address, or set public_url to the name it is called by"
            )
        origin = headers.get("origin")
        if origin is not None and not self._is_same(origin, host):
            return f"web pages of {origin[:100]!r} may not use this server"
        site = headers.get("sec-fetch-site", "none")
        # Following a link shows the answer to the user and to nobody else: signed URLs are links.
        is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if site not in _HARMLESS_SITES and not is_link:
            return "web pages of other sites may not use this server"
        return None

    def _is_ours(self, name: str) -> bool:
        return bool(name) and (is_loopback(name) or name in self._names)

    def _is_same(self, origin: str, host: str) -> bool:
        _, _, netloc = origin.lower().partition("://")
        return bool(netloc) and netloc in (host.lower(), self._public)


def is_loopback(name: str) -> bool:
    """Whether a name always means this machine; a name that has to be looked up may not."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host(netloc: str) -> str:
    """`::1` of `[::1]:8000`, `localhost` of `LOCALHOST:8000`; nothing of what is no host."""
    found = _NETLOC.fullmatch(netloc)
    return found[1].strip("[]").lower().rstrip(".") if found else ""
