"""Answers of a given form: every one of them matches, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.sample.sampling_reference import (
    CPU,
    answer,
    answers,
    assert_trainer_agrees,
    finish,
    job_of,
    tokens_in,
    tokens_of,
)
from tests.support import byte_model
from tests.support.byte_model import END, VOCAB_SIZE
from tinsmith.detokenizer import read_detokenize
from tinsmith.engine.base import Failure, Grammar, SampleJob, Shaping
from tinsmith.engine.grammar import Tokens
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import SampleResponse

pytest.importorskip("llguidance", reason="grammars need llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DIGITS = Grammar(kind="regex", text="[0-9]{3}-[a-f]{2,5}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model.write(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def new_generator(folder: Path) -> Callable[[], Generator]:
    decoder, tokens = Decoder.load(folder), Tokens(folder, VOCAB_SIZE)
    return lambda: Generator(decoder, CPU, read_detokenize(folder), tokens)


def constrained(grammar: Grammar, job_id: str = "a", **fields: Any) -> SampleJob:
    fields = {"max_tokens": 300, "stop": None, **fields}
    return job_of(job_id, tokens_of(5), shaping=Shaping(grammar=grammar), **fields)


def texts(folder: Path, response: SampleResponse) -> list[str]:
    detokenize = read_detokenize(folder)
    assert detokenize is not None
    return [detokenize([t for t in tokens if t != END]) for tokens in tokens_in(response)]


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def test_every_answer_validates_and_ends_with_the_models_end(
    folder: Path, new_generator: Callable[[], Generator]
) -> None:
    response = answer(new_generator(), constrained(schema(PERSON), num_samples=8, seed=1))
    for sequence, text in zip(response.sequences, texts(folder, response), strict=True):
        jsonschema.validate(json.loads(text), PERSON)
        assert sequence.stop_reason == "stop"
        assert sequence.tokens[-1] == END
        assert END not in sequence.tokens[:-1]


_LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 4},
        {"enum": ["x", 3, None]},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
    ]
)


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(["a", "b", "é"]), parts, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:1],
            "additionalProperties": False,
        }
    )


def _arrays(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, parts)


_SCHEMAS = st.recursive(_LEAVES, lambda parts: _objects(parts) | _arrays(parts), max_leaves=6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(value=_SCHEMAS)
def test_answers_to_any_schema_parse_and_validate(
    value: Any, folder: Path, new_generator: Callable[[], Generator]
) -> None:
    response = answer(new_generator(), constrained(schema(value), num_samples=2, seed=5))
    for sequence, text in zip(response.sequences, texts(folder, response), strict=True):
        if sequence.stop_reason == "stop":  # a number may be longer than all the tokens there are
            jsonschema.validate(json.loads(text), value)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (DIGITS, DIGITS.text),
        (Grammar(kind="lark", text='start: "yes" | "no"'), "yes|no"),
        (Grammar(kind="regex", text="(a|é|日){2,4}"), "(a|é|日){2,4}"),
    ],
    ids=["regex", "lark", "characters of several tokens"],
)
@pytest.mark.parametrize("stop", [None, []], ids=["stop tokens", "no stop tokens"])
def test_answers_match_whole_expressions(
    grammar: Grammar,
    pattern: str,
    stop: list[int] | None,
    folder: Path,
    new_generator: Callable[[], Generator],
) -> None:
    job = constrained(grammar, num_samples=6, seed=2, stop=stop)
    response = answer(new_generator(), job)
    for sequence, text in zip(response.sequences, texts(folder, response), strict=True):
        assert sequence.stop_reason == "stop"
        assert re.fullmatch(pattern, text)


def test_the_end_is_allowed_exactly_where_the_text_is_complete(
    folder: Path, new_generator: Callable[[], Generator]
) -> None:
    """The end is made as likely as can be: the shortest text that matches comes out."""
    grammar = Grammar(kind="regex", text="[0-9]{3,9}")
    shaping = Shaping(grammar=grammar, logit_bias={END: 100.0})
    job = job_of("a", tokens_of(5), max_tokens=50, stop=None, seed=1, shaping=shaping)
    (text,) = texts(folder, answer(new_generator(), job))
    assert re.fullmatch("[0-9]{3}", text)


def test_a_token_that_is_not_to_end_a_sequence_does_not(
    folder: Path, new_generator: Callable[[], Generator]
) -> None:
    """The tokenizer's own end, as likely as can be, where the request names no stop tokens."""
    shaping = Shaping(grammar=Grammar(kind="regex", text="[0-9]{3,}"), logit_bias={END: 100.0})
    job = job_of("a", tokens_of(5), max_tokens=12, stop=[], seed=1, shaping=shaping)
    response = answer(new_generator(), job)
    assert END not in tokens_in(response)[0]
    assert response.sequences[0].stop_reason == "length"
    assert re.fullmatch("[0-9]{12}", *texts(folder, response))


def test_log_probabilities_are_the_models_own_and_neighbours_change_nothing(
    folder: Path, new_generator: Callable[[], Generator]
) -> None:
    jobs = [
        constrained(schema(PERSON), "schema", seed=1, num_samples=2),
        constrained(DIGITS, "digits", seed=2, temperature=0.7),
        job_of("plain", tokens_of(7), seed=3, max_tokens=40),
    ]
    together = answers(new_generator(), [(job, None) for job in jobs])
    for job in jobs:
        assert tokens_in(together[job.job_id]) == tokens_in(answer(new_generator(), job))
    decoder = Decoder.load(folder)
    assert_trainer_agrees(decoder, tokens_of(5), together["digits"], temperature=0.7)


def test_what_cannot_be_compiled_fails_alone(new_generator: Callable[[], Generator]) -> None:
    generator = new_generator()
    generator.submit(constrained(Grammar(kind="regex", text="(a"), "wrong"), None)
    generator.submit(constrained(schema({"type": "nothing"}), "unknown"), None)
    generator.submit(constrained(DIGITS, "right", seed=1), None)
    found = {job_id: events[-1] for job_id, events in finish(generator).items()}
    for name in ("wrong", "unknown"):
        failure = found[name]
        assert isinstance(failure, Failure) and failure.category == "user"
        assert "cannot be compiled" in failure.message
    assert isinstance(found["right"], SampleResponse)


def test_a_grammar_without_a_token_for_it_is_the_requests_failure(
    new_generator: Callable[[], Generator],
) -> None:
    generator = new_generator()
    impossible = Grammar(kind="lark", text="start: <[299]> <[298]>")
    generator.submit(constrained(impossible, "a"), None)
    generator.submit(constrained(DIGITS, "b", seed=1), None)
    found = {job_id: events[-1] for job_id, events in finish(generator).items()}
    assert isinstance(found["b"], SampleResponse)


def test_a_job_is_given_up_while_its_grammar_is_compiled(
    new_generator: Callable[[], Generator],
) -> None:
    generator = new_generator()
    generator.submit(constrained(DIGITS, "a"), None)
    assert generator.busy
    generator.cancel("a")
    assert finish(generator) == {}


def test_a_tokenizer_that_cannot_be_followed_is_said(tiny_decoder: Decoder) -> None:
    generator = Generator(tiny_decoder, CPU)
    generator.submit(constrained(DIGITS, "a"), None)
    (failure,) = finish(generator)["a"]
    assert isinstance(failure, Failure)
    assert "tokenizer" in failure.message
