"""The loop in docs/how-to/resume-after-failure.md runs, and survives what the page says it does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import recording_proxy

if TYPE_CHECKING:
    from tests.examples.conftest import Server

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "how-to" / "resume-after-failure.md"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "loop.py"
    path.write_text(block)
    return path


def start(program: Path, folder: Path, url: str, key: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-u", str(program)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": key},
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return out


def losses(output: str) -> list[tuple[int, str]]:
    return [(int(step), loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)]


@pytest.fixture
def breaking_proxy(server: Server) -> Iterator[Callable[[int], str]]:
    """A way to the server on which the n-th step's result is a terminal failure."""
    made = []

    def make(bad: int) -> str:
        steps = 0

        def change(path: str, body: bytes) -> bytes:
            nonlocal steps
            if path.endswith("/retrieve_future") and b'"metrics"' in body and body[:1] == b"{":
                steps += 1
                if steps == bad:
                    return json.dumps({"error": "engine lost", "category": "server"}).encode()
            return body

        made.append(recording_proxy.RecordingProxy(server.url, change))
        url: str = made[-1].url
        return url

    yield make
    for proxy in made:
        proxy.close()


@pytest.mark.slow
def test_the_loop_survives_a_failed_step_and_a_killed_process(
    server: Server, program: Path, tmp_path: Path, breaking_proxy: Callable[[int], str]
) -> None:
    """S45, S117: three runs, one undisturbed, with the same losses in the end."""
    plain = losses(finish(start(program, tmp_path / "plain", server.url, server.key)))
    assert [step for step, _ in plain] == list(range(20))

    broken = finish(start(program, tmp_path / "broken", breaking_proxy(8), server.key))
    assert "failed (OptimStep failed: engine lost" in broken and "on from step 5" in broken
    assert [step for step, _ in losses(broken)] == [*range(7), *range(5, 20)]
    assert dict(losses(broken)) == dict(plain)

    killed = start(program, tmp_path / "killed", server.url, server.key)
    assert killed.stdout is not None
    seen = ""
    for line in killed.stdout:
        seen += line
        if line.startswith("step 12"):
            killed.kill()
            break
    killed.communicate()
    again = losses(finish(start(program, tmp_path / "killed", server.url, server.key)))
    assert [step for step, _ in again] == list(range(10, 20))
    assert dict(losses(seen)) | dict(again) == dict(plain)
