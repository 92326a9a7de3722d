"""Text in and out of tokens, for the endpoints that speak text."""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith.detokenizer import Detokenizer
from tinsmith.engine.base import BaseModelInfo
from tinsmith.errors import ValidationError
from tinsmith.text_model import TextModel


class TextModels:
    """Text models by base model, read when first used."""

    def __init__(self) -> None:
        self._models: dict[str, TextModel] = {}

    def get(self, base: BaseModelInfo) -> TextModel:
        """Blocks while it reads; call it in a thread."""
        if base.name not in self._models:
            folder = base.tokenizer_folder
            if folder is None or not (folder / "tokenizer.json").exists():
                raise ValidationError(f"this server has no tokenizer of {base.name}", "model")
            self._models[base.name] = TextModel(base.name, folder)
        return self._models[base.name]


class TextStream:
    """The text of a sequence as its tokens arrive, up to a stop string.

    Text is held back while it might still be the beginning of a stop string.
    """

    def __init__(self, model: TextModel, stops: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        """The stop string that ended it."""

        self._detokenizer = Detokenizer(model.decode)
        self._stops = stops
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        """New text that these tokens bring."""
        if self.stopped_by is not None:
            return ""
        text = self._up_to_stop(self._held + self._detokenizer.push(tokens))
        num_held = 0 if self.stopped_by is not None else held_back(text, self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back."""
        if self.stopped_by is not None:
            return ""
        return self._up_to_stop(self._held + self._detokenizer.finish())

    def _up_to_stop(self, text: str) -> str:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return text
        start, self.stopped_by = min(found)
        return text[:start]


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text might be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
