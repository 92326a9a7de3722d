"""What a conversation becomes under a model's template, and what its tokens are in bytes."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.lock_holds import is_held_less
from tests.support.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from tinsmith.engine.base import BaseModelInfo
from tinsmith.errors import ValidationError
from tinsmith.server.chat.answering import ChosenModel, render
from tinsmith.server.chat.anthropic import read_messages
from tinsmith.server.chat.ask import Ask
from tinsmith.server.chat.openai import read_chat
from tinsmith.server.chat.responses import read_response
from tinsmith.text_model import TextModel

GENERIC = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
KNOWS_DEVELOPERS = GENERIC + "{{ '' if 'developer' }}"
SHOUTS = GENERIC.replace("m.content", "m.content | upper")

TOLD = {"role": "developer", "content": "be"}
ASKED = {"role": "user", "content": "hi"}


def model(folder: Path, template: str, tokenizer: Tokenizer | None = None) -> TextModel:
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return TextModel("m", folder)


def rendered(ask: Ask, folder: Path, template: str = GENERIC) -> str:
    text = model(folder, template)
    base = BaseModelInfo(name="m", max_context_length=4096, vocab_size=512, architecture="")
    return text.decode(render(ChosenModel(text, base), ask).to_ints())


def begun(*parts: Any, **fields: Any) -> Ask:
    """An Anthropic request whose last message is the assistant's."""
    messages = [
        ASKED,
        {"role": "assistant", "content": parts[0] if len(parts) == 1 else list(parts)},
    ]
    return read_messages({"model": "m", "messages": messages, "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("template", "role"), [(GENERIC, "system"), (KNOWS_DEVELOPERS, TOLD["role"])]
)
def test_a_developer_speaks_as_the_system_where_the_template_knows_no_developers(
    template: str, role: str, tmp_path: Path
) -> None:
    for ask in (
        read_chat({"model": "m", "messages": [TOLD, ASKED]}),
        read_response({"model": "m", "input": [TOLD, ASKED]}),
    ):
        found = rendered(ask, tmp_path, template)
        assert found == f"[{role}]be<end>[user]hi<end>[assistant]<think>"


def test_a_role_that_the_template_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    """Templates leave out messages of roles that they do not know, and say nothing."""
    ask = read_chat({"model": "m", "messages": [ASKED, {"role": "wizard", "content": "x"}]})
    with pytest.raises(ValidationError, match=r"messages\[1\]\.role: .* knows no role 'wizard'"):
        rendered(ask, tmp_path)
    assert "[wizard]x" in rendered(ask, tmp_path, GENERIC + '{{ "" if "wizard" }}')
    for word in ("", "e", "messages"):  # in every template, and none of its roles
        ask = read_chat({"model": "m", "messages": [ASKED, {"role": word, "content": "x"}]})
        with pytest.raises(ValidationError, match=f"knows no role '{word}'"):
            rendered(ask, tmp_path)


def test_a_last_message_of_the_assistant_is_gone_on_with(tmp_path: Path) -> None:
    """As Anthropic's endpoint does: what the template puts before other answers is not there."""
    for said in ("He said: be", "end", "<"):  # also one that stands in the template's own marks
        assert rendered(begun(said), tmp_path) == f"[user]hi<end>[assistant]{said}"
    with pytest.raises(ValidationError, match="changes the beginning of the answer"):
        rendered(begun("He"), tmp_path, SHOUTS)
    for ending in ("He ", "", "\n"):
        with pytest.raises(ValidationError, match=r"messages\[1\]: a text to be continued"):
            begun(ending)
    thought = {"type": "thinking", "thinking": "x"}
    with pytest.raises(ValidationError, match="cannot begin with thoughts"):
        begun(thought, {"type": "text", "text": "He"})
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    assert begun("He", tools=tools).is_begun
    for fields in (
        {"tools": tools, "tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    ):
        with pytest.raises(
            ValidationError, match="an answer that continues a message can have no form"
        ):
            begun("He", **fields)


def test_a_chat_of_openais_goes_on_with_the_last_message_where_it_is_told_to(
    tmp_path: Path,
) -> None:
    """Otherwise another answer follows the assistant's, as there."""
    chat = {"model": "m", "messages": [ASKED, {"role": "assistant", "content": "He"}]}
    assert rendered(read_chat(chat), tmp_path).endswith("[assistant]He<end>[assistant]<think>")
    for fields in ({}, {"add_generation_prompt": False}):
        ask = read_chat({**chat, "continue_final_message": True, **fields})
        assert rendered(ask, tmp_path).endswith("[assistant]He")
    for is_begun in (True, False):
        both = {"continue_final_message": is_begun, "add_generation_prompt": is_begun}
        with pytest.raises(ValidationError, match="add_generation_prompt: must be the opposite"):
            read_chat({**chat, **both})
    with pytest.raises(ValidationError, match=r"messages\[0\]: only a text of the assistant"):
        read_chat({"model": "m", "messages": [ASKED], "continue_final_message": True})


def test_a_message_without_blocks_is_refused_by_name() -> None:
    """It was left out, and nothing said."""
    with pytest.raises(ValidationError, match=r"messages\[1\]\.content: expected a text or a list"):
        begun([])


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer()])
def test_the_bytes_of_tokens_joined_are_those_of_the_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = model(tmp_path, GENERIC, tokenizer)
    said = "abä 日本 😀" if "ð" in tokenizer.get_vocab() else "日本語"
    tokens = text.encode(said, add_special_tokens=False)
    assert any("\ufffd" in text.token_text(token) for token in tokens), "parts of characters"
    assert b"".join(map(text.token_bytes, tokens)).decode() == said


def test_the_bytes_of_a_token_that_is_no_character_by_its_name_are_its_texts(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["\ufffd"])
    text = model(tmp_path, GENERIC, tokenizer)
    (token,) = text.encode("\ufffd", add_special_tokens=False)
    assert text.token_bytes(token) == "\ufffd".encode()


DEEP: Any = functools.reduce(lambda inside, _: [inside], range(300), 1)
FUNCTION = {"name": "f", "parameters": {"x": DEEP}}
CALL = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"x": DEEP})}}


@pytest.mark.parametrize(
    ("read", "fields", "place"),
    [
        (read_response, {"metadata": {"x": DEEP}}, "metadata"),
        (read_response, {"user": DEEP}, "user"),
        (read_response, {"tools": [{"type": "function", **FUNCTION}]}, "tools"),
        (read_response, {"tool_choice": {"type": "function", "x": DEEP}}, "tool_choice"),
        (read_chat, {"tools": [{"type": "function", "function": FUNCTION}]}, "parameters"),
        (
            read_chat,
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (read_messages, {"tools": [{"name": "f", "input_schema": {"x": DEEP}}]}, "parameters"),
    ],
)
def test_what_is_nested_too_deep_to_be_written_again_is_refused_by_name(
    read: Callable[[Any], Ask], fields: dict[str, Any], place: str
) -> None:
    said = {"input": "a"} if read is read_response else {"messages": [ASKED], "max_tokens": 1}
    with pytest.raises(ValidationError, match=f"{re.escape(place)}.*nested deeper than 100"):
        read({"model": "m", **said, **fields})


@pytest.mark.parametrize("program", ["'a'.index('b')", "1 // 0", "range(10 ** 9)"])
def test_whatever_a_template_trips_over_is_told_to_the_client(program: str, tmp_path: Path) -> None:
    ask = read_chat({"model": "m", "messages": [ASKED]})
    with pytest.raises(ValidationError, match="the chat template refuses this"):
        rendered(ask, tmp_path, GENERIC + "{{ " + program + " }}")


def test_a_long_text_is_encoded_while_other_threads_run(tmp_path: Path) -> None:
    text = model(tmp_path, GENERIC)
    assert is_held_less(lambda: text.encode("hello world " * 20_000), 0.02, tries=3)


def test_what_is_far_too_long_is_refused_before_all_of_it_is_encoded(tmp_path: Path) -> None:
    text = model(tmp_path, GENERIC)
    base = BaseModelInfo(name="m", max_context_length=4096, vocab_size=512, architecture="")
    said = {"model": "m", "messages": [{"role": "user", "content": "hello " * 2_000_000}]}
    begun = [*said["messages"], {"role": "assistant", "content": "Once"}]
    for ask in (
        read_chat(said),
        read_messages({**said, "max_tokens": 1}),
        read_messages({**said, "messages": begun, "max_tokens": 1}),
    ):
        began = time.process_time()
        with pytest.raises(
            ValidationError, match="prompt: has more than 262144 tokens; the model'"
        ):
            render(ChosenModel(text, base), ask)
        assert time.process_time() - began < 2, "half of what the whole would take"


def test_a_long_text_is_counted_to_the_token(tmp_path: Path) -> None:
    text = model(tmp_path, GENERIC)
    long = "hello " * 50_000
    assert text.encode(long, context=200_000) == text.encode(long)
