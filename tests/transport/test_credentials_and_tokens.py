"""Where credentials come from, and how tokens are renewed."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import TinkerError
from tinsmith.transport.config import DEFAULT_BASE_URL, ClientConfig, ProxyRule
from tinsmith.transport.credentials import CredentialsFile, StoredKey
from tinsmith.transport.destination import warn_of_strange_destination
from tinsmith.transport.tokens import (
    NO_KEY,
    CredentialCommand,
    ExchangedToken,
    StaticKey,
    jwt_claims,
    raw_tokens,
    static_key,
)


def jwt(**claims: Any) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{payload}.x"


def test_the_callers_word_goes_before_the_environments() -> None:
    """S72, S73: everything that is read, in one place."""
    env = {
        "TINKER_BASE_URL": "https://Host:443/base/",
        "TINKER_API_KEY": "tml-env",
        "TINKER_CREDENTIAL_CMD": "",
        "TINKER_PROJECT_ID": "p",
        "TINKER_TAGS": "a,b,a",
        "TINKER_TELEMETRY": "off",
        "CLOUDFLARE_ACCESS_CLIENT_ID": "id",
        "HTTPS_PROXY": "http://proxy:1",
        "NO_PROXY": "localhost",
        "SSL_CERT_FILE": "/certs.pem",
    }
    config = ClientConfig.from_env(env, headers={"X-Mine": "1"})
    assert config.base_url == "https://host/base" and config.api_key == "tml-env"
    assert config.credential_command is None and config.project_id == "p"
    assert config.tags == ("a", "b") and config.telemetry is False
    assert config.headers == {"CF-Access-Client-Id": "id", "X-Mine": "1"}
    assert config.header_overrides == {"X-Mine": "1"}
    assert config.proxies == (
        ProxyRule(url="http://proxy:1", scheme="https", no_proxy="localhost"),
    )
    assert config.ca_file == Path("/certs.pem")
    given = ClientConfig.from_env(env, base_url="http://other", api_key="tml-arg", project_id="q")
    assert (given.base_url, given.api_key, given.project_id) == ("http://other", "tml-arg", "q")
    assert "tml-" not in repr(given)


def test_the_order_of_credentials(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "credentials.json"
    address = "http://10.0.0.7:8000"
    none = ClientConfig(base_url=address, credentials_file=file)
    with pytest.raises(TinkerError, match="auth login"):
        raw_tokens(none)
    CredentialsFile(file).add(address, stored("tml-stored"))
    assert static_key(none) == "tml-stored"
    assert isinstance(raw_tokens(none), StaticKey)
    command = ClientConfig(credentials_file=file, credential_command="echo x")
    assert isinstance(raw_tokens(command), CredentialCommand), "goes before the stored key"
    assert static_key(command) is None
    key = ClientConfig(credentials_file=file, credential_command="echo x", api_key="tml-given")
    assert isinstance(raw_tokens(key), StaticKey)
    assert isinstance(raw_tokens(key, command_only=True), CredentialCommand)
    token = ClientConfig(api_key=jwt(exp=1), credential_command="echo x")
    assert isinstance(raw_tokens(token, command_only=True), StaticKey), "already what is wanted"
    wrong = ClientConfig(api_key="sk-123", credential_command="echo x")
    assert isinstance(raw_tokens(wrong), CredentialCommand)
    with pytest.raises(TinkerError, match="tml-"):
        raw_tokens(ClientConfig(api_key="sk-123"))
    with pytest.raises(TinkerError, match="TINKER_CREDENTIAL_CMD"):
        raw_tokens(ClientConfig(api_key="tml-x"), command_only=True)


def stored(key: str) -> StoredKey:
    return StoredKey(key=key, key_id="1", name="laptop")


def test_the_stored_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "credentials.json"
    file = CredentialsFile(path)
    file.add("http://a:8000", stored("tml-a"))
    file.add("http://b:8000", stored("tml-b"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["credentials.json"]
    assert file.load().default == "http://b:8000"
    file.set_default("http://a:8000")
    file.delete("http://a:8000")
    assert (file.load().default, list(file.load().keys)) == (None, ["http://b:8000"])
    path.write_text("{not json")
    with pytest.raises(TinkerError, match="not a credentials file"):
        file.load()


def test_the_address_of_the_login_is_used_where_none_is_named(tmp_path: Path) -> None:
    env = {"TINSMITH_CREDENTIALS_FILE": str(tmp_path / "keys.json")}
    assert ClientConfig.from_env(env).base_url == DEFAULT_BASE_URL
    CredentialsFile(tmp_path / "keys.json").add("http://10.0.0.7:8000", stored("tml-a"))
    config = ClientConfig.from_env(env)
    assert (config.base_url, config.address_source) == ("http://10.0.0.7:8000", "login")
    assert static_key(config) == "tml-a"
    named = ClientConfig.from_env({**env, "TINKER_BASE_URL": "http://other"})
    assert (named.base_url, named.address_source) == ("http://other", "given")


def test_a_stored_key_goes_to_its_own_server_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    CredentialsFile(file).add("http://127.0.0.1:8000", stored("tml-a"))
    for address, key in {
        "http://127.0.0.1:8000": "tml-a",
        "http://localhost:8000/": "tml-a",
        "http://127.0.0.1:8001": None,
        "https://127.0.0.1:8000": None,
        "http://10.0.0.7:8000": None,
        DEFAULT_BASE_URL: None,
    }.items():
        config = ClientConfig(
            base_url=address, credentials_file=file, official_credentials_file=tmp_path / "none"
        )
        assert static_key(config) == key, address


def test_the_official_commands_key_is_used_for_the_hosted_service_only(tmp_path: Path) -> None:
    official = pytest.importorskip("tinker.lib.credentials")
    path = tmp_path / "official.json"
    theirs = official.JsonCredentialStore(path)
    theirs.add_key("7", official.ManualKey(key="tml-hosted", name="n"))
    theirs.set_default("7")
    before = path.read_bytes()
    files = {"credentials_file": tmp_path / "ours.json", "official_credentials_file": path}
    assert static_key(ClientConfig(**files)) == "tml-hosted"
    assert static_key(ClientConfig(base_url="http://10.0.0.7:8000", **files)) is None
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("env", "warning"),
    [
        ({"TINKER_API_KEY": "tml-a", "TINKER_BASE_URL": "http://10.0.0.7:8000"}, None),
        ({"TINKER_API_KEY": "tml-a"}, None),
        ({}, None),
        (
            {"TINKER_API_KEY": "tml-a", "TINKER_BASE_URL": "https://elsewhere"},
            r"stored for http://10.0.0.7:8000, and now goes to https://elsewhere",
        ),
        ({"TINKER_API_KEY": "tml-b"}, "goes to http://10.0.0.7:8000.*another key"),
        ({"TINKER_API_KEY": "tml-b", "TINKER_BASE_URL": "https://elsewhere"}, None),
    ],
    ids=str,
)
def test_a_key_that_goes_elsewhere_than_it_was_made_for_is_warned_of(
    env: dict[str, str], warning: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CredentialsFile(tmp_path / "keys.json").add("http://10.0.0.7:8000", stored("tml-a"))
    env = {"TINSMITH_CREDENTIALS_FILE": str(tmp_path / "keys.json"), **env}
    warn_of_strange_destination(ClientConfig.from_env(env))
    if warning is None:
        assert caplog.text == ""
    else:
        assert re.search(warning, caplog.text)
    assert "tml-" not in caplog.text


def test_the_hosted_service_is_named_before_a_key_goes_there_unasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = {"TINSMITH_CREDENTIALS_FILE": str(tmp_path / "none"), "TINKER_API_KEY": "tml-a"}
    warn_of_strange_destination(ClientConfig.from_env(env))
    assert DEFAULT_BASE_URL in caplog.text and "TINKER_BASE_URL" in caplog.text
    caplog.clear()
    env["TINKER_BASE_URL"] = DEFAULT_BASE_URL
    warn_of_strange_destination(ClientConfig.from_env(env))
    assert caplog.text == ""


async def test_a_command_is_run_for_every_token_and_its_failure_is_shown() -> None:
    assert await CredentialCommand("printf ' tml-x\\n'").token() == "tml-x"
    with pytest.raises(TinkerError, match="oh no"):
        await CredentialCommand("echo oh no >&2; exit 3").token()


class Issuer:
    """Hands out tokens of a given lifetime, by a clock the test moves."""

    def __init__(self, lifetime: float) -> None:
        self.now, self.lifetime, self.issued, self.broken = 0.0, lifetime, 0, False

    async def fetch(self) -> str:
        await asyncio.sleep(0)
        if self.broken:
            raise TinkerError("down")
        self.issued += 1
        return jwt(exp=self.now + self.lifetime, n=self.issued)

    def tokens(self) -> ExchangedToken:
        return ExchangedToken(self.fetch, now=lambda: self.now)


async def test_a_token_is_kept_renewed_early_and_never_twice_at_once() -> None:
    issuer = Issuer(3600)
    tokens = issuer.tokens()
    first = await asyncio.gather(*(tokens.token() for _ in range(20)))
    assert len(set(first)) == 1 and issuer.issued == 1
    issuer.now = 3200.0
    assert await tokens.token() == first[0]
    issuer.now = 3301.0  # within five minutes of the end: renewed behind the caller's back
    assert await tokens.token() == first[0]
    await asyncio.sleep(0.01)
    assert issuer.issued == 2 and jwt_claims(await tokens.token())["n"] == 2


async def test_a_token_at_its_end_is_waited_for() -> None:
    issuer = Issuer(3600)
    tokens = issuer.tokens()
    await tokens.token()
    issuer.now = 3590.0
    assert jwt_claims(await tokens.token())["n"] == 2


async def test_a_failed_renewal_uses_the_old_token_and_pauses() -> None:
    issuer = Issuer(3600)
    tokens = issuer.tokens()
    old = await tokens.token()
    issuer.broken, issuer.now = True, 3590.0
    assert await tokens.token() == old
    issuer.broken = False
    assert await tokens.token() == old, "not asked again at once"
    issuer.now += 61
    assert await tokens.token() != old


async def test_without_any_token_a_failure_is_the_callers() -> None:
    issuer = Issuer(3600)
    issuer.broken = True
    tokens = issuer.tokens()
    with pytest.raises(TinkerError, match="down"):
        await tokens.token()
    issuer.broken = False
    assert await tokens.token()


async def test_short_lived_tokens_are_not_renewed_without_pause() -> None:
    issuer = Issuer(200)
    tokens = issuer.tokens()
    for _ in range(50):
        await tokens.token()
    await asyncio.sleep(0.01)
    assert issuer.issued == 1
    issuer.now = 110.0
    await tokens.token()
    await asyncio.sleep(0.01)
    assert issuer.issued == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_on_this_machine_is_asked_without_a_key(tmp_path: Path, host: str) -> None:
    """It may have been started with --no-auth; if not, it says what is missing."""
    config = ClientConfig(
        base_url=f"http://{host}:8000", credentials_file=tmp_path / "credentials.json"
    )
    source = raw_tokens(config)
    assert isinstance(source, StaticKey) and source.key == NO_KEY
    with pytest.raises(TinkerError, match="auth login"):
        raw_tokens(replace(config, base_url="https://localhost.example.com"))
