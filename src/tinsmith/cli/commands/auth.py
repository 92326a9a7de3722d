"""`tinsmith auth`: the key that clients on this machine use.

Stored keys are shared with the official command: both read the same file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, text_of, with_output

if TYPE_CHECKING:
    from tinsmith.transport.config import ClientConfig
    from tinsmith.transport.credentials import CredentialsFile
    from tinsmith.types import SelfApiKeyResponse

_TIMEOUT_SECONDS = 30


@click.group("auth")
def command() -> None:
    """Manage authentication credentials."""


@command.command("login")
@with_output
def login(output: Output) -> None:
    """Store a key for clients on this machine."""
    from tinsmith.transport.config import ClientConfig
    from tinsmith.transport.credentials import ManualKey

    config = ClientConfig.from_env()
    file = _file(config)
    if file.default_key() is not None:
        raise CommandError(
            "Already logged in", "Run 'tinsmith auth logout' before logging in again."
        )
    output.note("Create an API key on the server's machine with: tinsmith key create")
    key = click.prompt("Paste your API key", hide_input=True, err=output.is_json).strip()
    if not key:
        raise CommandError("The API key must not be empty")
    known = _get_own_key(config, key)
    key_id = str(known.key_id)
    file.add(key_id, ManualKey(key=key, name=known.name, note=known.note, details=known.details))
    file.set_default(key_id)
    if output.is_json:
        output.show_json({"key_id": key_id, "name": known.name})
        return
    details = known.details
    who = details.user_details.email or "the owner"
    click.echo(
        f"Logged in as {who} ({details.org_details.name})."
        f" Stored API key '{known.name}' as the default credential."
    )


@command.command("logout")
@with_output
def logout(output: Output) -> None:
    """Forget the stored key."""
    from tinsmith.transport.config import ClientConfig
    from tinsmith.transport.credentials import GeneratedKey

    config = ClientConfig.from_env()
    file = _file(config)
    key_id, record = file.load().default, file.default_key()
    if key_id is None or record is None:
        raise CommandError(
            "No default credential is stored",
            "There is nothing to log out from. Run 'tinsmith auth login' to log in.",
        )
    if not isinstance(record, GeneratedKey):
        file.delete(key_id)
        _say_forgotten(
            output,
            key_id,
            f"Removed credential '{record.name}'. The API key is still active.\n"
            f"Revoke it on the server's machine with: tinsmith key revoke {key_id}",
            is_active=True,
        )
        return
    try:
        _request(config, record.key, "DELETE")
    except CommandError as error:
        file.delete(key_id)
        raise CommandError(
            "Could not delete the API key on the server",
            f"Removed the local credential.\nAPI key name: {record.name}\nAPI key ID: {key_id}\n"
            f"{error.details or error.message}",
        ) from error
    file.delete(key_id)
    _say_forgotten(
        output,
        key_id,
        f"Removed credential '{record.name}' and deleted its API key on the server.",
        is_active=False,
    )


def _say_forgotten(output: Output, key_id: str, text: str, *, is_active: bool) -> None:
    if output.is_json:
        output.show_json({"key_id": key_id, "active": is_active})
    else:
        click.echo(text)


@command.command("status")
@with_output
def status(output: Output) -> None:
    """Check whether there is a credential, and whether it opens the service."""
    from tinsmith.auth import raise_if_tinker_not_accessible, tinker_has_credentials
    from tinsmith.errors import TinkerError

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


def _file(config: ClientConfig) -> CredentialsFile:
    from tinsmith.transport.credentials import CredentialsFile

    return CredentialsFile(config.credentials_file)


def _get_own_key(config: ClientConfig, key: str) -> SelfApiKeyResponse:
    from tinsmith.errors import ValidationError
    from tinsmith.types import SelfApiKeyResponse

    body = _request(config, key, "GET")
    try:
        return SelfApiKeyResponse.model_validate_json(body)
    except ValidationError as error:
        raise CommandError(
            "Could not validate the API key", f"The service's answer is unexpected: {error}"
        ) from error


def _request(config: ClientConfig, key: str, method: str) -> bytes:
    """One plain request with a key that no client has been made of yet."""
    import urllib.error
    import urllib.request

    path = "/api/v1/auth/apikey/me"
    request = urllib.request.Request(
        f"{config.base_url}{path}", method=method, headers={"X-API-Key": key, **config.headers}
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
