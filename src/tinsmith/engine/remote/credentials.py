"""Credentials: what an engine needs to be let in by its server, in one file for one slot.

The server writes the file anew for each engine that the slot is to have. It is a secret: whoever
has it can connect as the slot's engine, once, until another is expected.
"""

from __future__ import annotations

import dataclasses
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

import orjson

from tinsmith import disk
from tinsmith.errors import ValidationError
from tinsmith.types.convert import converter

SERVER_NAME = "tinsmith-server"
"""What the server is called in its certificate, wherever it listens."""


def engine_name(slot: int, epoch: int) -> str:
    """What an engine is called in its certificate."""
    return f"slot {slot} epoch {epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    address: str
    """Where the server waits for engines, as HOST:PORT."""

    slot: int
    epoch: int
    authority: str
    """The certificate, in PEM, that has signed the server's and the engine's."""

    certificate: str
    key: str

    def save(self, file: Path) -> None:
        disk.publish_file(file, orjson.dumps(dataclasses.asdict(self)), mode=0o600)

    @classmethod
    def load(cls, file: Path) -> Credentials:
        try:
            found = orjson.loads(file.read_bytes())
            hints = {"slot": int, "epoch": int}
            names = [field.name for field in dataclasses.fields(cls)]
            return cls(**{name: converter(hints.get(name, str))(found[name]) for name in names})
        except OSError as error:
            raise ValidationError(f"cannot read the credentials in {file}: {error}") from None
        except (KeyError, TypeError, ValueError):
            raise ValidationError(
                f"{file} holds no credentials of an engine; the server writes them to "
                "engines/slot-NUMBER.json in its data folder"
            ) from None

    def context(self) -> ssl.SSLContext:
        """For the engine's side of the connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return secured(context, self.authority, self.certificate, self.key)


def secured(context: ssl.SSLContext, authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """TLS 1.3 that lets in only certificates of the authority, and shows this one."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    load_chain(context, certificate, key)
    return context


def load_chain(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Python reads keys from files only; this one is removed when the function returns."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # made for this user alone
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
