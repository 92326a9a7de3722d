"""Examples to learn from: one JSON object per line, or a JSON array of them.

{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
{"prompt": "…", "completion": "…"}

A mistake is reported with its line or its place in the array. Nothing is cut: an example that is
too long is left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tinsmith.cli.training import conversation
from tinsmith.errors import TinkerError, ValidationError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Example:
    tokens: list[int]
    weights: list[float]

    @property
    def num_learned(self) -> float:
        """Tokens that count in the loss."""
        return sum(self.weights[1:])


def read(path: Path, tokenizer: Any, max_tokens: int) -> tuple[list[Example], int]:
    """The examples of a file, and how many were left out because they are too long."""
    examples = []
    num_too_long = 0
    for place, value in _entries(path):
        try:
            example = Example(*_tokens(value, tokenizer))
        except (ValueError, TinkerError) as error:
            raise ValidationError(str(error), place) from None
        if len(example.tokens) > max_tokens:
            num_too_long += 1
        else:
            examples.append(example)
    if not examples:
        raise ValidationError(f"no example of at most {max_tokens} tokens", str(path))
    return examples, num_too_long


def digest(examples: Sequence[Example]) -> str:
    """A short text that differs when any example does."""
    content = json.dumps([[each.tokens, each.weights] for each in examples])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def split(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """What to train on and what to hold out; the same for the same seed."""
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    num_held_out = round(len(examples) * fraction)
    if fraction > 0 and num_held_out == 0 and len(examples) > 1:
        num_held_out = 1
    held_out = set(order[:num_held_out])
    return (
        [each for i, each in enumerate(examples) if i not in held_out],
        [each for i, each in enumerate(examples) if i in held_out],
    )


class Batches:
    """The examples of each step. Each epoch has an order of its own, known from its number."""

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        self._examples = examples
        self._size = size
        self._seed = seed
        self._epoch, self._order = -1, [0]

    def of_step(self, step: int) -> list[Example]:
        return [self._at(n) for n in range(step * self._size, (step + 1) * self._size)]

    def _at(self, position: int) -> Example:
        epoch, index = divmod(position, len(self._examples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._examples)))
            random.Random(f"{self._seed} {epoch}").shuffle(self._order)
        return self._examples[self._order[index]]


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each entry of a file, with its place."""
    with path.open(encoding="utf-8-sig") as file:  # some programs begin a file with a mark
        if _first_character(file) == "[":
            for number, item in enumerate(_parsed(file.read(), str(path)), 1):
                yield f"{path}, item {number}", item
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parsed(line, place)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValidationError(str(error), place) from None


def _first_character(file: TextIO) -> str:
    """The first character that is not white space; the file is read from its start again."""
    while (character := file.read(1)) and character.isspace():
        pass
    file.seek(0)
    return character


def _tokens(value: Any, tokenizer: Any) -> tuple[list[int], list[float]]:
    if not isinstance(value, dict):
        raise ValidationError("expected an object with 'messages', or 'prompt' and 'completion'")
    if "messages" in value:
        return conversation.chat_example(tokenizer, _messages(value["messages"]))
    prompt, completion = value.get("prompt"), value.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValidationError("expected 'messages', or 'prompt' and 'completion' as text")
    tokens, weights = conversation.completion_example(tokenizer, prompt, completion)
    if not prompt or not completion:
        raise ValidationError("prompt and completion must not be empty")
    return tokens, weights


def _messages(value: Any) -> list[conversation.Message]:
    if not isinstance(value, list) or not value:
        raise ValidationError("must be a list of messages", "messages")
    for number, message in enumerate(value):
        path = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValidationError(f"needs a role, one of {', '.join(ROLES)}", path)
        if not isinstance(message.get("content"), str):
            raise ValidationError("needs a content that is text", path)
    return [{"role": each["role"], "content": each["content"]} for each in value]
