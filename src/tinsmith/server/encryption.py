"""Exports encrypted with age (age-encryption.org) to recipients that a client names.

Whoever has the identity of one of them reads a file with `age -d -i IDENTITY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tinsmith import disk, extras
from tinsmith.disk import FileRecord
from tinsmith.errors import ValidationError

Recipient = Any  # pyrage has no annotations

MAX_RECIPIENTS = 10

ENCRYPTED = "encrypted"
"""The kind of weights whose files are encrypted: they can be fetched, and nothing else."""

_FIELD = "age_encryption_recipients"


def read_recipients(texts: Sequence[str]) -> list[Recipient]:
    """The recipients of an export: keys `age1…`, or public keys of SSH."""
    try:
        from pyrage import RecipientError, ssh, x25519
    except ImportError:
        raise ValidationError(
            f"this server cannot encrypt; on its machine: {extras.install_line('age')}", _FIELD
        ) from None
    if len(texts) > MAX_RECIPIENTS:
        raise ValidationError(f"at most {MAX_RECIPIENTS}, got {len(texts)}", _FIELD)
    recipients: list[Recipient] = []
    for index, text in enumerate(texts):
        kind = ssh.Recipient if text.startswith("ssh-") else x25519.Recipient
        try:
            recipients.append(kind.from_str(text.strip()))
        except RecipientError as error:
            raise ValidationError(
                f"{text[:80]!r} is neither a key age1… nor a public key of SSH: {error}",
                f"{_FIELD}[{index}]",
            ) from None
    return recipients


def encrypt_folder(source: Path, folder: Path, recipients: Sequence[str]) -> dict[str, FileRecord]:
    """Write the files of `source`, encrypted, as the new folder `folder`; what was written."""
    import pyrage

    keys = read_recipients(recipients)
    written = {}
    with disk.new_folder(folder) as draft:
        for file in sorted(source.iterdir()):
            with file.open("rb") as plain:
                encrypt = partial(pyrage.encrypt_io, plain, recipients=keys)
                name = f"{file.name}.age"
                written[name] = disk.write_file(draft / name, encrypt)
    return written
