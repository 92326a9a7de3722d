"""Calls of tools in a model's text: the forms that chat templates teach, and how to find them.

A template that shows a model how to call tools shows a form, and the model answers in it. What does
not parse as a call is text, whole and in its place: nothing that a model said is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tinsmith.errors import ValidationError
from tinsmith.server.chat.text import held_back
from tinsmith.types.convert import converter

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        return orjson.dumps(self.arguments).decode()


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One way of writing calls."""

    opening: str
    """What stands before a call."""

    closing: str
    """What stands behind one. Empty where a call is all that is said."""

    before_name: str
    before_arguments: str
    """Around the name of a function, to make the model call it."""

    read: Callable[[str], ToolCall | None]
    """A call from what stands between opening and closing."""

    def forced(self, name: str | None) -> str:
        """How an answer begins that must be a call: of this function, or of any."""
        begin = self.opening + self.before_name
        return begin if name is None else begin + name + self.before_arguments


def form_of(template: str) -> ToolForm | None:
    """The form that a chat template teaches; None where it does not speak of tools."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return _XML if "<function=" in template else _JSON
    # Llama's: the whole answer is one object.
    return _BARE if '"parameters"' in template else None


class ToolCallStream:
    """Text and calls in the order of their coming, from text in pieces."""

    def __init__(self, form: ToolForm, forced: str = "") -> None:
        self._form = form
        self._held = forced
        """Text that may yet turn out to be a call."""

        self._has_text = self._has_calls = False

    def add(self, text: str) -> list[str | ToolCall]:
        self._held += text
        if not self._form.closing:
            return self._add_to_one_object()
        parts: list[str | ToolCall] = []
        while (start := self._held.find(self._form.opening)) >= 0:
            parts += self._text(start)
            stop = self._held.find(self._form.closing)
            if stop < 0:
                return parts
            parts += self._call(stop + len(self._form.closing))
        return parts + self._text(len(self._held) - held_back(self._held, (self._form.opening,)))

    def finish(self) -> list[str | ToolCall]:
        """What was held back: the last call may lack its end."""
        if not self._held.lstrip().startswith(self._form.opening):
            is_padding = self._has_calls and not self._held.strip()
            return [self._held] if self._held and not is_padding else []
        return self._call(len(self._held))

    def _add_to_one_object(self) -> list[str | ToolCall]:
        """The whole answer is a call, or none of it is."""
        begin = self._held.lstrip()
        if not self._has_text and (not begin or begin.startswith(self._form.opening)):
            return []
        return self._text(len(self._held))

    def _text(self, stop: int) -> list[str | ToolCall]:
        """Text up to there, but no blank before a call: templates put line ends around calls."""
        text = self._held[:stop]
        if not self._has_text and not text.strip():
            return []
        self._held = self._held[stop:]
        self._has_text = True
        return [text] if text else []

    def _call(self, stop: int) -> list[str | ToolCall]:
        written, self._held = self._held[:stop], self._held[stop:]
        inside = written.strip()
        if self._form.closing:
            inside = inside.removeprefix(self._form.opening).removesuffix(self._form.closing)
        call = self._form.read(inside)
        if call is None:
            self._has_text = True
            return [written]
        self._has_calls, self._has_text = True, False
        return [call]


def joined(parts: Sequence[str | ToolCall]) -> tuple[str, list[ToolCall]]:
    """All text, and all calls."""
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolCall)]


def _read_json(text: str) -> ToolCall | None:
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", said.get("parameters", {}))
    return _call(said["name"], arguments) if isinstance(arguments, dict) else None


def _read_xml(text: str) -> ToolCall | None:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    values = {name.strip(): _value(value) for name, value in _PARAMETER.findall(found[2])}
    return _call(found[1].strip(), values)


def _call(name: str, arguments: dict[str, Any]) -> ToolCall | None:
    """None if the arguments lie deeper in each other than can be written again."""
    try:
        return ToolCall(name, converter(Any)(arguments))
    except ValidationError:
        return None


def _value(text: str) -> Any:
    """A parameter of the XML form: JSON where it is JSON, else the text itself."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


_JSON = ToolForm(_OPEN, _CLOSE, '\n{"name": "', '", "arguments": ', _read_json)
_XML = ToolForm(_OPEN, _CLOSE, "\n<function=", ">\n", _read_xml)
_BARE = ToolForm("{", "", '"name": "', '", "parameters": ', _read_json)
