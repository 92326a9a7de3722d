"""What a record means: conversations and texts to learn from, pairs to choose between, prompts.

to learn from   {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}
                {"prompt": "…", "completion": "…"}        texts as they are, or lists of messages
                {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}  ShareGPT
                {"instruction": "…", "input": "…", "output": "…"}                           Alpaca
                {"text": "…"}                                                      all is learned
pairs           {"prompt": "…", "chosen": "…", "rejected": "…"}        texts or lists of messages
prompts         {"prompt": "…"}, or any of the first four, whose last reply is the answer

A mistake is reported with its place and field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.cli.training import conversation
from tinsmith.cli.training.conversation import Example, Message, Tokenizer
from tinsmith.cli.training.records import Record
from tinsmith.errors import TinkerError, ValidationError

ROLES = ("system", "developer", "user", "assistant", "tool")

_SHARE_GPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
}
_KNOWN = (
    "'messages', 'prompt' and 'completion', 'conversations', 'instruction' and 'output', 'text'"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be answered."""

    tokens: list[int]
    text: str
    """As people read it: the last message, or the text."""
    messages: list[Message] | None
    """None where the prompt is plain text."""
    fields: dict[str, Any]
    """The whole record, for a reward to look at; `answer` is the expected reply, if it is known."""


def examples(record: Record, tokenizer: Tokenizer) -> list[Example]:
    """What there is to learn from a record: more than one where a template rewrites the past."""
    try:
        return _examples(record.fields, tokenizer)
    except TinkerError as error:
        raise _at(record, error) from None


def pair(record: Record, tokenizer: Tokenizer) -> Pair:
    try:
        return _pair(record.fields, tokenizer)
    except TinkerError as error:
        raise _at(record, error) from None


def prompt(record: Record, tokenizer: Tokenizer, system: str | None = None) -> Prompt:
    """`system` is put before a conversation that has no system prompt of its own; a plain text is a
    user's message then."""
    try:
        return _prompt(record.fields, tokenizer, system)
    except TinkerError as error:
        raise _at(record, error) from None


def _at(record: Record, error: TinkerError) -> ValidationError:
    if isinstance(error, ValidationError) and error.path:
        return ValidationError(error.problem, f"{record.place}, {error.path}")
    return ValidationError(str(error), record.place)


def _examples(fields: Mapping[str, Any], tokenizer: Tokenizer) -> list[Example]:
    if (messages := _conversation(fields)) is not None:
        return conversation.chat_examples(tokenizer, messages)
    if "text" in fields:
        tokens = conversation.text_tokens(tokenizer, _text(fields, "text"))
        tokens = tokens + conversation.end_tokens(tokenizer)
        return [Example(tokens, [1.0] * len(tokens))]
    if "prompt" in fields or "completion" in fields:
        words = _text(fields, "prompt"), _text(fields, "completion")
        return [conversation.completion_example(tokenizer, *words)]
    raise ValidationError(f"has none of the known fields: {_KNOWN}")


def _pair(fields: Mapping[str, Any], tokenizer: Tokenizer) -> Pair:
    answers = []
    for name in ("chosen", "rejected"):
        answer = fields.get(name)
        if isinstance(answer, list):
            before = _messages(fields["prompt"], "prompt") if fields.get("prompt") else []
            # The data sets of others repeat the prompt in both answers.
            said = _messages(answer, name)
            messages = said if said[: len(before)] == before else before + said
            answers.append(_last_reply(tokenizer, messages, name))
        elif isinstance(fields.get("prompt"), list):
            reply = {"role": "assistant", "content": _text(fields, name)}
            messages = [*_messages(fields["prompt"], "prompt"), reply]
            answers.append(_last_reply(tokenizer, messages, name))
        else:
            words = _text(fields, "prompt"), _text(fields, name)
            answers.append(conversation.completion_example(tokenizer, *words))
    if answers[0].tokens == answers[1].tokens:
        raise ValidationError("both answers are the same", "rejected")
    return Pair(*answers)


def _last_reply(tokenizer: Tokenizer, messages: list[Message], name: str) -> Example:
    """Only the last reply of a conversation is to be chosen or rejected."""
    if messages[-1]["role"] != "assistant":
        raise ValidationError("the last message must be the assistant's", name)
    silent = [{**each, "weight": 0} for each in messages[:-1]]
    return conversation.chat_examples(tokenizer, [*silent, messages[-1]])[-1]


def _prompt(fields: Mapping[str, Any], tokenizer: Tokenizer, system: str | None) -> Prompt:
    known = dict(fields)
    messages = _conversation(fields, needs_reply=False)
    if messages is None:
        text = _text(fields, "prompt")
        if system is not None:
            messages = [{"role": "user", "content": text}]
        else:
            if isinstance(known.get("completion"), str):
                known.setdefault("answer", known["completion"].strip())
            return Prompt(conversation.text_tokens(tokenizer, text), text, None, known)
    while messages and messages[-1]["role"] == "assistant":
        known.setdefault("answer", str(messages[-1].get("content") or "").strip())
        messages = messages[:-1]
    if not messages:
        raise ValidationError("there is no message to answer", "messages")
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    tokens = conversation.prompt_tokens(tokenizer, messages)
    return Prompt(tokens, str(messages[-1].get("content") or ""), messages, known)


def _conversation(fields: Mapping[str, Any], needs_reply: bool = True) -> list[Message] | None:
    """The record as messages; None if it is plain text."""
    if "messages" in fields:
        return _messages(fields["messages"], "messages")
    if "conversations" in fields:
        return _share_gpt(fields["conversations"])
    if "instruction" in fields:
        asked = _text(fields, "instruction")
        if more := fields.get("input"):
            asked += f"\n\n{more}"
        messages: list[Message] = [{"role": "user", "content": asked}]
        if needs_reply or fields.get("output"):
            messages.append({"role": "assistant", "content": _text(fields, "output")})
        return messages
    if isinstance(fields.get("prompt"), list):
        before = _messages(fields["prompt"], "prompt")
        after = fields.get("completion")
        if isinstance(after, str):
            return [*before, {"role": "assistant", "content": after}]
        return before + (_messages(after, "completion") if after or needs_reply else [])
    return None


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        found = "is missing" if value is None else f"must be a text, not {type(value).__name__}"
        raise ValidationError(found, name)
    if not value:
        raise ValidationError("must not be empty", name)
    return value


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValidationError("must be a list of messages", name)
    for number, message in enumerate(value):
        path = f"{name}[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValidationError(f"needs a role, one of {', '.join(ROLES)}", path)
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValidationError("needs a content that is text", path)
    return [dict(each) for each in value]


def _share_gpt(value: Any) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValidationError("must be a list of messages", "conversations")
    messages: list[Message] = []
    for number, message in enumerate(value):
        path = f"conversations[{number}]"
        speaker = message.get("from") if isinstance(message, dict) else None
        if speaker not in _SHARE_GPT:
            raise ValidationError(f"needs a 'from', one of {', '.join(_SHARE_GPT)}", path)
        if not isinstance(message.get("value"), str):
            raise ValidationError("needs a 'value' that is text", path)
        messages.append({"role": _SHARE_GPT[speaker], "content": message["value"]})
    return messages
