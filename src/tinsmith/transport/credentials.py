"""The keys that `tinsmith auth login` stored, each with the address it was made for.

{"version": 1, "default": "http://127.0.0.1:8000",
 "keys": {"http://127.0.0.1:8000": {"key": "tml-…", "key_id": "1", "name": "laptop"}}}

Only its owner may read the file. The official command's file knows no addresses: it is read for
the hosted service alone, and never written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from tinsmith.errors import TinkerError, ValidationError
from tinsmith.transport import urls
from tinsmith.types.model import Response

R = TypeVar("R", bound=Response)


class StoredKey(Response):
    key: str
    key_id: str
    name: str


class StoredKeys(Response):
    version: Literal[1] = 1
    default: str | None = None
    keys: dict[str, StoredKey] = {}  # noqa: RUF012  # messages copy their defaults


class CredentialsFile:
    """Reads and writes the file. Every change goes through a temporary file and a rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> StoredKeys:
        return _read(self.path, StoredKeys) or StoredKeys()

    def find(self, address: str) -> tuple[str, StoredKey] | None:
        """The key for the server at `address`, and the address as it was given at the login."""
        for stored, record in self.load().keys.items():
            if urls.is_same_server(stored, address):
                return stored, record
        return None

    def add(self, address: str, record: StoredKey) -> None:
        """Store the key, and make its address the one that is used where none is named."""
        self._save(StoredKeys(default=address, keys={**self.load().keys, address: record}))

    def set_default(self, address: str) -> None:
        self._save(self.load().model_copy(update={"default": address}))

    def delete(self, address: str) -> None:
        stored = self.load()
        keys = {each: record for each, record in stored.keys.items() if each != address}
        default = None if stored.default == address else stored.default
        self._save(StoredKeys(default=default, keys=keys))

    def _save(self, stored: StoredKeys) -> None:
        folder = self.path.parent
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o700)
        body = orjson.dumps(stored.to_wire(), option=orjson.OPT_INDENT_2)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)  # mkstemp made it readable by the owner alone
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise


class _OfficialKeys(Response):
    default: str | None = None
    keys: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # as above; only "key" is of interest


def official_key(path: Path) -> str | None:
    """The key that the official command stored, which is for the hosted service."""
    stored = _read(path, _OfficialKeys)
    if stored is None or stored.default is None:
        return None
    return stored.keys.get(stored.default, {}).get("key")


def _read(path: Path, kind: type[R]) -> R | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        raise TinkerError(f"{str(path)!r} is not a credentials file: {error}") from error
