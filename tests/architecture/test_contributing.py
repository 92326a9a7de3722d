"""The diffs of CONTRIBUTING.md, which show how little another loss, endpoint or operation takes,
fit the code as it is."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tinsmith"

DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)

WRITTEN_BY_THE_READER = {"RenameSessionRequest", "ResetOptimizerRequest", "ResetOptimizerResponse"}
"""Messages, which are left out."""


def _changes() -> Iterator[tuple[str, list[str]]]:
    """Each file of a diff, and its lines."""
    for diff in DIFFS:
        parts = re.split(r"^(?:--- a/src/tinsmith/| # )([a-z_/]+\.py)\n", diff, flags=re.MULTILINE)
        for path, text in zip(parts[1::2], parts[2::2], strict=True):
            yield path, text.splitlines()


CHANGES = list(_changes())


def _parsed(added: str) -> ast.Module:
    """Statements, rows of a list or a dict, or methods."""
    plain = textwrap.dedent(added)
    for source in (plain, f"[{plain}]", f"{{{plain}}}", f"class _:\n{added}"):
        try:
            return ast.parse(source)
        except SyntaxError:
            continue
    raise AssertionError(f"no Python:\n{added}")


def _defined(trees: list[ast.Module]) -> set[str]:
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _unknown(trees: list[ast.Module], module: ModuleType) -> Iterator[str]:
    """Names that neither the module nor the added lines define, and arguments nobody takes."""
    known = {*dir(module), *dir(builtins), *_defined(trees), *WRITTEN_BY_THE_READER}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and node.id not in known:
            yield node.id
        elif isinstance(node, ast.Call) and hasattr(module, ast.unparse(node.func)):
            takes = inspect.signature(getattr(module, ast.unparse(node.func))).parameters
            yield from (str(each.arg) for each in node.keywords if each.arg not in takes)


def test_there_are_three_of_one_or_two_files() -> None:
    assert len(DIFFS) == 3
    assert len(CHANGES) == 6


@pytest.mark.parametrize(("path", "lines"), CHANGES, ids=[path for path, _ in CHANGES])
def test_a_diff_fits_the_file_that_it_changes(path: str, lines: list[str]) -> None:
    if path.startswith("engine/local/"):
        pytest.importorskip("torch", reason="the losses of the local engine are torch's")
    text = (SOURCE / path).read_text()
    module = importlib.import_module("tinsmith." + path.removesuffix(".py").replace("/", "."))
    known = [line[1:] for line in lines if line.startswith(" ")]
    known += [line[3:] for line in lines if line.startswith("@@ ")]
    assert [line for line in known if line not in text] == []
    kept = "\n".join(line if line.startswith("+") else "@@" for line in lines)
    hunks = [re.sub(r"^\+", "", hunk, flags=re.MULTILINE) for hunk in kept.split("@@")]
    assert list(_unknown([_parsed(hunk.strip("\n")) for hunk in hunks], module)) == []
