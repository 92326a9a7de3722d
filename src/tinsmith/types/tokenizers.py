"""The files of a model's tokenizer, as a server hands them out."""

from __future__ import annotations

from tinsmith.types.model import Response

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
"""What is handed out of a model's folder, and what a client takes: data only, no code."""

MAX_TOKENIZER_FILE_BYTES = 64 * 1024 * 1024


class TokenizerFile(Response):
    name: str
    """One of `TOKENIZER_FILES`."""
    sha256: str
    size: int


class TokenizerFilesResponse(Response):
    base_model: str
    files: list[TokenizerFile]
    """None where the server has no tokenizer for the model."""
