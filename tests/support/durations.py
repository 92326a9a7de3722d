"""A pytest plugin: how long the tests of each folder took, printed at the end and written down.

The file is where the next look for slow tests begins; it is not kept under version control. It
names tests that take long and are not marked slow. That is no failure: machines differ, and other
tests run beside.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Protocol

import pytest

_FILE = "durations.txt"
_SLOW_SECONDS = 1.5
"""Above this a test belongs among the slow ones, unless it is the only one of its promise."""


class Terminal(Protocol):
    """What is used of pytest's own."""

    def section(self, title: str) -> None: ...

    def write_line(self, line: str) -> None: ...


class Durations:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: Counter[str] = Counter()
        self._slow: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += report.duration  # type: ignore[assignment]  # seconds
        if "slow" in report.keywords or "real_model" in report.keywords:
            self._slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Terminal) -> None:
        folders: Counter[str] = Counter()
        for test, seconds in self._tests.items():
            folders[str(Path(test.partition("::")[0]).parent)] += seconds
        lines = [f"{seconds:8.1f} s  {folder}" for folder, seconds in folders.most_common()]
        unmarked = [
            f"{seconds:8.1f} s  {test}"
            for test, seconds in self._tests.most_common()
            if seconds > _SLOW_SECONDS and test not in self._slow
        ]
        terminalreporter.section("seconds per folder")
        for line in lines:
            terminalreporter.write_line(line)
        said = f"above {_SLOW_SECONDS:g} s and not marked slow"
        terminalreporter.write_line(f"{len(unmarked)} tests {said}: see {self._file.name}")
        text = [*lines, "", f"{said}:", *unmarked]
        self._file.write_text("\n".join(text) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config.rootpath / _FILE), "durations")
