"""The one incremental detokenizer: text of a growing token list, piece by piece.

The engine looks for stop strings in it, the server streams it. A token does not have a text of its
own: tokenizers drop the space at the start of a text and spread characters over tokens. So a piece
is what new tokens add to the text of a short window of tokens.

`tokenizers.DecodeStream` works the same way but cannot be used here: it raises where a byte token
changes the text before it, withholds a stop string that precedes an incomplete character, and keeps
every token of a run of bytes that are no text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

Detokenize = Callable[[list[int]], str]
"""The text of a whole token list."""

_OPEN = "\ufffd"
"""What tokenizers write for bytes that are not, or not yet, a character."""

_MOST_OPEN = 3
"""Characters at the end that the next token may change: UTF-8 takes at most four bytes, and
byte-fallback tokenizers write one replacement character for each byte."""

_MOST_WINDOW_TOKENS = 32
_CONTEXT_TOKENS = 16


class Detokenizer:
    """The text of one growing token list. Holds a bounded number of tokens."""

    def __init__(self, detokenize: Detokenize, context: Sequence[int] = ()) -> None:
        """`context`: tokens before the first, which give it its space; their text is left out."""
        self._detokenize = detokenize
        self._window = list(context)
        self._text = detokenize(self._window) if context else ""
        self._num_settled = len(self._window)
        """Tokens of the window whose text no later token changes."""
        self._num_open = _num_open(self._text)

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add, without a character at its end that is incomplete."""
        given = self._text[: len(self._text) - self._num_open]
        self._window += tokens
        self._text = self._detokenize(self._window)
        if self._num_settled and not self._text.startswith(given):
            # Byte fallback turns a whole run of bytes into replacement characters while its last
            # character is incomplete. Leave the settled ones out of it.
            given = ""
            self._window = self._window[self._num_settled :]
            self._num_settled = 0
            self._text = self._detokenize(self._window)
        added = self._text[len(given) :]
        self._num_open = _num_open(added)
        self._forget(len(tokens), is_silent=not added)
        return added[: len(added) - self._num_open]

    def finish(self) -> str:
        """The incomplete character at the end, as the tokenizer writes it."""
        rest = self._text[len(self._text) - self._num_open :]
        self._num_open = 0
        return rest

    def _forget(self, num_new: int, *, is_silent: bool) -> None:
        """Keep only the tokens that the text of the next ones may depend on."""
        if is_silent and self._text:
            # Skipped special tokens. Without the text before them a space would be lost.
            del self._window[len(self._window) - num_new :]
        elif self._num_open == 0 and not is_silent:
            self._drop(self._num_settled)
            self._num_settled = len(self._window)
        elif len(self._window) > _MOST_WINDOW_TOKENS:
            self._drop(len(self._window) - _CONTEXT_TOKENS)

    def _drop(self, count: int) -> None:
        """Drop the oldest tokens, unless the others then have another text."""
        text = self._detokenize(self._window[count:]) if count else self._text
        if self._text.endswith(text):
            self._window, self._text = self._window[count:], text
            self._num_settled = max(self._num_settled - count, 0)


def read_detokenize(folder: Path) -> Detokenize | None:
    """The decoding half of the tokenizer in a model's folder; None where there is no fast one.

    The file is read when the first text is asked for, special tokens are kept, and spaces are not
    cleaned up.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None

    @functools.cache
    def tokenizer():  # type: ignore[no-untyped-def]  # the library has no annotations
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))

    def detokenize(tokens: list[int]) -> str:
        return str(tokenizer().decode(tokens, skip_special_tokens=False))

    return detokenize


def _num_open(text: str) -> int:
    return min(len(text) - len(text.rstrip(_OPEN)), _MOST_OPEN)
