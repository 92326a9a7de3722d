"""A request for text, whichever API it came by, and the checks that these APIs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.types import SamplingParams
from tinsmith.types.convert import converter
from tinsmith.types.protocol import MAX_STOP_CHARACTERS

MAX_STOPS = 64
MAX_TOOLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call."""

    tools: tuple[dict[str, Any], ...] = ()
    """As OpenAI clients describe functions, which is what chat templates read."""

    is_forced: bool = False
    """Whether the answer must be a call,"""

    name: str | None = None
    """and of which function."""

    is_single: bool = False
    """Whether the answer ends with its first call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    model: str
    is_chat: bool
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    params: SamplingParams
    stops: tuple[str, ...]
    n: int = 1
    stream: bool
    include_usage: bool = False
    with_logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    """Whether the answer begins with the prompt, and has its log-probabilities, too."""

    tool_use: ToolUse = field(default_factory=ToolUse)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """What else the chat template is told; it must know these names."""

    template_hints: Mapping[str, Any] = field(default_factory=dict)
    """What it is told if it knows their names."""


def read_stops(value: Any, name: str) -> tuple[str, ...]:
    stop = read(name, str | list[str] | None, value)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise ValidationError(
            f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters", name
        )
    return stops


def function(name: Any, description: Any, parameters: Any, path: str) -> dict[str, Any]:
    """A tool as chat templates read it."""
    if not isinstance(name, str) or not name:
        raise ValidationError("expected a name", f"{path}.name")
    if not isinstance(description, str | None):
        raise ValidationError("expected a text", f"{path}.description")
    if not isinstance(parameters, Mapping | None):
        raise ValidationError("expected a JSON schema", f"{path}.parameters")
    known = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": known}


def tool_list(tools: Any) -> list[Any]:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ValidationError(f"expected a list of at most {MAX_TOOLS} tools", "tools")
    return tools


def check_name(tools: tuple[dict[str, Any], ...], name: str) -> str:
    if name not in (tool["function"]["name"] for tool in tools):
        raise ValidationError(f"there is no tool called {name[:80]!r}", "tool_choice")
    return name


def given(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else read(name, kind, value)


def read(name: str, annotation: Any, value: Any) -> Any:
    try:
        return converter(annotation)(value)
    except ValidationError as error:
        raise error.under(name) from None


def text_of(content: Any, path: str) -> str:
    """A text, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError("expected a text", path)
    return "".join(_text_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _text_part(part: Any, path: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValidationError("only text parts are supported", path)
