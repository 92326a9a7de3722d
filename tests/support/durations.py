"""A pytest plugin: how long the tests of each folder took, printed at the end and written down.

The file is where the next look for slow tests begins; it is not kept under version control.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

_FILE = "durations.txt"
_SLOW_SECONDS = 5.0
"""Above this a test belongs among the slow ones, which `make check` leaves out."""


class Durations:
    def __init__(self) -> None:
        self._tests: Counter[str] = Counter()
        self._slow: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += report.duration  # type: ignore[assignment]  # seconds
        if "slow" in report.keywords or "real_model" in report.keywords:
            self._slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
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
        path = terminalreporter.config.rootpath / _FILE
        text = [*lines, "", f"above {_SLOW_SECONDS:g} s and not marked slow:", *unmarked]
        path.write_text("\n".join(text) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(), "durations")
