"""A test that wants another time or limit gives it: in a config, or as an argument with a default.

A constant that is replaced in its module reaches whoever else reads it, and a module that has
imported it by name goes on with the old one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_tests_replace_no_constant_of_our_modules() -> None:
    ours = set(_constants(ast.parse(file.read_text()) for file in _sources()))
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in (ROOT / "tests").rglob("*.py")
        if file != Path(__file__)
        for name in replaced(ast.parse(file.read_text()), ours)
    }
    assert sorted(found) == [], "add an argument with a default, or a field of the part's config"


@pytest.mark.parametrize(
    "source",
    [
        "monkeypatch.setattr(leases, 'LOOK_SECONDS', 1)",
        "monkeypatch.setattr('tinsmith.server.leases.LOOK_SECONDS', 1)",
        "monkeypatch.setitem(leases.__dict__, 'LOOK_SECONDS', 1)",
        "patch.object(leases, 'LOOK_SECONDS', 1)",
        "patch('tinsmith.server.leases.LOOK_SECONDS', 1)",
        "setattr(leases, 'LOOK_SECONDS', 1)",
        "leases.LOOK_SECONDS = 1",
        "tinsmith.server.leases.LOOK_SECONDS *= 2",
    ],
)
def test_each_way_to_replace_a_constant_is_seen(source: str) -> None:
    assert list(replaced(ast.parse(source), {"LOOK_SECONDS"})) == ["LOOK_SECONDS"]


def test_reading_one_and_having_ones_own_are_free() -> None:
    source = "LOOK_SECONDS = leases.LOOK_SECONDS\nwait('LOOK_SECONDS')\nos.environ['X'] = '1'"
    assert list(replaced(ast.parse(source), {"LOOK_SECONDS"})) == []


def replaced(tree: ast.Module, constants: set[str]) -> Iterator[str]:
    """The constants to which a test gives another value where they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if node.attr in constants else []
        elif isinstance(node, ast.Call) and _replaces(node):
            texts = [str(arg.value) for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            yield from (name for text in texts if (name := text.rpartition(".")[2]) in constants)


def _replaces(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith(("setattr", "setitem", "patch.object", "patch"))


def _sources() -> Iterator[Path]:
    for folder in ("src", "tools"):
        yield from (ROOT / folder).rglob("*.py")


def _constants(trees: Iterable[ast.Module]) -> Iterator[str]:
    """The names in capitals that modules define."""
    for tree in trees:
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name.isupper())
