"""The messages of the Anthropic-compatible endpoint: what is read, and what is answered."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.server.chat.ask import (
    Ask,
    ToolUse,
    check_beginning,
    check_name,
    function,
    given,
    joined_parts,
    read_stops,
    text_of,
    tool_list,
)
from tinsmith.server.chat.forms import Form, schema_form
from tinsmith.server.chat.pictures import MARK, GivenImage, anthropic_image
from tinsmith.server.chat.tool_calls import ToolCall
from tinsmith.types import SamplingParams
from tinsmith.types.convert import read_field

_KNOWN = {
    "model", "messages", "max_tokens", "system", "temperature", "top_p", "top_k",
    "stop_sequences", "stream", "tools", "tool_choice", "thinking", "output_config",
    "context_management",
    # Of no effect on what is answered.
    "metadata", "service_tier", "speed", "cache_control",
}  # fmt: skip


def read_messages(fields: Mapping[str, Any], *, is_counted_only: bool = False) -> Ask:
    """`is_counted_only` for a request that asks how many tokens its prompt has."""
    for name, value in fields.items():
        if name not in _KNOWN and value not in (None, [], {}):
            raise ValidationError("not supported by this server", str(name)[:80])
    _check_edits(fields.get("context_management"))
    said = fields.get("messages")
    if not isinstance(said, list) or not said:
        raise ValidationError("expected a list of messages", "messages")
    images: list[GivenImage] = []
    messages = [m for index, value in enumerate(said) for m in _messages(value, index, images)]
    is_begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if is_begun:
        check_beginning(messages[-1], f"messages[{len(said) - 1}]")
    if fields.get("system"):
        messages.insert(0, {"role": "system", "content": text_of(fields["system"], "system")})
    stops = read_stops(fields.get("stop_sequences"), "stop_sequences")
    max_tokens = read_field("max_tokens", int | None, fields.get("max_tokens"))
    if max_tokens is None and not is_counted_only:
        raise ValidationError("is required", "max_tokens")
    config = read_field("output_config", dict[str, Any] | None, fields.get("output_config")) or {}
    return Ask(
        model=read_field("model", str, fields.get("model")),
        is_chat=True,
        messages=tuple(messages),
        is_begun=is_begun,
        images=tuple(images),
        params=SamplingParams(
            max_tokens=max_tokens,
            stop=list(stops) or None,
            temperature=given(fields, "temperature", float, 1.0),
            top_p=given(fields, "top_p", float, 1.0),
            top_k=given(fields, "top_k", int, -1),
        ),
        stops=stops,
        stream=given(fields, "stream", bool, False),
        tool_use=_tool_use(fields),
        template_options=_thinking(fields.get("thinking")),
        template_hints=_effort(config),
        form=_form(config.get("format")),
    )


def message_body(
    ask: Ask, content: list[dict[str, Any]], reason: str | None, num_prompt: int, num_sampled: int
) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt, "output_tokens": num_sampled},
    }


def block(part: str | ToolCall) -> dict[str, Any]:
    """A content block."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid.uuid4().hex[:24]}",
        "name": part.name,
        "input": part.arguments,
    }


def blocks(parts: list[str | ToolCall]) -> list[dict[str, Any]]:
    """Content blocks, text that follows text in one."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str) and found and found[-1]["type"] == "text":
            found[-1]["text"] += part
        else:
            found.append(block(part))
    return found


def stop_reason(ended: str, stopped_by: str | None, *, has_calls: bool) -> str:
    if has_calls:
        return "tool_use"
    if stopped_by is not None:
        return "stop_sequence"
    return "max_tokens" if ended == "length" else "end_turn"


def error_body(status: int, detail: str) -> dict[str, Any]:
    """An error in the shape that Anthropic clients read."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
             413: "request_too_large", 429: "rate_limit_error",
             503: "overloaded_error"}  # fmt: skip
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": detail}}


def _messages(value: Any, index: int, images: list[GivenImage]) -> list[dict[str, Any]]:
    """One message as chat templates know them: results of tools are messages of their own."""
    path = f"messages[{index}]"
    role = value.get("role") if isinstance(value, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise ValidationError("expected an object with a role (user or assistant)", path)
    content = value.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise ValidationError("expected a text or a list of blocks", f"{path}.content")
    messages: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        _add_block(messages, role, part, f"{path}.content[{number}]", images)
    return [{**message, "content": joined_parts(message["content"])} for message in messages]


def _add_block(
    messages: list[dict[str, Any]], role: str, part: Any, path: str, images: list[GivenImage]
) -> None:
    """Add to the last message, or to a new one; contents are lists of parts so far."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "tool_result":
        content = text_of(part.get("content") or "", f"{path}.content")
        told = {"role": "tool", "content": [content], "tool_call_id": str(part.get("tool_use_id"))}
        messages.append(told)
        return
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    message = messages[-1]
    if kind == "text" and isinstance(part.get("text"), str):
        message["content"].append(part["text"])
    elif kind == "image" and role == "user":
        images.append(anthropic_image(part, path))
        message["content"].append(MARK)
    elif kind == "thinking" and role == "assistant":
        message["reasoning_content"] = str(part.get("thinking", ""))
    elif kind == "tool_use" and role == "assistant" and isinstance(part.get("name"), str):
        arguments = read_field(f"{path}.input", dict[str, Any] | None, part.get("input")) or {}
        called = {"name": part["name"], "arguments": arguments}
        call = {"id": str(part.get("id", "")), "type": "function", "function": called}
        message.setdefault("tool_calls", []).append(call)
    else:
        raise ValidationError(f"blocks of type {str(kind)[:40]!r} are not supported here", path)


def _check_edits(value: Any) -> None:
    """Nothing is cleared from a conversation here; Claude Code asks for all of it to be kept."""
    said = read_field("context_management", dict[str, Any] | None, value) or {}
    edits = read_field("context_management.edits", list[Any] | None, said.get("edits")) or []
    for index, edit in enumerate(edits):
        kind = str(edit.get("type")) if isinstance(edit, Mapping) else ""
        if not kind.startswith("clear_thinking_") or edit.get("keep") != "all":
            raise ValidationError(
                "this server clears nothing from a conversation; only clear_thinking with "
                "keep 'all' is taken",
                f"context_management.edits[{index}]",
            )


def _tool_use(fields: Mapping[str, Any]) -> ToolUse:
    tools = tuple(
        _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(tool_list(fields.get("tools") or []))
    )
    choice = fields.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise ValidationError("expected auto, any, tool or none", "tool_choice.type")
    if kind == "none" or (kind == "auto" and not tools):
        return ToolUse()
    if not tools:
        raise ValidationError("there are no tools to choose from", "tool_choice")
    return ToolUse(
        tools=tools,
        is_forced=kind != "auto",
        name=check_name(tools, str(choice.get("name"))) if kind == "tool" else None,
        is_single=bool(choice.get("disable_parallel_tool_use")),
    )


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        raise ValidationError("only tools of the client's own are supported", f"{path}.type")
    return function(tool.get("name"), tool.get("description"), tool.get("input_schema"), path)


def _thinking(value: Any) -> dict[str, Any]:
    """Whether the model is to think; left to the template where nothing is said."""
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ValidationError("expected enabled, adaptive or disabled", "thinking.type")
    return {"adaptive": {}, "enabled": {"reasoning_effort": "high"}}.get(
        kind, {"reasoning_effort": "none"}
    )


def _form(value: Any) -> Form | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("type") != "json_schema":
        raise ValidationError("expected json_schema", "output_config.format.type")
    return schema_form(value.get("schema"), "output_config.format.schema")


def _effort(config: Mapping[str, Any]) -> dict[str, Any]:
    for name in config.keys() - {"effort", "format"}:
        if config[name] is not None:
            raise ValidationError("not supported by this server", f"output_config.{name[:40]}")
    effort = read_field("output_config.effort", str | None, config.get("effort"))
    return {} if effort is None else {"reasoning_effort": effort}
