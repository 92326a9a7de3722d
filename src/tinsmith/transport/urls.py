"""Base URLs in one form, so that equal addresses are equal strings, and how paths join them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import quote, urlsplit, urlunsplit

from tinsmith.errors import TinkerError

_DEFAULT_PORTS = {"http": 80, "https": 443}


def normalise(base_url: str) -> str:
    """
    >>> normalise("HTTPS://Example.com:443/services/")
    'https://example.com/services'
    """
    parts = urlsplit(base_url.strip())
    scheme = parts.scheme.lower()
    try:
        port = parts.port
    except ValueError:
        port = -1
    if scheme not in _DEFAULT_PORTS or not parts.hostname or port == -1:
        raise TinkerError(
            f"{base_url!r} is not a base URL; it must look like https://host or http://host:port/path"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    place = "" if port in (None, _DEFAULT_PORTS[scheme]) else f":{port}"
    return urlunsplit((scheme, f"{user}{host}{place}", parts.path.rstrip("/"), "", ""))


def origin(url: str) -> tuple[str, str, int]:
    """What must be equal for a credential to go along: scheme, host and port."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(scheme, 0)


def is_same_server(one: str, other: str) -> bool:
    """Whether a key for one address is for the other too; this machine has several names.

    >>> is_same_server("http://localhost:8000", "http://127.0.0.1:8000/")
    True
    """
    if is_loopback(one) and is_loopback(other):
        return origin(one)[::2] == origin(other)[::2]
    return origin(one) == origin(other)


def is_loopback(url: str) -> bool:
    """Whether the address is this machine's own."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def join(base_url: str, path: str, query: Mapping[str, object] | None = None) -> str:
    """The address of an endpoint; ids in `path` are used as they are, query values are quoted."""
    pairs = [f"{name}={quote(_text(value), safe=',')}" for name, value in (query or {}).items()]
    return f"{base_url}{path}{'?' if pairs else ''}{'&'.join(pairs)}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(_text(item) for item in value)
    return str(value)
