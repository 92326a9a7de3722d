"""Text of tokens, which the sampler needs for stop strings and nothing else does."""

from __future__ import annotations

import functools
from pathlib import Path

from tinsmith.engine.stopping import Detokenize


def detokenizer(folder: Path) -> Detokenize | None:
    """The decoding half of the tokenizer in a model's folder; None where there is no fast one.

    The file is read when the first text is asked for, special tokens are kept, nothing is
    tidied up.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None

    @functools.cache
    def tokenizer():  # type: ignore[no-untyped-def]  # the library has no annotations
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))

    def text_of(tokens: list[int]) -> str:
        return str(tokenizer().decode(tokens, skip_special_tokens=False))

    return text_of
