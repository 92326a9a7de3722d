"""`tinsmith key`: who may use a server. Works on its data folder, so no server needs to run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, moment, time_text, with_output
from tinsmith.cli.server.local_server import config_of, which_server

if TYPE_CHECKING:
    from tinsmith.server.store.records import KeyRecord


@click.group("key")
def command() -> None:
    """Create, list and revoke the keys of a server on this machine."""


@command.command("create")
@click.argument("name", default="key")
@click.option(
    "--owner",
    default="owner",
    show_default=True,
    help="Who it is for. Keys of one owner see the same runs; other owners' are invisible.",
)
@click.option("--note", default="", help="A remark to keep with it.")
@click.option("--ttl", type=click.IntRange(min=1), help="Seconds from now until it expires.")
@which_server
@with_output
def create(
    output: Output, /, name: str, owner: str, note: str, ttl: int | None, **where: Any
) -> None:
    """Create a key and print it. It is stored as a hash: it is shown this once."""
    from tinsmith.cli.server import keyring

    key, record = keyring.create(config_of(**where), owner, name, note, ttl)
    if output.is_json:
        output.show_json({"key": key, **_facts(record)})
        return
    output.note(f"Key {record.key_id} ({name}) for {owner}; it is shown this once.")
    click.echo(key)


@command.command("list")
@which_server
@with_output
def list_keys(output: Output, /, **where: Any) -> None:
    """List keys, those that were revoked or have expired too."""
    from tinsmith.cli.server import keyring

    records = keyring.list_keys(config_of(**where))
    output.show(
        {"keys": [_facts(record) for record in records]},
        Table(
            ["Key ID", "Name", "Owner", "Created", "Status", "Note"],
            [
                [
                    str(record.key_id),
                    record.name,
                    record.owner,
                    time_text(moment(record.created_at)),
                    _status(record),
                    record.note,
                ]
                for record in records
            ],
            None if records else "No keys",
        ),
    )


@command.command("revoke")
@click.argument("key_id", type=int)
@which_server
@with_output
def revoke(output: Output, /, key_id: int, **where: Any) -> None:
    """Revoke a key. A server on this data folder refuses it from then on."""
    from tinsmith.cli.server import keyring

    if not keyring.revoke(config_of(**where), key_id):
        raise CommandError(
            f"There is no active key {key_id}", "Run 'tinsmith key list' to see the keys there are."
        )
    if output.is_json:
        output.show_json({"revoked": key_id})
    else:
        click.echo(f"Revoked key {key_id}.")


def _facts(record: KeyRecord) -> dict[str, Any]:
    return {
        "key_id": record.key_id,
        "name": record.name,
        "owner": record.owner,
        "note": record.note,
        "created_at": moment(record.created_at),
        "revoked_at": None if record.revoked_at is None else moment(record.revoked_at),
        "expires_at": None if record.expires_at is None else moment(record.expires_at),
    }


def _status(record: KeyRecord) -> str:
    if record.revoked_at is not None:
        return "Revoked"
    return "Active" if record.is_good(time.time()) else "Expired"
