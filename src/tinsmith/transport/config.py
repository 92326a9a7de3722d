"""The client's settings, and the only place where it reads the environment.

A config is built once and never changes: setting a variable later has no effect on clients that
exist, and two clients with different settings live side by side.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tinsmith.transport import urls
from tinsmith.transport.credentials import CredentialsFile
from tinsmith.transport.retry import POLLING, RetryPolicy

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"

PROTOCOL_VERSION = "0.36.0"
"""The release of the official client whose protocol this one speaks; servers are told this."""

CLIENT_VARIABLES = frozenset({"TINSMITH_CREDENTIALS_FILE", "TINSMITH_TRACING"})
"""Variables with the prefix of a server's settings that only clients read."""

_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRule:
    url: str
    """Where requests are sent instead: http, https, socks5 or socks5h."""

    scheme: str | None = None
    """Which requests: "http", "https", or both."""

    no_proxy: str | None = None
    """Hosts that are reached directly, separated by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long the client waits for what it does by itself, and not for a caller's request."""

    polling: RetryPolicy = POLLING
    """When a result is asked for again."""

    silence_seconds: float = 120.0
    """After this long without a heartbeat that got through there is a warning."""

    refresh_seconds: float = 10.0
    """Least time between two questions for the service's changing settings."""

    trace_seconds: float = 5.0
    """Between two questions whether a session's trace is written."""

    telemetry_close_seconds: float = 2.0
    """How long the last events may take to leave when the client is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    base_url: str = DEFAULT_BASE_URL
    """Where the service is, normalised; where it is not named, the address of `auth login`."""

    address_source: Literal["given", "login", "default"] = "given"
    """Who named `base_url`: the program or its environment, the last `auth login`, or nobody."""

    api_key: str | None = field(default=None, repr=False)
    """The credential itself; None: the command or the stored key."""

    credential_command: str | None = field(default=None, repr=False)
    """A shell command that prints a fresh credential."""

    credentials_file: Path = Path("~/.config/tinsmith/credentials.json")
    """Where `auth login` stores keys and their addresses."""

    official_credentials_file: Path = Path("~/.tinker/credentials.json")
    """Where the official command stores its key, which is used for the hosted service alone."""

    cache_folder: Path = Path("~/.cache/tinsmith")
    """Where tokenizers that servers hand out are kept."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request, over the client's own."""

    header_overrides: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The part of `headers` that the user gave; it travels with pickled clients."""

    project_id: str | None = None
    """The project that new sessions and copies belong to."""

    tags: tuple[str, ...] = ()
    """Labels of new sessions."""

    telemetry: bool = True
    """Whether the service is told about errors. Local logs and counters do not depend on it."""

    tracing: bool = False
    """Whether requests become OpenTelemetry spans of the current trace and carry it along."""

    proxies: tuple[ProxyRule, ...] = ()
    """The first rule that fits a request is used; none: the request goes directly."""

    ca_file: Path | None = None
    """Certificates to trust beside the system's, in PEM."""

    timeout_seconds: float = 60.0
    """For a request that has no limit of its own."""

    connect_timeout_seconds: float = 5.0
    """For reaching the server at all."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """When a failed request is sent again."""

    heartbeat_seconds: float = 10.0
    """How often the service hears that the session is alive."""

    timing: Timing = Timing()
    """How long the client waits for what it does by itself."""

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        project_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ClientConfig:
        """What the caller gives, then the environment, then the defaults. Empty counts as unset."""
        env = os.environ if env is None else env
        own_headers = {
            header: value
            for header, name in (
                ("CF-Access-Client-Id", "CLOUDFLARE_ACCESS_CLIENT_ID"),
                ("CF-Access-Client-Secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
            )
            if (value := env.get(name))
        }
        ca_file = env.get("SSL_CERT_FILE") or env.get("REQUESTS_CA_BUNDLE")
        tags = env.get("TINKER_TAGS")
        overrides = dict(headers or {})
        credentials_file = Path(
            env.get("TINSMITH_CREDENTIALS_FILE")
            or Path(env.get("XDG_CONFIG_HOME") or "~/.config", "tinsmith", "credentials.json")
        ).expanduser()
        given = base_url or env.get("TINKER_BASE_URL")
        login = None if given else CredentialsFile(credentials_file).load().default
        return cls(
            base_url=urls.normalise(given or login or DEFAULT_BASE_URL),
            address_source="given" if given else "login" if login else "default",
            api_key=api_key or env.get("TINKER_API_KEY") or None,
            credential_command=env.get("TINKER_CREDENTIAL_CMD") or None,
            credentials_file=credentials_file,
            official_credentials_file=Path("~/.tinker/credentials.json").expanduser(),
            cache_folder=Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tinsmith",
            headers={**own_headers, **overrides},
            header_overrides=overrides,
            project_id=project_id or env.get("TINKER_PROJECT_ID") or None,
            tags=() if tags is None else tuple(dict.fromkeys(tags.split(","))),
            telemetry=env.get("TINKER_TELEMETRY", "1").lower() in _TRUE,
            tracing=env.get("TINSMITH_TRACING", "0").lower() in _TRUE,
            proxies=_proxies(env),
            ca_file=Path(ca_file) if ca_file else None,
        )

    def with_credential(self, api_key: str) -> ClientConfig:
        """The same settings with another credential."""
        return replace(self, api_key=api_key)


def _proxies(env: Mapping[str, str]) -> tuple[ProxyRule, ...]:
    no_proxy = env.get("NO_PROXY") or env.get("no_proxy") or None
    rules = []
    for name, scheme in (("http_proxy", "http"), ("https_proxy", "https"), ("all_proxy", None)):
        # Upper-case HTTP_PROXY can be forged by a request header under CGI; clients are not CGI.
        url = env.get(name) or env.get(name.upper())
        if url:
            rules.append(ProxyRule(url=url, scheme=scheme, no_proxy=no_proxy))
    return tuple(rules)
