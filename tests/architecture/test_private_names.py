"""Tests use what our modules offer, so that what is inside a module may change without them.

A test that needs a private name shows a missing seam: an argument, a setting, a public method.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED = {
    # What the poller remembers shows nowhere else, and forgetting is what is tested.
    ("tests/client/test_sample_poller.py", "_poller"),
    ("tests/client/test_sample_poller.py", "_waiting"),
    ("tests/client/test_sample_poller.py", "_early"),
    # Every public way to the uplink waits until it is open; here it must not be yet.
    ("tests/client/test_uplink.py", "_session_uplink"),
    # Notebooks call it by this name.
    ("tests/types/test_notebooks.py", "_repr_html_"),
    # A tensor's, by torch; one of our functions has the same name.
    ("tests/engine/train/test_adamw.py", "_version"),
}


def test_tests_touch_no_private_name_of_ours() -> None:
    ours = _private_definitions((ROOT / "src").rglob("*.py"))
    of_support = _private_definitions((ROOT / "tests/support").glob("*.py"))
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in (ROOT / "tests").rglob("*.py")
        if file != Path(__file__)
        for name in touched(
            ast.parse(file.read_text()), ours - of_support - _private_definitions([file])
        )
    }
    assert sorted(found - ALLOWED) == [], "use a public name, or add an argument or a setting"
    assert sorted(ALLOWED - found) == [], "no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "from tinsmith.server.garbage import _secret",
        "service._secret()",
        "self.service._secret",
        "monkeypatch.setattr(garbage, '_secret', 1)",
        "monkeypatch.setattr('tinsmith.server.garbage._secret', 1)",
        "patches = {'tinsmith.server.garbage._secret': 1}",
        "patch.object(Service, '_secret', 1)",
    ],
)
def test_each_way_to_touch_a_private_name_is_seen(source: str) -> None:
    assert list(touched(ast.parse(source), {"_secret"})) == ["_secret"]


@pytest.mark.parametrize(
    "source", ["garbage._secret()", "monkeypatch.setattr(garbage, '_secret', 1)"]
)
def test_it_is_seen_also_where_the_tests_have_a_private_name_like_it(source: str) -> None:
    imported = "from tinsmith.server import garbage\n"
    assert list(touched(ast.parse(imported + source), set())) == ["_secret"]


def test_names_of_others_and_of_the_tests_themselves_are_free() -> None:
    source = "import tinker._models\nself._secret = 1\nloop._ready\nobj.__dict__\n'a _secret'"
    assert list(touched(ast.parse(source), {"_secret"})) == []


def touched(tree: ast.Module, private: set[str]) -> Iterator[str]:
    """The private names that a test imports, reaches for, or replaces by their name."""
    ours = set(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinsmith"):
            yield from (alias.name for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.Attribute) and not _is_of_self(node):
            is_ours = _is_private(node.attr) and ast.unparse(node.value) in ours
            yield from [node.attr] if is_ours or node.attr in private else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, _, name = node.value.rpartition(".")
            if module.startswith("tinsmith") and name in private:
                yield name
        elif isinstance(node, ast.Call) and _replaces(node):
            is_ours = ast.unparse(node.args[0]) in ours
            names = [str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            yield from (n for n in names if n in private or (is_ours and _is_private(n)))


def _imported(tree: ast.Module) -> Iterator[str]:
    """The names by which a test has what it imports from us."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinsmith"):
            yield from (alias.asname or alias.name for alias in node.names)


def _replaces(node: ast.Call) -> bool:
    return bool(node.args) and ast.unparse(node.func).endswith(("setattr", "patch.object"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _private_definitions(files: Iterable[Path]) -> set[str]:
    return {name for file in files for name in _definitions(file) if _is_private(name)}


def _definitions(file: Path) -> set[str]:
    """Functions, classes, variables and attributes that a file defines."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.update([node.attr] if _is_of_self(node) else [])
    return names
