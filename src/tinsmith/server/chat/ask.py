"""A request for text, whichever API it came by, and the checks that these APIs share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinsmith.engine.base import Shaping
from tinsmith.errors import ValidationError
from tinsmith.server.chat.forms import Form
from tinsmith.server.chat.pictures import GivenImage
from tinsmith.types import SamplingParams
from tinsmith.types.convert import read_field
from tinsmith.types.protocol import MAX_STOP_CHARACTERS

MAX_STOPS = 64
MAX_TOOLS = 256
MAX_BIASES = 1024

SHAPING = {
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"
}  # fmt: skip
"""Fields that change the choice of tokens."""


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
    is_begun: bool = False
    """Whether the last message is the beginning of the answer."""

    images: tuple[GivenImage, ...] = ()
    """Those of the messages, in order."""

    params: SamplingParams
    shaping: Shaping | None = None
    form: Form | None = None
    stops: tuple[str, ...]
    n: int = 1
    stream: bool
    include_usage: bool = False
    with_token_ids: bool = False
    """Whether the answer has the tokens of prompt and choices, beside their text."""

    with_logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    """Whether the answer begins with the prompt, and has its log-probabilities, too."""

    tool_use: ToolUse = field(default_factory=ToolUse)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """What else the chat template is told; it must know these names."""

    template_hints: Mapping[str, Any] = field(default_factory=dict)
    """What it is told if it knows their names."""

    def __post_init__(self) -> None:
        if self.form is not None and self.tool_use.tools:
            raise ValidationError(
                "an answer of a given form cannot call tools; leave one of them out",
                self.form.field,
            )
        if self.is_begun and (self.form is not None or self.tool_use.is_forced):
            raise ValidationError(
                "an answer that continues a message can have no form, nor be made to call a tool",
                "messages",
            )


def read_stops(value: Any, name: str) -> tuple[str, ...]:
    stop = read_field(name, str | list[str] | None, value)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise ValidationError(
            f"at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters", name
        )
    if "" in stops:
        raise ValidationError("an empty text would stop at once", f"{name}[{stops.index('')}]")
    return stops


def read_shaping(fields: Mapping[str, Any]) -> Shaping | None:
    """What a request says of the choice of tokens; None where it leaves the model's."""
    said = read_field("logit_bias", dict[str, float] | None, fields.get("logit_bias")) or {}
    if len(said) > MAX_BIASES:
        raise ValidationError(f"at most {MAX_BIASES} tokens, got {len(said)}", "logit_bias")
    shaping = Shaping(
        min_p=given(fields, "min_p", float, 0.0),
        presence_penalty=given(fields, "presence_penalty", float, 0.0),
        frequency_penalty=given(fields, "frequency_penalty", float, 0.0),
        repetition_penalty=given(fields, "repetition_penalty", float, 1.0),
        logit_bias={_token(name): bias for name, bias in said.items()},
    )
    return None if shaping == Shaping() else shaping


def _token(name: str) -> int:
    if not name.isdecimal() or len(name) > 9:
        raise ValidationError(f"expected the ids of tokens, got {name[:20]!r}", "logit_bias")
    return int(name)


def function(name: Any, description: Any, parameters: Any, path: str) -> dict[str, Any]:
    """A tool as chat templates read it."""
    if not isinstance(name, str) or not name:
        raise ValidationError("expected a name", f"{path}.name")
    if not isinstance(description, str | None):
        raise ValidationError("expected a text", f"{path}.description")
    if not isinstance(parameters, Mapping | None):
        raise ValidationError("expected a JSON schema", f"{path}.parameters")
    schema = read_field(f"{path}.parameters", Any, parameters)
    known = {"name": name, "description": description or "", "parameters": schema or {}}
    return {"type": "function", "function": known}


def tool_list(tools: Any) -> list[Any]:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ValidationError(f"expected a list of at most {MAX_TOOLS} tools", "tools")
    return tools


def check_name(tools: tuple[dict[str, Any], ...], name: str) -> str:
    if name not in (tool["function"]["name"] for tool in tools):
        raise ValidationError(f"there is no tool called {name[:80]!r}", "tool_choice")
    return name


def check_beginning(message: Mapping[str, Any], path: str) -> None:
    """Of an answer, which the model is to go on with."""
    if message["role"] != "assistant" or "tool_calls" in message:
        raise ValidationError("only a text of the assistant can be continued", path)
    if "reasoning_content" in message:
        raise ValidationError("an answer cannot begin with thoughts", path)
    if not message["content"] or message["content"] != message["content"].rstrip():
        raise ValidationError(
            "a text to be continued must be there, and not end in white space", path
        )


def given(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else read_field(name, kind, value)


def text_of(content: Any, path: str) -> str:
    """A text, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError("expected a text", path)
    return "".join(text_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def joined_parts(parts: list[str | dict[str, str]]) -> str | list[dict[str, str]]:
    """A message's content as chat templates read it: a text, or parts where images are among them.

    Joined once: a text that grows part by part is copied for each of them.
    """
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    found: list[dict[str, str]] = []
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            found.append({"type": "text", "text": "".join(map(str, group))})
        else:
            found += [part for part in group if isinstance(part, dict)]
    return found


def text_part(part: Any, path: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValidationError("only text parts are supported", path)
