"""The messages of the OpenAI-compatible endpoints: what is read, and what is answered."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tinsmith.errors import ValidationError
from tinsmith.server.chat.ask import (
    SHAPING,
    Ask,
    ToolUse,
    check_beginning,
    check_name,
    function,
    given,
    joined_parts,
    read_shaping,
    read_stops,
    text_of,
    text_part,
    tool_list,
)
from tinsmith.server.chat.forms import FIELDS as FORMS
from tinsmith.server.chat.forms import read_form
from tinsmith.server.chat.pictures import MARK, GivenImage, openai_image
from tinsmith.server.chat.tool_calls import ToolCall
from tinsmith.text_model import TextModel
from tinsmith.types import SampledSequence, SamplingParams
from tinsmith.types.convert import read_field

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_CHOICES = 128
_MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20

_SHARED = SHAPING | FORMS | {
    "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream",
    "stream_options", "logprobs", "top_k", "return_token_ids",
    # Of no effect on what is answered.
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
_CHAT = {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "verbosity",
    "continue_final_message", "add_generation_prompt",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "store": (False,),
    "modalities": (["text"],),
}
"""Settings that we cannot follow, and the values with which they ask for nothing."""

_MORE = {"assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id"}}
"""What messages of a role may have besides."""


def read_completion(fields: Mapping[str, Any]) -> Ask:
    check_known(fields, _SHARED | {"prompt", "echo"}, _NEUTRAL)
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        prompts: tuple[str | list[int], ...] = (prompt,)
    elif isinstance(prompt, list) and prompt and all(isinstance(p, int) for p in prompt):
        prompts = (prompt,)
    elif isinstance(prompt, list) and prompt:
        prompts = tuple(read_field("prompt", str | list[int], p) for p in prompt)
    else:
        raise ValidationError("expected a text, tokens, or a list of either", "prompt")
    count = read_field("logprobs", int | None, fields.get("logprobs"))
    max_tokens = read_field("max_tokens", int | None, fields.get("max_tokens"))
    echo = given(fields, "echo", bool, False)
    if echo and fields.get("stream"):
        raise ValidationError("cannot be streamed; leave out stream", "echo")
    return _ask(
        fields,
        is_chat=False,
        echo=echo,
        prompts=prompts,
        max_tokens=_DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        with_logprobs=count is not None,
        top_logprobs=count or 0,
    )


def read_chat(fields: Mapping[str, Any]) -> Ask:
    check_known(fields, _SHARED | _CHAT, _NEUTRAL)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValidationError("expected a list of messages", "messages")
    most = read_field("max_completion_tokens", int | None, fields.get("max_completion_tokens"))
    max_tokens = read_field("max_tokens", int | None, fields.get("max_tokens"))
    verbosity = read_field("verbosity", str | None, fields.get("verbosity"))
    with_logprobs = bool(read_field("logprobs", bool | None, fields.get("logprobs")))
    top = read_field("top_logprobs", int | None, fields.get("top_logprobs")) or 0
    if top and not with_logprobs:
        raise ValidationError("needs logprobs to be true", "top_logprobs")
    tools = tuple(
        _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(tool_list(fields.get("tools") or []))
    )
    images: list[GivenImage] = []
    said = tuple(_message(m, index, images) for index, m in enumerate(messages))
    return _ask(
        fields,
        is_chat=True,
        messages=said,
        is_begun=_is_begun(fields, said),
        images=images,
        max_tokens=max_tokens if most is None else most,
        with_logprobs=with_logprobs,
        top_logprobs=top,
        tool_use=tool_use(
            tools, fields.get("tool_choice"), given(fields, "parallel_tool_calls", bool, True)
        ),
        template_options=_template_options(fields),
        template_hints={} if verbosity is None else {"verbosity": verbosity},
    )


def _ask(
    fields: Mapping[str, Any],
    *,
    is_chat: bool,
    max_tokens: int | None,
    with_logprobs: bool,
    top_logprobs: int,
    prompts: tuple[str | list[int], ...] = (),
    messages: tuple[dict[str, Any], ...] = (),
    is_begun: bool = False,
    images: Sequence[GivenImage] = (),
    tool_use: ToolUse | None = None,
    template_options: Mapping[str, Any] | None = None,
    template_hints: Mapping[str, Any] | None = None,
    echo: bool = False,
) -> Ask:
    stops = read_stops(fields.get("stop"), "stop")
    n = check_choices(given(fields, "n", int, 1))
    if len(prompts) * n > _MAX_PROMPTS:
        raise ValidationError(
            f"prompts times n must be at most {_MAX_PROMPTS}, got {len(prompts) * n}", "prompt"
        )
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValidationError(f"must be between 0 and {MAX_TOP_LOGPROBS}", "top_logprobs")
    options = given(fields, "stream_options", dict[str, Any], {})
    return Ask(
        model=read_field("model", str, fields.get("model")),
        is_chat=is_chat,
        prompts=prompts,
        messages=messages,
        is_begun=is_begun,
        images=tuple(images),
        params=SamplingParams(
            max_tokens=max_tokens,
            seed=read_field("seed", int | None, fields.get("seed")),
            stop=list(stops) or None,
            temperature=given(fields, "temperature", float, 1.0),
            top_p=given(fields, "top_p", float, 1.0),
            top_k=given(fields, "top_k", int, -1),
        ),
        shaping=read_shaping(fields),
        form=read_form(fields),
        stops=stops,
        n=n,
        stream=given(fields, "stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        with_token_ids=_with_token_ids(fields),
        with_logprobs=with_logprobs,
        top_logprobs=top_logprobs,
        tool_use=tool_use or ToolUse(),
        template_options=template_options or {},
        template_hints=template_hints or {},
        echo=echo,
    )


def _is_begun(fields: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> bool:
    """Whether the last message is to be continued, as vLLM's clients say it."""
    is_begun: bool = given(fields, "continue_final_message", bool, False)
    if given(fields, "add_generation_prompt", bool, not is_begun) == is_begun:
        raise ValidationError(
            "must be the opposite of continue_final_message", "add_generation_prompt"
        )
    if is_begun:
        check_beginning(messages[-1], f"messages[{len(messages) - 1}]")
    return is_begun


def _with_token_ids(fields: Mapping[str, Any]) -> bool:
    is_wanted: bool = given(fields, "return_token_ids", bool, False)
    if is_wanted and fields.get("stream"):
        raise ValidationError("cannot be streamed; leave out stream", "return_token_ids")
    return is_wanted


def tool_use(tools: tuple[dict[str, Any], ...], choice: Any, is_parallel: bool) -> ToolUse:
    """`choice` is none, auto, required, or an object that names a function."""
    choice = choice or "auto"
    if choice == "none" or not tools:
        if choice not in ("none", "auto"):
            raise ValidationError("there are no tools to choose from", "tool_choice")
        return ToolUse()
    name = None
    if choice not in ("auto", "required"):
        named = choice.get("function", choice) if isinstance(choice, Mapping) else None
        if not isinstance(named, Mapping) or choice.get("type") != "function":
            raise ValidationError("expected none, auto, required or a function", "tool_choice")
        name = check_name(tools, str(named.get("name")))
    return ToolUse(tools=tools, is_forced=choice != "auto", name=name, is_single=not is_parallel)


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ValidationError("only functions are supported", f"{path}.type")
    described = tool.get("function")
    if not isinstance(described, Mapping):
        raise ValidationError("expected a function", f"{path}.function")
    return function(
        described.get("name"),
        described.get("description"),
        described.get("parameters"),
        f"{path}.function",
    )


def _template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    options = read_field(
        "chat_template_kwargs", dict[str, Any] | None, fields.get("chat_template_kwargs")
    )
    effort = read_field("reasoning_effort", str | None, fields.get("reasoning_effort"))
    return {**(options or {}), **({} if effort is None else {"reasoning_effort": effort})}


def check_choices(n: int) -> int:
    if not 1 <= n <= _MAX_CHOICES:
        raise ValidationError(f"must be between 1 and {_MAX_CHOICES}, got {n}", "n")
    return n


def check_known(
    fields: Mapping[str, Any], known: set[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse fields that are not known, unless they have no value or one without effect."""
    for name, value in fields.items():
        if name in known or value is None or value in neutral.get(name, ()):
            continue
        raise ValidationError("not supported by this server", str(name)[:80])


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request under way: what its answers have in common."""

    ask: Ask
    answer_id: str
    created: int
    num_prompt_tokens: int
    num_sampled_tokens: int = 0

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.ask.model,
        }

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One event of a stream."""
        kind = "chat.completion.chunk" if self.ask.is_chat else "text_completion"
        body = {"delta": delta} if self.ask.is_chat else delta
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.ask.include_usage else {}
        return {**self.head(kind), "choices": [choice], **usage}

    def delta(self, text: str) -> dict[str, Any]:
        return {"content": text} if self.ask.is_chat else {"text": text}

    def usage(self, num_sampled: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": self.num_prompt_tokens + num_sampled,
        }

    def usage_chunk(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.ask.is_chat else "text_completion"
        usage = self.usage(self.num_sampled_tokens)
        return {**self.head(kind), "choices": [], "usage": usage}

    def logprobs(
        self,
        tokens: list[int],
        logprobs: Sequence[float | None],
        text: TextModel,
        top: list[list[tuple[int, float]] | None] | None = None,
        first_offset: int = 0,
    ) -> dict[str, Any] | None:
        """`first_offset`: how long the texts of the tokens before these are."""
        if not self.ask.with_logprobs:
            return None
        given = top or [None] * len(tokens)
        if self.ask.is_chat:
            content = [
                {
                    **_described(text, token, logprob),
                    "top_logprobs": [_described(text, other, p) for other, p in row or ()],
                }
                for token, logprob, row in zip(tokens, logprobs, given, strict=True)
            ]
            return {"content": content, "refusal": None}
        names = [text.token_text(token) for token in tokens]
        rows = [None if row is None else [(text.token_text(t), p) for t, p in row] for row in given]
        lengths = (len(name) for name in names[:-1])
        offsets = list(itertools.accumulate(lengths, initial=first_offset))
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": list(map(_by_text, rows)) if self.ask.top_logprobs else None,
            "text_offset": offsets[: len(names)],
        }


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer repeats it."""

    tokens: list[int]
    text: str
    logprobs: list[float | None]
    """Of each token; nothing comes before the first."""
    top: list[list[tuple[int, float]] | None]


def choice(
    asked: Asked,
    index: int,
    content: str,
    calls: list[ToolCall],
    reason: str,
    sequence: SampledSequence,
    text: TextModel,
    echo: Echo | None = None,
) -> dict[str, Any]:
    tokens = list(sequence.tokens)
    values: list[float | None] = list(sequence.logprobs or [])
    top = sequence.topk_logprobs
    if echo is None:
        logprobs = asked.logprobs(tokens, values, text, top)
    else:
        content = echo.text + content
        rows = echo.top + (top or [None] * len(tokens))
        logprobs = asked.logprobs(echo.tokens + tokens, echo.logprobs + values, text, rows)
    if asked.ask.is_chat:
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [described(call) for call in calls]
        body: dict[str, Any] = {"message": message}
    else:
        body = {"text": content}
    if asked.ask.with_token_ids:
        body["token_ids"] = tokens
    return {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}


def described(call: ToolCall) -> dict[str, Any]:
    called = {"name": call.name, "arguments": call.arguments_json}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": called}


def completion(asked: Asked, choices: list[dict[str, Any]], num_sampled: int) -> dict[str, Any]:
    kind = "chat.completion" if asked.ask.is_chat else "text_completion"
    return {**asked.head(kind), "choices": choices, "usage": asked.usage(num_sampled)}


def error_body(status: int, detail: str) -> dict[str, Any]:
    """An error in the shape that OpenAI clients read."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    fallback = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": detail,
            "type": kinds.get(status, fallback),
            "param": None,
            "code": "model_not_found" if status == 404 else None,
        }
    }


def _message(value: Any, index: int, images: list[GivenImage]) -> dict[str, Any]:
    """A message as chat templates know them; its images are added to `images`."""
    path = f"messages[{index}]"
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValidationError("expected an object with a role and content", path)
    known = {"role", "content", "name", "refusal", "annotations"} | _MORE.get(value["role"], set())
    for name in value.keys() - known:
        if value[name] is not None:
            raise ValidationError("not supported by this server", f"{path}.{str(name)[:40]}")
    content, calls = value.get("content"), value.get("tool_calls") or []
    if content is None and calls:
        content = ""
    is_user = value["role"] == "user"
    said = (
        _user_content(content, f"{path}.content", images)
        if is_user
        else text_of(content, f"{path}.content")
    )
    message = {"role": value["role"], "content": said}
    if calls:
        if not isinstance(calls, list):
            raise ValidationError("expected a list", f"{path}.tool_calls")
        message["tool_calls"] = [
            called(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    for name in ("tool_call_id", "reasoning_content"):
        if (told := read_field(f"{path}.{name}", str | None, value.get(name))) is not None:
            message[name] = told
    return message


def _user_content(content: Any, path: str, images: list[GivenImage]) -> Any:
    if not isinstance(content, list):
        return text_of(content, path)
    parts: list[str | dict[str, str]] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            images.append(openai_image(part, where))
            parts.append(MARK)
        else:
            parts.append(text_part(part, where))
    return joined_parts(parts)


def called(call: Any, path: str) -> dict[str, Any]:
    """A call that a model made earlier, its arguments as an object."""
    made = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(made, Mapping) or not isinstance(made.get("name"), str):
        raise ValidationError("expected a call of a function", path)
    try:
        arguments = orjson.loads(made.get("arguments") or "{}")
    except (orjson.JSONDecodeError, TypeError):
        raise ValidationError("expected an object as JSON", f"{path}.function.arguments") from None
    arguments = read_field(f"{path}.function.arguments", Any, arguments)
    called = {"name": made["name"], "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": called}


def _by_text(row: list[tuple[str, float]] | None) -> dict[str, float] | None:
    """Of tokens that look alike, as parts of a character do, the likelier one."""
    if row is None:
        return None
    found: dict[str, float] = {}
    for name, logprob in row:
        found[name] = max(logprob, found.get(name, logprob))
    return found


def _described(text: TextModel, token: int, logprob: float | None) -> dict[str, Any]:
    data = list(text.token_bytes(token))
    return {"token": text.token_text(token), "logprob": logprob, "bytes": data}
