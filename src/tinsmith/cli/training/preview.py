"""What will be learned from data, token by token, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.cli.training import forms, records
from tinsmith.cli.training.conversation import Example, Tokenizer

if TYPE_CHECKING:
    from rich.text import Text

_LEARNED = ("black on green", "black on bright_green")
_READ = ("dim", "")
"""Styles that alternate, so that the border between two tokens can be seen."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One sequence of tokens, where it comes from and what it is there."""

    place: str
    kind: str
    example: Example


def sequences(source: str, method: str, tokenizer: Tokenizer) -> Iterator[Shown]:
    """Everything in the data as the method will see it; a mistake anywhere is an error."""
    for record in records.read(source):
        if method == "sft":
            for example in forms.examples(record, tokenizer):
                yield Shown(record.place, "example", example)
        elif method == "dpo":
            pair = forms.pair(record, tokenizer)
            yield Shown(record.place, "chosen", pair.chosen)
            yield Shown(record.place, "rejected", pair.rejected)
        else:
            tokens = forms.prompt(record, tokenizer).tokens
            yield Shown(record.place, "prompt", Example(tokens, [0.0] * len(tokens)))


def texts(tokenizer: Tokenizer, example: Example) -> list[str]:
    """Each token by itself, special or not."""
    return [str(tokenizer.decode([token])) for token in example.tokens]


def plain(pieces: Sequence[str], weights: Sequence[float]) -> str:
    """Tokens between bars, what is learned in guillemets.

    >>> plain(["Hi", "?", "Ho", "!"], [0.0, 0.0, 1.0, 1.0])
    'Hi|?|«Ho|!»'
    """
    parts = []
    for i, piece in enumerate(pieces):
        opens = weights[i] and (i == 0 or not weights[i - 1])
        closes = weights[i] and (i + 1 == len(pieces) or not weights[i + 1])
        parts.append(f"{'«' if opens else ''}{piece}{'»' if closes else ''}")
    return "|".join(parts)


def coloured(pieces: Sequence[str], weights: Sequence[float]) -> Text:
    """What is learned on green."""
    from rich.text import Text

    text = Text()
    for i, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        # The end of a line has no width of its own to be coloured.
        shown = piece.replace("\n", "↵\n")
        text.append(shown, (_LEARNED if weight else _READ)[i % 2])
    return text
