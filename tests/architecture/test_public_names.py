"""The package offers what the official one does, under the same names."""

import ast
import inspect
from pathlib import Path

import pytest
import tinker

import tinsmith

# Names of the official package that we leave out, and why (docs/differences.md).
LEFT_OUT: dict[str, str] = {}


def test_every_official_name_is_offered() -> None:
    missing = set(tinker.__all__) - set(tinsmith.__all__)
    assert missing == set(LEFT_OUT)


def test_every_promised_name_exists() -> None:
    for name in tinsmith.__all__:
        assert getattr(tinsmith, name) is not None


def test_type_checkers_see_every_name_where_it_is_loaded_from() -> None:
    """Run `make schema` after changing the table."""
    stub = ast.parse((Path(tinsmith.__file__).with_suffix(".pyi")).read_text())
    seen = {
        (node.module, alias.name)
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    loaded = {(module, name) for module, names in tinsmith.NAMES.items() for name in names}
    modules = {tuple(module.rsplit(".", 1)) for module in tinsmith.MODULES.values()}
    assert seen == loaded | modules


@pytest.mark.parametrize("name", [n for n in tinker.__all__ if inspect.isclass(getattr(tinker, n))])
def test_classes_are_classes_and_errors_are_errors(name: str) -> None:
    official, ours = getattr(tinker, name), getattr(tinsmith, name)
    assert inspect.isclass(ours)
    for base in (Exception, Warning):
        assert issubclass(ours, base) == issubclass(official, base)


def test_the_error_tree_has_the_official_shape() -> None:
    errors = {
        name: value
        for name in tinker.__all__
        if inspect.isclass(value := getattr(tinker, name)) and issubclass(value, Exception)
    }
    for name, official in errors.items():
        for other, parent in errors.items():
            ours, our_parent = getattr(tinsmith, name), getattr(tinsmith, other)
            assert issubclass(ours, our_parent) == issubclass(official, parent), (name, other)
