"""The walks of docs/architecture.md against what really happens.

Four calls are traced through client, server and local engine, all in one process. A walk names
modules, and folders for all modules in them. It must name every one that is entered and none that
is not, except that what a step names which begins with "At times" need not be entered. In each part
(client, server, engine) first visits come in its order, except for such steps and those that begin
with "Meanwhile". When modules move, change the page and nothing here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the walks go through the local engine")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ASIDE = ("types/", "errors.py", "memory.py", "disk.py", "server/metrics.py",
         "server/serving.py", "server/service.py", "server/tracing.py", "server/owners.py",
         "engine/local/memory_plan.py", "engine/local/device_memory.py")  # fmt: skip
"""The vocabulary, and what runs beside every request: counting, housekeeping."""

HEADINGS = {
    "forward_backward": "## One request, end to end",
    "sample": "## A sample",
    "save": "## From training to sampling",
    "rebuild": "## After an engine's death",
}


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    from chaos import tiny_model

    folder = tmp_path_factory.mktemp("walks")
    (folder / "model").mkdir()
    tiny_model.build(folder / "model")
    command = [sys.executable, "-m", "tests.support.walks", folder / "data", folder / "model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _steps(heading: str) -> list[str]:
    section = PAGE.split(heading + "\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, re.MULTILINE)


def _names(step: str) -> list[str]:
    return re.findall(r"`([a-z_/]+(?:\.py|/))`", step)


def _is_in(module: str, name: str) -> bool:
    return module == name or (name.endswith("/") and module.startswith(name))


@pytest.mark.slow
@pytest.mark.parametrize("walk", HEADINGS)
def test_a_walk_names_every_hop_in_order(walks: dict[str, list[str]], walk: str) -> None:
    visited = [m for m in walks[walk] if not m.startswith(ASIDE)]
    steps = _steps(HEADINGS[walk])
    named = [name for step in steps for name in _names(step)]
    missing = [m for m in visited if not any(_is_in(m, name) for name in named)]
    assert not missing, "hops that the page does not name"
    certain = [name for step in steps if not step.startswith("At times") for name in _names(step)]
    idle = [name for name in certain if not any(_is_in(m, name) for m in visited)]
    assert not idle, "hops that are named but not made"
    for part in ("client/", "server/", "engine/"):
        ordered = [
            name
            for step in steps
            if not step.startswith(("Meanwhile", "At times"))
            for name in _names(step)
            if name.startswith(part)
        ]
        first = [min(visited.index(m) for m in visited if _is_in(m, name)) for name in ordered]
        assert first == sorted(first), dict(zip(ordered, first, strict=True))


@pytest.mark.slow
def test_the_first_walk_enters_no_more_modules_than_the_page_says(
    walks: dict[str, list[str]],
) -> None:
    said = re.search(r"(\d+) modules in (\d+) places", PAGE)
    assert said is not None
    visited = [m for m in walks["forward_backward"] if not m.startswith(ASIDE)]
    assert len(visited) <= int(said[1])
    assert _num_places() == int(said[2])


def test_the_first_walk_can_be_held_in_mind() -> None:
    assert _num_places() <= 28


def _num_places() -> int:
    """Names on the page; a folder is one, whatever is entered in it."""
    return len([n for step in _steps(HEADINGS["forward_backward"]) for n in _names(step)])
