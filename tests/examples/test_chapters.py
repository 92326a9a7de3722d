"""The cookbook's chapters in ten lines each: every one runs against a server on the fake engine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.examples.conftest import Server

FOLDER = Path(__file__).parents[2] / "examples" / "chapters"
SHARED = "datums.py"
LEARNS = {"supervised.py", "preference.py", "prompt_distillation.py"}
"""Those whose loss falls whatever is sampled."""

CHAPTERS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != SHARED)


@pytest.fixture(scope="module")
def printed(server: Server) -> dict[str, str]:
    """What each has printed; all run at the same time."""
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    running = {
        name: subprocess.Popen(
            [sys.executable, str(FOLDER / name), "--model", server.model, "--steps", "3"],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in CHAPTERS
    }
    outputs = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=300)
        outputs[name] = out if process.returncode == 0 else f"failed: {err}"
    return outputs


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_runs_and_learns(printed: dict[str, str], name: str) -> None:
    found = [float(value) for value in re.findall(r"^step \d: .* (-?[\d.]+)$", printed[name], re.M)]
    assert len(found) == 3, printed[name]
    assert name not in LEARNS or found[-1] < found[0]


def test_every_chapter_is_listed_and_short() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", (FOLDER / "README.md").read_text("utf-8"), re.M)
    assert sorted(listed) == CHAPTERS
    for name in CHAPTERS:
        body = ast.parse((FOLDER / name).read_text("utf-8")).body
        loop = [node for node in body if isinstance(node, ast.For)]
        statements = [node for node in ast.walk(loop[0]) if isinstance(node, ast.stmt)]
        assert len(loop) == 1 and len(statements) <= 12, name
