"""The table of what owners share: each row has a bound and tests that exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "sharing.md"
TABLE = PAGE.read_text().partition("| resource ")[2].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_shared_resource_has_a_bound_and_tests_that_exist(row: list[str]) -> None:
    resource, bound, beyond, tests = row
    assert resource and bound and beyond
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", tests)
    assert named, f"{resource} names no test"
    for file, function in named:
        assert re.search(rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE), (
            f"{file} has no {function}"
        )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_setting_that_is_named_exists(row: list[str]) -> None:
    ours = {field.name for field in dataclasses.fields(ServerConfig)}
    engines = {f"engine.{field.name}" for field in dataclasses.fields(LocalEngineConfig)}
    named = set(re.findall(r"`([a-z_.]+)`", " ".join(row[:3])))
    assert named <= ours | engines, named - ours - engines


def test_no_resource_is_listed_twice() -> None:
    names = [row[0] for row in ROWS]
    assert names and len(names) == len(set(names))
