"""Calls in a model's text: found however the text is cut, and never a word lost."""

from __future__ import annotations

import itertools

import pytest

from tinsmith.server.chat.tool_calls import ToolCall, ToolCallStream, ToolForm, form_of, joined

JSON_TEMPLATE = "{% if tools %}<tool_call>{% endif %}"
XML_TEMPLATE = "{% if tools %}<tool_call><function=name>{% endif %}"
BARE_TEMPLATE = '{% if tools %}{"name": f, "parameters": p}{% endif %}'


def _form(template: str) -> ToolForm:
    form = form_of(template)
    assert form is not None
    return form


def _parts(form: ToolForm, *pieces: str, forced: str = "") -> list[str | ToolCall]:
    stream = ToolCallStream(form, forced)
    parts = [part for piece in pieces for part in stream.add(piece)]
    return parts + stream.finish()


CALL = ToolCall("add", {"a": 1, "text": "x > y"})
ANSWERS = [
    (JSON_TEMPLATE, 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "x > y"}}'
     "\n</tool_call>", "So:\n"),
    (XML_TEMPLATE, "\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
     "<parameter=text>\nx > y\n</parameter>\n</function>\n</tool_call>", ""),
    (BARE_TEMPLATE, '\n{"name": "add", "parameters": {"a": 1, "text": "x > y"}}', ""),
]  # fmt: skip


@pytest.mark.parametrize(("template", "answer", "text"), ANSWERS)
def test_a_call_is_found_however_the_text_is_cut(template: str, answer: str, text: str) -> None:
    form = _form(template)
    for first, second in itertools.combinations(range(0, len(answer) + 1, 3), 2):
        pieces = answer[:first], answer[first:second], answer[second:]
        assert joined(_parts(form, *pieces)) == (text, [CALL])


@pytest.mark.parametrize(
    "said",
    [
        "no call at all < tool",
        "<tool_call>not JSON</tool_call> and more",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}',
        "an end <tool_ca",
        "{ never a call",
        'first text, {"name": "f", "parameters": {}}',
    ],
)
@pytest.mark.parametrize("template", [JSON_TEMPLATE, XML_TEMPLATE, BARE_TEMPLATE])
def test_what_is_no_call_is_text_to_the_last_character(template: str, said: str) -> None:
    form = _form(template)
    for cut in range(len(said) + 1):
        assert joined(_parts(form, said[:cut], said[cut:])) == (said, [])


def test_text_comes_before_the_call_that_follows_it_is_whole() -> None:
    stream = ToolCallStream(_form(JSON_TEMPLATE))
    assert stream.add("Let me see. <tool") == ["Let me see. "]
    assert stream.add('_call>{"name": "f"}') == []
    assert stream.add("</tool_call>") == [ToolCall("f", {})]


def test_several_calls_and_text_keep_their_order() -> None:
    one, two = '<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "b"}</tool_call>'
    parts = _parts(_form(JSON_TEMPLATE), f"{one}\n{two}\n")
    assert parts == [ToolCall("a", {}), ToolCall("b", {})]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (JSON_TEMPLATE, '{"a": 1}}</tool_call>'),
        (XML_TEMPLATE, "<parameter=a>\n1\n</parameter>\n</function></tool_call>"),
        (BARE_TEMPLATE, '{"a": 1}}'),
    ],
)
def test_an_answer_that_was_made_to_begin_as_a_call_is_read_with_its_beginning(
    template: str, said: str
) -> None:
    form = _form(template)
    assert _parts(form, said, forced=form.forced("add")) == [ToolCall("add", {"a": 1})]


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [
        (JSON_TEMPLATE, '<tool_call>{"name": "f", "arguments": {"a": ', "}}</tool_call>"),
        (XML_TEMPLATE, "<tool_call><function=f><parameter=a>", "</parameter></tool_call>"),
        (BARE_TEMPLATE, '{"name": "f", "parameters": {"a": ', "}}"),
    ],
)
def test_a_call_too_deep_to_be_written_again_is_text(
    template: str, opening: str, closing: str
) -> None:
    said = opening + "[" * 300 + "]" * 300 + closing
    assert joined(_parts(_form(template), said)) == (said, [])


def test_a_template_that_knows_no_tools_has_no_form() -> None:
    assert form_of("{{ messages }}") is None
    assert form_of("{{ tools }}") is None
