"""The README's program runs, and its links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.examples.conftest import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_training_loop_runs_as_written(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S45, S117"""
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    (tmp_path / "loop.py").write_text(block)
    runpy.run_path(str(tmp_path / "loop.py"))
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[:5]]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "examples/README.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_links_lead_somewhere(document: str) -> None:
    """S116"""
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"
