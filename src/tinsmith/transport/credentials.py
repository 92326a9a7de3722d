"""The stored API keys: a JSON file that only its owner may read.

{"version": 1, "default": "<key id>", "keys": {"<key id>": {"type": "manual", "key": …}}}
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import orjson

from tinsmith.errors import TinkerError, ValidationError
from tinsmith.types import ApiKeyDetails
from tinsmith.types.convert import Tagged
from tinsmith.types.model import Response


class ManualKey(Response):
    """A key that the user pasted in."""

    type: Literal["manual"] = "manual"
    key: str
    name: str
    note: str | None = None
    details: ApiKeyDetails | None = None


class GeneratedKey(Response):
    """A key that an old release of the official command made for itself."""

    type: Literal["generated"] = "generated"
    key: str
    name: str
    details: ApiKeyDetails


KeyRecord = Annotated[ManualKey | GeneratedKey, Tagged("type")]


class StoredCredentials(Response):
    version: Literal[1] = 1
    default: str | None = None
    keys: dict[str, KeyRecord] = {}  # noqa: RUF012  # messages copy their defaults


class CredentialsFile:
    """Reads and writes the file. Every change goes through a temporary file and a rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> StoredCredentials:
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return StoredCredentials()
        try:
            return StoredCredentials.model_validate_json(text)
        except ValidationError as error:
            raise TinkerError(f"{str(self.path)!r} is not a credentials file: {error}") from error

    def default_key(self) -> ManualKey | GeneratedKey | None:
        stored = self.load()
        return None if stored.default is None else stored.keys.get(stored.default)

    def add(self, key_id: str, record: ManualKey | GeneratedKey) -> None:
        stored = self.load()
        self._save(stored.model_copy(update={"keys": {**stored.keys, key_id: record}}))

    def delete(self, key_id: str) -> None:
        stored = self.load()
        keys = dict(stored.keys)
        del keys[key_id]
        default = None if stored.default == key_id else stored.default
        self._save(stored.model_copy(update={"keys": keys, "default": default}))

    def set_default(self, key_id: str | None) -> None:
        stored = self.load()
        if key_id is not None and key_id not in stored.keys:
            raise KeyError(key_id)
        self._save(stored.model_copy(update={"default": key_id}))

    def _save(self, stored: StoredCredentials) -> None:
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
