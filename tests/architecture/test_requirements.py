"""Every requirement has a test, or a written reason why it has none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "tools/requirements.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_requirement_has_a_test_or_a_reason(tool: ModuleType) -> None:
    wanted, cited, omitted = tool.requirements(), tool.citations(), tool.omissions()
    assert list(wanted) == [f"S{number}" for number in range(1, 119)]
    assert list(tool.complaints(wanted, cited, omitted)) == []


def test_the_command_lists_them_all_and_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/requirements.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("S") for line in done.stdout.splitlines()) == 118


def test_one_without_a_test_is_an_error(tool: ModuleType) -> None:
    wanted = {"S1": "a", "S2": "b", "S3": "c", "S4": "d"}
    cited = {"S1": ["tests/a.py::test_a"], "S4": ["tests/b.py"], "S7": ["tests/b.py"]}
    found = list(tool.complaints(wanted, cited, {"S2": "reason", "S4": "reason"}))
    assert [each.split()[0] for each in found] == ["S3", "S4", "there"]


def test_only_docstrings_cite(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        '"""Module, S9."""\n# S8\ndef test_a():\n    """S1, S3-S5"""\n    text = "S7"\n'
        'def helper():\n    """S6"""\n'
    )
    cited = tool.citations(tmp_path / "tests")
    assert cited == {
        "S9": ["tests/test_x.py"],
        **{each: ["tests/test_x.py::test_a"] for each in ("S1", "S3", "S4", "S5")},
    }


def test_most_tests_are_about_types_order_and_transport(tool: ModuleType) -> None:
    """S118: the hard parts are concurrency and strict types, so that is where tests weigh."""
    places: dict[str, set[int]] = {}
    for identifier, tests in tool.citations().items():
        for place in tests:
            places.setdefault(place, set()).add(int(identifier[1:]))
    hard = sum(min(numbers) <= 71 for numbers in places.values())
    assert hard > len(places) / 2
