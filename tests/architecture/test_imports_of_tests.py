"""What tests import from us is there, also where this machine cannot run them.

Tests of kernels import inside their functions, because kernels need a GPU's compiler; a name that
has changed would otherwise be found on the next machine that has one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


@functools.cache
def defined_names(module: str) -> frozenset[str]:
    """What a module of ours defines or imports; nothing where there is no such module."""
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return frozenset()
    names = {each.stem for each in path.glob("*.py")} | {each.name for each in path.glob("*/")}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Each module of ours that a file imports from, and the name it takes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinsmith."):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_every_name_that_tests_and_benchmarks_import_is_there() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    missing = [
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for file in files
        for module, name in imported(file)
        if name not in defined_names(module)
    ]
    assert missing == []
