"""A model's tokenizer and chat template, read from a folder without transformers.

The server renders and reads text with it, and so do commands where transformers is not installed.
Chat templates are programs that come with a model, so they run in a sandbox.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tinsmith.errors import ValidationError

_NO_TEXT = "\ufffd"
"""What tokenizers write for bytes that are not a character."""

_HERE = "\ue000\ue001"
"""Where an answer is to go on, in characters that no template writes. The answer itself may also
stand in what a template puts behind it."""

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A byte as byte-fallback tokenizers (Llama 2, Mistral) name it."""

_PIECE_CHARACTERS = 64 * 1024
_MIN_COUNTED_TOKENS = 256 * 1024
"""Prompts of up to this many are counted to the token, also where they are too long."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextModel:
    """The tokenizer and chat template of one base model."""

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.name = name
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config = _read_json(folder / "tokenizer_config.json")
        self._template = _read_template(folder, self._config)
        self._token_texts: dict[int, str] = {}
        """A cache; never larger than the vocabulary."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, context: int | None = None
    ) -> list[int]:
        """The tokens of a text. One that is far too long for a `context` of so many is refused
        before all of it is looked at: each token takes a hundred bytes meanwhile."""
        if context is not None:
            self._check_length(text, context)
        # The library's `encode` would hold up all other threads.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def _check_length(self, text: str, context: int) -> None:
        """By its pieces, whose tokens are about as many as those of the whole."""
        most, count = max(2 * context, _MIN_COUNTED_TOKENS), 0
        if len(text) <= most:
            return
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            count += len(self.encode(piece, add_special_tokens=False))
            if count > most:
                raise ValidationError(
                    f"has more than {most} tokens; the model's context holds {context}", "prompt"
                )

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

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text in UTF-8, also where it is a part of a character."""
        text = self.token_text(token)
        if _NO_TEXT not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token) or text
        if found := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(found[1], 16)])
        letters = _byte_letters()
        known = all(letter in letters for letter in piece)
        return bytes(letters[letter] for letter in piece) if known else text.encode()

    def special_token(self, name: str) -> int | None:
        """The id of the token that the model uses as `eos_token`, `bos_token` or the like."""
        token: int | None = self._tokenizer.token_to_id(_token_text(self._config.get(name)))
        return token

    @property
    def template(self) -> str:
        """The model's chat template."""
        if self._template is None:
            raise ValidationError(f"{self.name} has no chat template; use /completions", "model")
        return self._template

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        is_open: bool = True,
    ) -> str:
        """The conversation as text; if it is open, up to where the assistant speaks next.

        `options` are further variables of the template: tools, whether to think, …
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # As `transformers` renders: JSON is not escaped for HTML.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = time.strftime
        told: dict[str, Any] = {
            name: _token_text(self._config.get(name)) for name in _SPECIAL_TOKENS
        }
        told |= {**(options or {}), "messages": list(messages), "add_generation_prompt": is_open}
        try:
            return environment.from_string(self.template).render(told)
        except (
            TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError
        ) as error:  # fmt: skip
            raise ValidationError(f"the chat template refuses this: {error}", "messages") from None

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        opening: str = "",
        context: int | None = None,
    ) -> list[int]:
        """The prompt that asks the model for the next message, which begins with `opening`."""
        # The template writes the special tokens itself.
        text = self.render(messages, options) + opening
        return self.encode(text, add_special_tokens=False, context=context)

    def render_begun(
        self,
        messages: Sequence[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        context: int | None = None,
    ) -> list[int]:
        """The prompt that asks the model to go on with the last message."""
        begun = messages[-1]["content"]
        marked = {**messages[-1], "content": begun + _HERE}
        text, mark, _ = self.render([*messages[:-1], marked], options, is_open=False).rpartition(
            _HERE
        )
        if not mark or not text.endswith(begun):
            raise ValidationError(
                f"the chat template of {self.name} changes the beginning of the answer", "messages"
            )
        return self.encode(text, add_special_tokens=False, context=context)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    found = orjson.loads(file.read_bytes())
    return found if isinstance(found, dict) else {}


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte that each letter of byte-level tokenizers stands for: printable Latin-1 is itself,
    the others are the letters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
