"""docs/glossary.md gives each word one meaning, and meanings once given up do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tinsmith"
GLOSSARY = dict(
    re.findall(r"^\| ([a-z ]+) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
)
OF_THE_FIELD = {"batch", "epoch", "rank"}
"""These have a second meaning in every paper, and the glossary says so."""

GIVEN_UP = [
    ("slot", "engine/local", {"boundary/messages.py", "boundary/process.py"}, "an adapter's place"),
    ("snapshot", "engine", {"local/model/sources.py"}, "any adapter that an engine saves"),
    ("trainer", ".", set(), "the code that trains, beside which sampler would be code too"),
    ("owner", "engine/local/boundary", {"worker.py", "company.py"}, "who calls an engine"),
]
"""A word, where it has no business, files that use it in its one meaning (or name the hub's folder
of that name), and the meaning that it once had there."""


def test_the_glossary_is_short_and_in_order() -> None:
    assert 30 <= len(GLOSSARY) <= 40
    assert list(GLOSSARY) == sorted(GLOSSARY)


def test_no_meaning_depends_on_where_the_word_stands() -> None:
    place = re.compile(r"(?:^|\. )(?:In|On|To|Of|Between) [^.:]+?,")
    found = {word for word, meaning in GLOSSARY.items() if place.search(meaning)}
    assert found == set()
    assert {w for w, meaning in GLOSSARY.items() if "The field's own:" in meaning} == OF_THE_FIELD


@pytest.mark.parametrize("word", GLOSSARY)
def test_every_word_is_used(word: str) -> None:
    spelt = re.compile(word.replace(" ", "[ _]"), re.IGNORECASE)
    files = (*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"))
    assert any(spelt.search(file.read_text()) for file in files)


@pytest.mark.parametrize(("word", "folder", "allowed", "meaning"), GIVEN_UP)
def test_a_meaning_that_was_given_up_stays_away(
    word: str, folder: str, allowed: set[str], meaning: str
) -> None:
    used = re.compile(rf"(?<![a-z]){word}s?(?![a-z])(?!=True)", re.IGNORECASE)
    files = {
        file.relative_to(SOURCE / folder).as_posix()
        for file in (SOURCE / folder).rglob("*.py")
        if used.search(file.read_text())
    }
    assert files <= allowed, f"here a {word} would be {meaning}; the glossary says otherwise"


def test_in_the_client_nothing_but_the_networks_own_is_called_a_connection() -> None:
    found = {
        name
        for file in (SOURCE / "client").rglob("*.py")
        for name in (file.stem, *_defined(ast.parse(file.read_text())))
        if "connection" in name.lower()
    }
    assert found == {"max_connections"}, "what clients share is an uplink"


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
