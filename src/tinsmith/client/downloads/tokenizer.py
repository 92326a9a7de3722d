"""The tokenizer that a server hands out, cached on this machine by its content.

A folder is named after the hashes of its files, so that the same tokenizer is fetched once,
whatever model or server it comes from.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tinsmith.client.uplink.api import Api
from tinsmith.errors import NotFoundError, TinkerError
from tinsmith.types.tokenizers import MAX_TOKENIZER_FILE_BYTES, TOKENIZER_FILES, TokenizerFile
from tinsmith.wire import endpoints

logger = logging.getLogger(__name__)


async def fetch_tokenizer(api: Api, base_model: str) -> Path | None:
    """The folder with the tokenizer of a served model; None where the server has none."""
    query = {"base_model": base_model}
    try:
        listed = await api.call(endpoints.LIST_TOKENIZER_FILES, None, query=query)
    except NotFoundError:  # the hosted service: its tokenizers are on a hub
        return None
    if not listed.files:
        logger.warning(
            "the server has no tokenizer for %s; one of that name is taken from the hub", base_model
        )
        return None
    for file in listed.files:
        _check(file)
    folder = api.config.cache_folder.expanduser() / "tokenizers" / _digest(listed.files)
    if not folder.is_dir():
        _keep(folder, {file.name: await _fetch(api, file) for file in listed.files})
    return folder


async def _fetch(api: Api, file: TokenizerFile) -> bytes:
    response = await api.send(endpoints.GET_TOKENIZER_FILE.at(sha256=file.sha256), None)
    if hashlib.sha256(response.content).hexdigest() != file.sha256:
        raise TinkerError(f"{file.name} was damaged in transit: its SHA-256 differs; try again")
    return response.content


def _check(file: TokenizerFile) -> None:
    """Names become paths here, so they are not taken on trust."""
    if file.name not in TOKENIZER_FILES:
        raise TinkerError(f"the server lists {file.name!r}, which is no file of a tokenizer")
    if file.size > MAX_TOKENIZER_FILE_BYTES:
        raise TinkerError(
            f"the server's {file.name} has {file.size} bytes; at most {MAX_TOKENIZER_FILE_BYTES} "
            "are fetched"
        )


def _digest(files: Sequence[TokenizerFile]) -> str:
    lines = sorted(f"{file.name} {file.sha256}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _keep(folder: Path, contents: dict[str, bytes]) -> None:
    """The folder appears whole; where another process was faster, its folder stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        for name, content in contents.items():
            (draft / name).write_bytes(content)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
