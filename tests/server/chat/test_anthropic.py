"""Anthropic's messages as chat templates know them, and answers that end with their first call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tinsmith.errors import ValidationError
from tinsmith.server.chat.answering import Answer
from tinsmith.server.chat.anthropic import read_messages
from tinsmith.server.chat.ask import Ask
from tinsmith.server.chat.tool_calls import ToolCall, joined
from tinsmith.text_model import TextModel

TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALLS = '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call> and more'


class Bytes:
    """One token per byte, and a template that teaches calls."""

    name = "bytes"
    template = "{% if tools %}<tool_call>{% endif %}"

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def _read(**fields: Any) -> Ask:
    said = [{"role": "user", "content": "hi"}]
    return read_messages({"model": "m", "messages": said, "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("is_single", "expected"),
    [
        (True, ("", [ToolCall("f", {})])),
        (False, (" and more", [ToolCall("f", {}), ToolCall("g", {})])),
    ],
)
def test_who_asks_for_one_call_gets_the_first_and_nothing_behind_it(
    is_single: bool, expected: tuple[str, list[ToolCall]]
) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": is_single}
    answer = Answer(cast(TextModel, Bytes()), _read(tools=[TOOL], tool_choice=choice))
    parts = [part for byte in CALLS.encode() for part in answer.add([byte])] + answer.finish()
    text, calls = joined(parts)
    assert (text.lstrip("\n"), calls) == expected


@pytest.mark.parametrize(
    ("is_single", "ended", "is_due_to_calls"),
    [(False, "stop", True), (False, "length", False), (True, "length", True)],
)
def test_an_answer_that_was_cut_ended_with_its_length_unless_one_call_was_asked_for(
    is_single: bool, ended: str, is_due_to_calls: bool
) -> None:
    """A second call that was cut is text, and a client has to know."""
    choice = {"type": "auto", "disable_parallel_tool_use": is_single}
    answer = Answer(cast(TextModel, Bytes()), _read(tools=[TOOL], tool_choice=choice))
    assert not answer.ended_with_calls(ended)
    answer.add(CALLS[:60].encode())
    answer.finish()
    assert answer.has_calls and answer.ended_with_calls(ended) == is_due_to_calls


def test_blocks_become_messages_in_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "3"}
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, result]
    ask = _read(messages=[{"role": "user", "content": blocks}], system="be")
    assert ask.messages == (
        {"role": "system", "content": "be"},
        {"role": "user", "content": "ab"},
        {"role": "tool", "content": "3", "tool_call_id": "t"},
    )


def test_edits_of_the_conversation_are_taken_where_they_change_nothing() -> None:
    """Claude Code sends such a one with every request."""
    kept = {"type": "clear_thinking_20251015", "keep": "all"}
    assert _read(context_management={"edits": [kept]}) == _read()
    for edit in ({**kept, "keep": {"type": "thinking_turns", "value": 1}}, {"type": "clear_x"}, 1):
        with pytest.raises(ValidationError, match=r"context_management\.edits\[1\]"):
            _read(context_management={"edits": [kept, edit]})


def test_the_time_for_many_blocks_grows_with_their_number() -> None:
    """Not with its square: this is done on the event loop."""

    def seconds(count: int) -> float:
        blocks = [{"type": "text", "text": "x" * 100}] * count
        began = time.process_time()
        _read(messages=[{"role": "user", "content": blocks}])
        return time.process_time() - began

    assert min(seconds(80_000) for _ in range(3)) < 12 * min(seconds(20_000) for _ in range(3))
