"""The files of the served models' tokenizers: what there is, and a file by its hash."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tinsmith import disk
from tinsmith.engine.base import BaseModelInfo
from tinsmith.types.tokenizers import MAX_TOKENIZER_FILE_BYTES, TOKENIZER_FILES, TokenizerFile

logger = logging.getLogger(__name__)


def tokenizer_files(base: BaseModelInfo) -> list[TokenizerFile]:
    """Reads files that it has not seen before; call it in a thread."""
    folder = base.tokenizer_folder
    if folder is None:
        return []
    return [file for name in TOKENIZER_FILES if (file := _described(folder / name)) is not None]


def find_file(models: Iterable[BaseModelInfo], sha256: str) -> Path | None:
    """The tokenizer file with that content, of any served model."""
    for base in models:
        for file in tokenizer_files(base):
            if file.sha256 == sha256 and base.tokenizer_folder is not None:
                return base.tokenizer_folder / file.name
    return None


def _described(path: Path) -> TokenizerFile | None:
    if not path.is_file():
        return None
    facts = path.stat()
    if facts.st_size > MAX_TOKENIZER_FILE_BYTES:
        logger.warning(
            "%s is not handed out: it has more than %d bytes", path, MAX_TOKENIZER_FILE_BYTES
        )
        return None
    sha256 = _sha256(path, facts.st_size, facts.st_mtime_ns)
    return TokenizerFile(name=path.name, sha256=sha256, size=facts.st_size)


@lru_cache(maxsize=1024)
def _sha256(path: Path, size: int, changed_ns: int) -> str:
    """Size and time are in the key alone: a file that changed is read again."""
    return disk.describe_file(path).sha256
