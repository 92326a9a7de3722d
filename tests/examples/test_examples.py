"""Every script in examples/ runs for a step or two against a real server on the fake engine.

S45: examples follow one style and run.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.child import ended_well

if TYPE_CHECKING:
    from tests.examples.conftest import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
# It changes what `import tinker` means, so it gets a process of its own.
APART = "use_existing_tinker_code.py"
SMALL = {"rl_arithmetic.py": ["--problems", "2", "--group", "3"]}


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.fixture
def run_example(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):  # type: ignore[no-untyped-def]
    def run(name: str, *options: str) -> str:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", server.key)
        arguments = ["--model", server.model, *SMALL.get(name, []), *options]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_in_the_list_below() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    tested = set(re.findall(r'run_example\("(\w+\.py)"', Path(__file__).read_text("utf-8")))
    assert scripts == tested | {APART}
    listed = set(re.findall(r"`(\w+\.py)`", (EXAMPLES / "README.md").read_text("utf-8")))
    assert listed == scripts


def test_supervised_fine_tuning(run_example) -> None:  # type: ignore[no-untyped-def]
    losses = numbers(r"loss ([\d.]+)", run_example("sft.py", "--steps", "3"))
    assert losses[-1] < losses[0]


def test_reinforcement_learning(run_example) -> None:  # type: ignore[no-untyped-def]
    rewards = numbers(r"mean reward ([\d.]+)", run_example("rl_arithmetic.py", "--steps", "2"))
    assert len(rewards) == 2


def test_preferences(run_example) -> None:  # type: ignore[no-untyped-def]
    """S81"""
    losses = numbers(r"loss ([\d.]+)", run_example("dpo.py", "--steps", "3"))
    assert losses[-1] < losses[0]


def test_distillation(run_example) -> None:  # type: ignore[no-untyped-def]
    losses = numbers(r"loss ([\d.]+)", run_example("distill.py", "--steps", "3"))
    assert losses[-1] < losses[0]


def test_resuming_has_the_same_curve(run_example) -> None:  # type: ignore[no-untyped-def]
    output = run_example("resume.py", "--steps", "4")
    assert output.count("without a break") == 4
    assert numbers(r"largest difference: ([\d.e-]+)", output) == [0.0]


def test_many_tenants(run_example) -> None:  # type: ignore[no-untyped-def]
    output = run_example("many_tenants.py", "--steps", "1")
    losses, speeds = output.splitlines()
    assert len(losses.removeprefix("losses:").split()) == 8
    assert "together:" in speeds


def test_sampling_with_asyncio(run_example) -> None:  # type: ignore[no-untyped-def]
    assert "4 samples in" in run_example("sample_async.py", "--steps", "4")


@pytest.mark.parametrize("client", ["tinker", "tinsmith"])
def test_existing_code_runs_on_both_clients(client: str, server: Server) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / APART)),
            *("--model", server.model, "--steps", "2", "--client", client),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key},
        check=False,
    )
    assert ended_well(done.returncode, done.stderr), done.stderr
    losses = numbers(r"loss ([\d.]+)", done.stdout)
    assert losses[1] < losses[0]
    assert done.stdout.splitlines()[-1] == f"client: {client}"
