"""The form that an answer must have: a JSON schema, a regular expression, a choice or a grammar.

Under the names of OpenAI, of Anthropic, and of vLLM, which are many for one thing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tinsmith.engine.base import Grammar
from tinsmith.engine.grammar import MAX_GRAMMAR_BYTES, check_installed
from tinsmith.engine.grammar_check import MAX_COMPILE_SECONDS
from tinsmith.errors import ValidationError
from tinsmith.server.edge.workers import Workers

FIELDS = {
    "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}  # fmt: skip

_GUIDED = ("json", "regex", "choice", "grammar")
_CHILD = (sys.executable, "-P", "-m", "tinsmith.engine.grammar_check")


@dataclass(frozen=True, slots=True)
class Form:
    grammar: Grammar
    field: str
    """Where the request says it."""


def read_form(fields: Mapping[str, Any]) -> Form | None:
    """What a request to an OpenAI-compatible endpoint says of its answer's form."""
    found = [
        form
        for form in (
            _response_format(fields.get("response_format")),
            _structured(fields.get("structured_outputs")),
            *(_guided(kind, fields.get(f"guided_{kind}"), f"guided_{kind}") for kind in _GUIDED),
        )
        if form is not None
    ]
    if len(found) > 1:
        problem = f"{found[0].field} says which form the answer has, too; send one of them"
        raise ValidationError(problem, found[1].field)
    return found[0] if found else None


def schema_form(schema: Any, field: str) -> Form:
    if not isinstance(schema, Mapping):
        raise ValidationError("expected a JSON schema, which is an object", field)
    try:
        text = orjson.dumps(schema).decode()
    except (orjson.JSONEncodeError, RecursionError):
        raise ValidationError("expected a JSON schema that is nested less deeply", field) from None
    return _form("json_schema", text, field)


class FormChecks:
    """Tries grammars in a process that may die of one (`engine.grammar_check`).

    One at a time, owners in turns: a hostile grammar costs its owner's turn, and a new process.
    """

    def __init__(self) -> None:
        self._turns = Workers("forms")
        self._child: subprocess.Popen[bytes] | None = None

    async def check(self, owner: str, form: Form) -> None:
        """A `ValidationError` names the field of a form that cannot be compiled."""
        try:
            check_installed()
            problem = await self._turns.run(owner, self._ask, form.grammar)
        except ValidationError as error:
            raise ValidationError(str(error), form.field) from None
        if problem is not None:
            raise ValidationError(problem, form.field)

    def close(self) -> None:
        self._turns.close()
        if self._child is not None:
            self._child.kill()
            self._child.communicate()

    def _ask(self, grammar: Grammar) -> str | None:
        """What is wrong with it. Blocks; one at a time."""
        if self._child is None:
            self._child = subprocess.Popen(
                _CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._child.stdin is not None and self._child.stdout is not None, "they are pipes"
        question = {"kind": grammar.kind, "text": grammar.text}
        try:
            self._child.stdin.write(orjson.dumps(question) + b"\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            self._child.communicate()
            self._child = None
            return f"takes more than {MAX_COMPILE_SECONDS} s to compile; make it simpler"
        problem: str | None = orjson.loads(answer)["problem"]
        return problem


def _response_format(value: Any) -> Form | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_form({"type": "object"}, "response_format")
    if kind != "json_schema":
        raise ValidationError("expected text, json_object or json_schema", "response_format.type")
    described = value.get("json_schema")
    if not isinstance(described, Mapping):
        raise ValidationError("expected an object with a schema", "response_format.json_schema")
    return schema_form(described.get("schema"), "response_format.json_schema.schema")


def _structured(value: Any) -> Form | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValidationError("expected an object", "structured_outputs")
    said = {name: each for name, each in value.items() if each not in (None, False)}
    if len(said) != 1:
        known = ", ".join((*_GUIDED, "json_object"))
        raise ValidationError(f"expected exactly one of {known}", "structured_outputs")
    ((name, each),) = said.items()
    field = f"structured_outputs.{str(name)[:40]}"
    if name == "json_object":
        return schema_form({"type": "object"}, field)
    if name not in _GUIDED:
        raise ValidationError("not supported by this server", field)
    return _guided(name, each, field)


def _guided(kind: str, value: Any, field: str) -> Form | None:
    if value is None:
        return None
    if kind == "json" and not isinstance(value, str):
        return schema_form(value, field)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(c, str) for c in value):
            raise ValidationError("expected a list of texts", field)
        return _form("regex", "|".join(map(re.escape, value)), field)
    if not isinstance(value, str):
        raise ValidationError("expected a text", field)
    kinds = {"json": "json_schema", "regex": "regex", "grammar": "lark"}
    return _form(kinds[kind], value, field)


def _form(kind: Any, text: str, field: str) -> Form:
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise ValidationError(f"at most {MAX_GRAMMAR_BYTES} bytes, got {size}", field)
    return Form(Grammar(kind=kind, text=text), field)
