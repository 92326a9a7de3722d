"""What keeps `make check` short enough for every day."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest

from scratch_folder import scratch_folder
from tests.support.durations import Durations


def test_what_was_collected_is_not_looked_through_at_each_garbage_collection() -> None:
    assert gc.get_freeze_count() > 10_000


def test_files_of_tests_are_kept_in_memory_where_there_is_room(tmp_path: Path) -> None:
    assert scratch_folder(tmp_path, needed_bytes=0) == tmp_path
    usual = Path(tempfile.gettempdir())
    assert scratch_folder(tmp_path, needed_bytes=2**60) == usual
    assert scratch_folder(tmp_path / "none", needed_bytes=0) == usual


class Terminal:
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_long_tests_that_are_not_marked_slow_are_named(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "durations.txt")
    for name, seconds, marks in (
        ("quick", 0.1, {}),
        ("long", 2.0, {}),
        ("marked", 9.0, {"slow": 1}),
    ):
        for when in ("setup", "call"):
            durations.pytest_runtest_logreport(
                pytest.TestReport(
                    nodeid=f"tests/wire/test_one.py::test_{name}",
                    location=("", 0, ""),
                    keywords=marks,
                    outcome="passed",
                    longrepr=None,
                    when=when,
                    duration=seconds / 2,
                )
            )
    terminal = Terminal()
    durations.pytest_terminal_summary(terminal)
    assert "    11.1 s  tests/wire" in terminal.lines
    assert "1 tests above 1.5 s and not marked slow: see durations.txt" in terminal.lines
    written = (tmp_path / "durations.txt").read_text()
    assert written.endswith("not marked slow:\n     2.0 s  tests/wire/test_one.py::test_long\n")
