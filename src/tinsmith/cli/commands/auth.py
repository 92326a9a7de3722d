"""`tinsmith auth`: the keys that clients on this machine use, each for its own server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, text_of, with_output

if TYPE_CHECKING:
    from tinsmith.transport.config import ClientConfig
    from tinsmith.transport.credentials import StoredKey
    from tinsmith.types import SelfApiKeyResponse

_TIMEOUT_SECONDS = 30
_USUAL_ADDRESS = "http://127.0.0.1:8000"


@click.group("auth")
def command() -> None:
    """Manage authentication credentials."""


@command.command("login")
@click.argument("address", required=False)
@with_output
def login(output: Output, address: str | None) -> None:
    """Store a key for the server at ADDRESS, which commands and clients then use.

    The address is remembered with the key, and used wherever TINKER_BASE_URL is not set.
    """
    from tinsmith.transport.credentials import CredentialsFile, StoredKey

    config = _config_for(address, output)
    file = CredentialsFile(config.credentials_file)
    if (found := file.find(config.base_url)) is not None:
        if file.load().default == found[0]:
            raise CommandError(
                f"Already logged in to {found[0]}",
                "Run 'tinsmith auth logout' before logging in again.",
            )
        file.set_default(found[0])
        _say_stored(output, found[1], f"{found[0]} is used from now on, with its stored key.")
        return
    output.note(
        f"Logging in to {config.base_url}. "
        "Create an API key on the server's machine with: tinsmith key create"
    )
    key = click.prompt("Paste your API key", hide_input=True, err=output.is_json).strip()
    if not key:
        raise CommandError("The API key must not be empty")
    known = _get_own_key(config, key)
    record = StoredKey(key=key, key_id=str(known.key_id), name=known.name)
    file.add(config.base_url, record)
    who = known.details.user_details.email or "the owner"
    _say_stored(
        output,
        record,
        f"Logged in to {config.base_url} as {who} ({known.details.org_details.name})."
        f" Stored API key '{known.name}'.",
    )


@command.command("logout")
@click.argument("address", required=False)
@with_output
def logout(output: Output, address: str | None) -> None:
    """Forget the stored key for the server at ADDRESS; without it, for the one in use."""
    from tinsmith.transport.config import ClientConfig
    from tinsmith.transport.credentials import CredentialsFile

    config = ClientConfig.from_env(base_url=address)
    file = CredentialsFile(config.credentials_file)
    found = file.find(config.base_url)
    if found is None:
        others = ", ".join(file.load().keys)
        raise CommandError(
            f"No key is stored for {config.base_url}",
            f"There are keys for: {others}"
            if others
            else "There is nothing to log out from. Run 'tinsmith auth login' to log in.",
        )
    stored, record = found
    file.delete(stored)
    if output.is_json:
        output.show_json({"key_id": record.key_id, "active": True})
    else:
        click.echo(
            f"Removed credential '{record.name}' for {stored}. The API key is still active.\n"
            f"Revoke it on the server's machine with: tinsmith key revoke {record.key_id}"
        )


def _config_for(address: str | None, output: Output) -> ClientConfig:
    """The settings for a login; the address is asked for where none is named."""
    from tinsmith.transport.config import ClientConfig

    config = ClientConfig.from_env(base_url=address)
    if config.address_source == "given":
        return config
    asked = click.prompt("Address of the server", default=_USUAL_ADDRESS, err=output.is_json)
    return ClientConfig.from_env(base_url=asked)


def _say_stored(output: Output, record: StoredKey, text: str) -> None:
    if output.is_json:
        output.show_json({"key_id": record.key_id, "name": record.name})
    else:
        click.echo(text)


@command.command("status")
@with_output
def status(output: Output) -> None:
    """Check whether there is a credential, and whether the service accepts it."""
    from tinsmith.auth import raise_if_tinker_not_accessible, tinker_has_credentials
    from tinsmith.errors import TinkerError
    from tinsmith.transport.config import ClientConfig

    output.note(f"Server: {ClientConfig.from_env().base_url}")

    def say(has_credentials: bool, is_accessible: bool | None) -> None:
        if output.is_json:
            output.show_json({"credentials": has_credentials, "accessible": is_accessible})
            return
        click.echo(f"Credentials available: {'yes' if has_credentials else 'no'}")
        if is_accessible is not None:
            click.echo(f"Tinker accessible: {'yes' if is_accessible else 'no'}")

    if not tinker_has_credentials():
        say(False, None)
        raise CommandError(
            "No Tinker credentials are available",
            "Run 'tinsmith auth login', or set TINKER_API_KEY.",
        )
    try:
        raise_if_tinker_not_accessible()
    except TinkerError:
        say(True, False)
        raise
    say(True, True)


@command.command("whoami")
@with_output
def whoami(output: Output) -> None:
    """Show who the active credential belongs to."""
    from tinsmith.client.rest import RestClient

    identity = RestClient().whoami().result()
    output.show(
        identity.model_dump(),
        Table(
            ["Property", "Value"],
            [
                ["Email", text_of(identity.email)],
                ["User", identity.user_urn],
                ["Organization", identity.org_urn],
            ],
        ),
    )


def _get_own_key(config: ClientConfig, key: str) -> SelfApiKeyResponse:
    from tinsmith.errors import ValidationError
    from tinsmith.types import SelfApiKeyResponse

    body = _ask(config, key)
    try:
        return SelfApiKeyResponse.model_validate_json(body)
    except ValidationError as error:
        raise CommandError(
            "Could not validate the API key", f"The service's answer is unexpected: {error}"
        ) from error


def _ask(config: ClientConfig, key: str) -> bytes:
    """One plain request with a key, before any client is made with it."""
    import urllib.error
    import urllib.request

    path = "/api/v1/auth/apikey/me"
    request = urllib.request.Request(
        f"{config.base_url}{path}", headers={"X-API-Key": key, **config.headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            reason = _reason(error.read())
        details = f"{reason} (HTTP {error.code} from {path})"
    except OSError as error:
        details = f"Could not reach the service at {config.base_url}: {error}"
    raise CommandError("Could not validate the API key", details)


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return "The request failed"
