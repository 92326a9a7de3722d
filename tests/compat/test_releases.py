"""Every generation of the official client, unmodified, against one server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.server_process import ServerProcess

RELEASES = ["0.3.0", "0.7.0", "0.16.1", "0.18.2", "0.24.1", "0.25.0", "0.26.2", "0.30.4", "0.36.0"]


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(each, marks=pytest.mark.slow) if number else each
        for number, each in enumerate(RELEASES)
    ],
)
def test_a_release_trains_saves_resumes_and_samples(
    server: ServerProcess, official_release: Callable[[str], str], version: str
) -> None:
    python = official_release(version)
    assert server.run("any_release.py", version, python=python).strip() == "ok"
