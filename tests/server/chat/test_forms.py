"""The form of an answer: what requests may say, and grammars that would hold everybody up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tinsmith.engine.base import Grammar
from tinsmith.errors import ValidationError
from tinsmith.server.chat.anthropic import read_messages
from tinsmith.server.chat.ask import Ask
from tinsmith.server.chat.forms import Form, FormChecks, read_form
from tinsmith.server.chat.openai import read_chat

pytest.importorskip("llguidance", reason="grammars need llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HOSTILE = {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuvwx"]}


def chat(**fields: Any) -> Ask:
    return read_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA, separators=(",", ":")),
        ),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"guided_choice": ["a.b", "c"]}, "regex", r"a\.b|c"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"structured_outputs": {"regex": "b", "json": None}}, "regex", "b"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
    ],
)
def test_the_names_of_openai_and_vllm_mean_the_same(
    fields: dict[str, Any], kind: str, text: str
) -> None:
    form = chat(**fields).form
    assert form is not None
    assert (form.grammar.kind, form.grammar.text) == (kind, text)


def test_anthropic_messages_may_ask_for_a_schema() -> None:
    said = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    form = read_messages({**said, "output_config": config}).form
    assert form is not None
    assert json.loads(form.grammar.text) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * 70_000}, "guided_regex: at most 65536 bytes, got 70000"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "send one of them"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "cannot call tools",
        ),
    ],
)
def test_what_is_no_form_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem.replace(".", r"\.")):
        chat(**fields)


def test_no_form_and_plain_text_ask_for_nothing() -> None:
    assert read_form({"response_format": {"type": "text"}, "guided_json": None}) is None


async def test_grammars_that_cannot_be_compiled_are_refused_with_their_field() -> None:
    checks = FormChecks()
    try:
        await checks.check("a", Form(Grammar(kind="regex", text="[0-9]+"), "guided_regex"))
        with pytest.raises(ValidationError, match=r"guided_regex: cannot be compiled.*unclosed"):
            await checks.check("a", Form(Grammar(kind="regex", text="(a"), "guided_regex"))
        for text in ("not JSON", "[1]", "3"):
            with pytest.raises(ValidationError, match="guided_json: is no JSON schema"):
                await checks.check("a", Form(Grammar(kind="json_schema", text=text), "guided_json"))
        with pytest.raises(ValidationError, match="cannot be compiled"):
            wrong = Grammar(kind="json_schema", text='{"type": "nothing"}')
            await checks.check("a", Form(wrong, "response_format"))
    finally:
        checks.close()


async def test_a_grammar_that_would_take_for_ever_ends_its_process_and_no_more() -> None:
    """Its intersection doubles with every pattern; another owner's turn comes meanwhile."""
    checks = FormChecks()
    hostile = Form(Grammar(kind="json_schema", text=json.dumps(HOSTILE)), "response_format")
    harmless = Form(Grammar(kind="regex", text="a"), "guided_regex")
    try:
        attacks = [asyncio.create_task(checks.check("attacker", hostile)) for _ in range(3)]
        await asyncio.sleep(0)
        await checks.check("neighbour", harmless)
        assert not attacks[-1].done(), "the neighbour waited for all of them"
        for attack in attacks:
            with pytest.raises(ValidationError, match=r"takes more than 0\.5 s to compile"):
                await attack
        await checks.check("attacker", harmless)
    finally:
        checks.close()
