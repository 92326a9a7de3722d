"""The messages of OpenAI's Responses API: what is read, and what is answered.

Nothing is kept between requests: an agent sends the whole conversation as `input`, which is what
clients do with `store: false`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.server.chat.ask import (
    SHAPING,
    Ask,
    function,
    given,
    read_shaping,
    tool_list,
)
from tinsmith.server.chat.forms import Form, schema_form
from tinsmith.server.chat.openai import called, check_known, tool_use
from tinsmith.server.chat.tool_calls import ToolCall
from tinsmith.types import SamplingParams
from tinsmith.types.convert import read_field

_KNOWN = SHAPING | {
    "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "top_k", "seed",
    "stream", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning",
    # Of no effect on what is answered.
    "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    # What these would add is never there.
    "include": ([], ["reasoning.encrypted_content"]),
    "stream_options": ({}, {"include_obfuscation": False}),
}
_REPEATED = ("metadata", "user", "tools", "tool_choice")
"""What stands in the answer as it was sent, and is not looked at in whole elsewhere."""

_NOTHING_KEPT = "this server keeps no responses; send the whole conversation as input"
_TEXT_PARTS = ("input_text", "output_text", "text")


def read_response(fields: Mapping[str, Any]) -> Ask:
    for name in ("previous_response_id", "conversation"):
        if fields.get(name) is not None:
            raise ValidationError(_NOTHING_KEPT, name)
    if fields.get("store"):
        raise ValidationError("this server keeps no responses; send false", "store")
    check_known(fields, _KNOWN, _NEUTRAL)
    for name in _REPEATED:
        read_field(name, Any, fields.get(name))
    messages = _messages(fields.get("input"))
    if (told := read_field("instructions", str | None, fields.get("instructions"))) is not None:
        messages.insert(0, {"role": "system", "content": told})
    tools = tuple(
        _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(tool_list(fields.get("tools") or []))
    )
    text = _parts(fields, "text", {"format", "verbosity"})
    return Ask(
        model=read_field("model", str, fields.get("model")),
        is_chat=True,
        messages=tuple(messages),
        params=SamplingParams(
            max_tokens=read_field("max_output_tokens", int | None, fields.get("max_output_tokens")),
            seed=read_field("seed", int | None, fields.get("seed")),
            temperature=given(fields, "temperature", float, 1.0),
            top_p=given(fields, "top_p", float, 1.0),
            top_k=given(fields, "top_k", int, -1),
        ),
        shaping=read_shaping(fields),
        form=_form(text.get("format")),
        stops=(),
        stream=given(fields, "stream", bool, False),
        tool_use=tool_use(
            tools, fields.get("tool_choice"), given(fields, "parallel_tool_calls", bool, True)
        ),
        template_options=_effort(fields),
        template_hints={} if text.get("verbosity") is None else {"verbosity": text["verbosity"]},
    )


def response_body(fields: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """A response that has begun; `ended` completes it."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata") or {},
        "model": ask.model,
        "output": [],
        "parallel_tool_calls": not ask.tool_use.is_single,
        "previous_response_id": None,
        "reasoning": {"effort": (fields.get("reasoning") or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": ask.params.temperature,
        "text": fields.get("text") or {"format": {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_p": ask.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": fields.get("user"),
    }


def ended(
    body: dict[str, Any], items: list[dict[str, Any]], stop_reason: str, usage: tuple[int, int, int]
) -> dict[str, Any]:
    """`usage`: tokens of the prompt, those of them that were remembered, tokens sampled."""
    num_prompt, num_cached, num_sampled = usage
    is_cut = stop_reason == "length"
    return {
        **body,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
    }


def output_items(parts: list[str | ToolCall]) -> list[dict[str, Any]]:
    """Messages and calls in their order, text that follows text in one message."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for part in [*parts, None]:
        if isinstance(part, str):
            texts.append(part)
            continue
        if texts:
            items.append(finished(message_item(), "".join(texts)))
            texts = []
        if part is not None:
            items.append(finished(call_item(part), part.arguments_json))
    return items


def message_item() -> dict[str, Any]:
    """A message whose text is still to come."""
    return {
        "type": "message",
        "id": f"msg_{uuid.uuid4().hex}",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def call_item(call: ToolCall) -> dict[str, Any]:
    """A call whose arguments are still to come."""
    return {
        "type": "function_call",
        "id": f"fc_{uuid.uuid4().hex}",
        "call_id": f"call_{uuid.uuid4().hex[:24]}",
        "name": call.name,
        "arguments": "",
        "status": "in_progress",
    }


def finished(item: dict[str, Any], text: str) -> dict[str, Any]:
    """With the text of a message, or the arguments of a call."""
    said = {"content": [text_part(text)]} if item["type"] == "message" else {"arguments": text}
    return {**item, **said, "status": "completed"}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValidationError("expected a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, path: str) -> None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise ValidationError("expected user, assistant, system or developer", f"{path}.role")
        content = _text(item.get("content"), f"{path}.content")
        messages.append({"role": role, "content": content})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = called({"id": item.get("call_id"), "function": item}, path)
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{path}.output")
        call_id = read_field(f"{path}.call_id", str, item.get("call_id"))
        messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif kind == "item_reference":
        raise ValidationError(_NOTHING_KEPT, path)
    else:
        raise ValidationError(f"items of type {str(kind)[:40]!r} are not supported", path)


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError("expected a text or a list of parts", path)
    for index, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise ValidationError("only text parts are supported", f"{path}[{index}]")
    return "".join(part["text"] for part in content)


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ValidationError("only functions are supported", f"{path}.type")
    return function(tool.get("name"), tool.get("description"), tool.get("parameters"), path)


def _form(value: Any) -> Form | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return schema_form({"type": "object"}, "text.format")
    if kind != "json_schema":
        raise ValidationError("expected text, json_object or json_schema", "text.format.type")
    return schema_form(value.get("schema"), "text.format.schema")


def _effort(fields: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = _parts(fields, "reasoning", {"effort"}, {"summary": ("auto",)})
    effort = read_field("reasoning.effort", str | None, reasoning.get("effort"))
    return {} if effort is None else {"reasoning_effort": effort}


def _parts(
    fields: Mapping[str, Any],
    name: str,
    known: set[str],
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """An object among the fields; unknown parts of it are refused."""
    parts: dict[str, Any] = read_field(name, dict[str, Any] | None, fields.get(name)) or {}
    try:
        check_known(parts, known, neutral or {})
    except ValidationError as error:
        raise error.under(name) from None
    return parts
