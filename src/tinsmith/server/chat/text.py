"""Text in and out of tokens, for the endpoints that speak text.

A model's own tokenizer and chat template, read from its folder. Chat templates are programs that
come with a model, so they run in a sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tinsmith.detokenizer import Detokenizer
from tinsmith.engine.base import BaseModelInfo
from tinsmith.errors import ValidationError


class TextModel:
    """The tokenizer and chat template of one base model."""

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.name = name
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config = _read_json(folder / "tokenizer_config.json")
        self._template = _read_template(folder, self._config)
        self._token_texts: dict[int, str] = {}
        """Asked for again and again; never more than the vocabulary has."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """One token by itself, special or not."""
        text = self._token_texts.get(token)
        if text is None:
            text = str(self._tokenizer.decode([token], skip_special_tokens=False))
            self._token_texts[token] = text
        return text

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The prompt that asks the model for the next message."""
        if self._template is None:
            raise ValidationError(f"{self.name} has no chat template; use /completions", "model")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        special = {
            name: _token_text(self._config.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        try:
            text = environment.from_string(self._template).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except TemplateError as error:
            raise ValidationError(f"the chat template refuses this: {error}", "messages") from None
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)


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
        self.is_stopped = False
        self._detokenizer = Detokenizer(model.decode)
        self._stops = stops
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        """New text that these tokens bring."""
        if self.is_stopped:
            return ""
        text = self._up_to_stop(self._held + self._detokenizer.push(tokens))
        num_held = 0 if self.is_stopped else _num_held(text, self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back."""
        if self.is_stopped:
            return ""
        return self._up_to_stop(self._held + self._detokenizer.finish())

    def _up_to_stop(self, text: str) -> str:
        found = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        self.is_stopped = bool(found)
        return text[: min(found)] if found else text


def _num_held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end might be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    found = orjson.loads(file.read_bytes())
    return found if isinstance(found, dict) else {}


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = config.get("chat_template")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
