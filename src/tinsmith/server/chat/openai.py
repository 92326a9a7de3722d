"""The messages of the OpenAI-compatible endpoints: what is read, and what is answered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.text_model import TextModel
from tinsmith.types import SampledSequence, SamplingParams
from tinsmith.types.convert import converter
from tinsmith.types.protocol import MAX_STOP_CHARACTERS

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_CHOICES = 128
_MAX_PROMPTS = 1024
_MAX_STOPS = 64
_MAX_TOP_LOGPROBS = 20

_SHARED = {
    "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream",
    "stream_options", "logprobs", "user", "metadata",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "store": (False,),
}
"""Settings that we cannot follow, and the values with which they ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for text, whichever endpoint it came by."""

    model: str
    is_chat: bool
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    params: SamplingParams
    stops: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    with_logprobs: bool
    top_logprobs: int


def read_completion(fields: Mapping[str, Any]) -> Ask:
    _check_known(fields, _SHARED | {"prompt"})
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        prompts: tuple[str | list[int], ...] = (prompt,)
    elif isinstance(prompt, list) and prompt and all(isinstance(p, int) for p in prompt):
        prompts = (prompt,)
    elif isinstance(prompt, list) and prompt:
        prompts = tuple(_field("prompt", str | list[int], p) for p in prompt)
    else:
        raise ValidationError("expected a text, tokens, or a list of either", "prompt")
    count = _field("logprobs", int | None, fields.get("logprobs"))
    max_tokens = _field("max_tokens", int | None, fields.get("max_tokens"))
    return _ask(
        fields,
        is_chat=False,
        prompts=prompts,
        max_tokens=_DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        with_logprobs=count is not None,
        top_logprobs=count or 0,
    )


def read_chat(fields: Mapping[str, Any]) -> Ask:
    known = _SHARED | {"messages", "max_completion_tokens", "top_logprobs"}
    _check_known(fields, known)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValidationError("expected a list of messages", "messages")
    given = fields.get("max_completion_tokens")
    max_tokens = _field("max_tokens", int | None, given or fields.get("max_tokens"))
    with_logprobs = bool(_field("logprobs", bool | None, fields.get("logprobs")))
    top = _field("top_logprobs", int | None, fields.get("top_logprobs")) or 0
    if top and not with_logprobs:
        raise ValidationError("needs logprobs to be true", "top_logprobs")
    return _ask(
        fields,
        is_chat=True,
        messages=tuple(_message(m, index) for index, m in enumerate(messages)),
        max_tokens=max_tokens,
        with_logprobs=with_logprobs,
        top_logprobs=top,
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
) -> Ask:
    stop = _field("stop", str | list[str] | None, fields.get("stop"))
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise ValidationError(
            f"at most {_MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters", "stop"
        )
    n = _given(fields, "n", int, 1)
    if not 1 <= n <= _MAX_CHOICES:
        raise ValidationError(f"must be between 1 and {_MAX_CHOICES}, got {n}", "n")
    if len(prompts) * n > _MAX_PROMPTS:
        raise ValidationError(
            f"prompts times n must be at most {_MAX_PROMPTS}, got {len(prompts) * n}", "prompt"
        )
    if not 0 <= top_logprobs <= _MAX_TOP_LOGPROBS:
        raise ValidationError(f"must be between 0 and {_MAX_TOP_LOGPROBS}", "top_logprobs")
    options = _field("stream_options", dict[str, Any] | None, fields.get("stream_options")) or {}
    return Ask(
        model=_field("model", str, fields.get("model")),
        is_chat=is_chat,
        prompts=prompts,
        messages=messages,
        params=SamplingParams(
            max_tokens=max_tokens,
            seed=_field("seed", int | None, fields.get("seed")),
            stop=list(stops) or None,
            temperature=_given(fields, "temperature", float, 1.0),
            top_p=_given(fields, "top_p", float, 1.0),
        ),
        stops=stops,
        n=n,
        stream=_given(fields, "stream", bool, False),
        include_usage=bool(options.get("include_usage")),
        with_logprobs=with_logprobs,
        top_logprobs=top_logprobs,
    )


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
        return {**self.head(kind), "choices": [choice]}

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
        logprobs: list[float],
        text: TextModel,
        top: list[list[tuple[int, float]] | None] | None = None,
    ) -> dict[str, Any] | None:
        if not self.ask.with_logprobs:
            return None
        names = [text.token_text(token) for token in tokens]
        rows = [
            [(text.token_text(t), p) for t, p in row or ()] for row in top or [None] * len(tokens)
        ]
        if self.ask.is_chat:
            content = [
                {
                    **_named(name, logprob),
                    "top_logprobs": [_named(other, p) for other, p in row],
                }
                for name, logprob, row in zip(names, logprobs, rows, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = list(itertools.accumulate((len(name) for name in names[:-1]), initial=0))
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": list(map(dict, rows)) if self.ask.top_logprobs else None,
            "text_offset": offsets[: len(names)],
        }


def choice(
    asked: Asked, index: int, content: str, sequence: SampledSequence, text: TextModel
) -> dict[str, Any]:
    logprobs = asked.logprobs(
        sequence.tokens, sequence.logprobs or [], text, sequence.topk_logprobs
    )
    body: dict[str, Any] = (
        {"message": {"role": "assistant", "content": content, "refusal": None}}
        if asked.ask.is_chat
        else {"text": content}
    )
    return {"index": index, **body, "logprobs": logprobs, "finish_reason": sequence.stop_reason}


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


def _message(value: Any, index: int) -> dict[str, Any]:
    path = f"messages[{index}]"
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValidationError("expected an object with a role and content", path)
    content = value.get("content")
    if isinstance(content, list):
        parts = [_text_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        content = "".join(parts)
    if not isinstance(content, str):
        raise ValidationError("expected a text", f"{path}.content")
    for name in value.keys() - {"role", "content", "name", "refusal", "annotations"}:
        if value[name] is not None:
            raise ValidationError("not supported by this server", f"{path}.{str(name)[:40]}")
    return {"role": value["role"], "content": content}


def _text_part(part: Any, path: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValidationError("only text parts are supported", path)


def _check_known(fields: Mapping[str, Any], known: set[str]) -> None:
    for name, value in fields.items():
        if name in known or value is None or value in _NEUTRAL.get(name, ()):
            continue
        raise ValidationError("not supported by this server", name[:80])


def _given(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else _field(name, kind, value)


def _field(name: str, annotation: Any, value: Any) -> Any:
    try:
        return converter(annotation)(value)
    except ValidationError as error:
        raise error.under(name) from None


def _named(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
