"""`tinsmith train sft`, killed and resumed: the curve is the one of a run that nobody disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import server_process
from tests.support.server_process import ServerProcess
from tinsmith.cli.training.plot import svg
from tinsmith.cli.training.supervised import METRICS_FILE, PLOT_FILE, RUN_FILE

if TYPE_CHECKING:
    from tests.cli.conftest import Run

STEPS = 12


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("slow")
    with server_process.serving(folder, "--set", "fake-pass-seconds=0.1") as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "talks.jsonl"
    lines = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(20)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def lines_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / METRICS_FILE
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def curve(folder: Path) -> list[tuple[int, float, float | None]]:
    return [(each["step"], each["loss"], each.get("eval_loss")) for each in lines_of(folder)]


def test_a_killed_run_goes_on_where_it_was(
    slow_server: ServerProcess, data: Path, byte_tokenizer: Path, run: Run, tmp_path: Path
) -> None:
    options = (
        *("train", "sft", str(data), "--tokenizer", str(byte_tokenizer), "--json"),
        *("--steps", str(STEPS), "--save-every", "3", "--eval-every", "4", "--batch-size", "4"),
        *("--learning-rate", "0.05"),
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = subprocess.Popen(
        [sys.executable, "-m", "tinsmith.cli", *options, "-o", str(broken)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=slow_server.environment,
    )
    deadline = time.monotonic() + 60
    while len(lines_of(broken)) < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert len(lines_of(broken)) < STEPS
    assert json.loads((broken / RUN_FILE).read_text())["progress"]["step"] in (3, 6)

    env = slow_server.environment
    resumed = run(*options, "-o", str(broken), "--resume", env=env)
    assert resumed.exit_code == 0, resumed.output
    assert run(*options, "-o", str(whole), env=env).exit_code == 0
    assert [step for step, _, _ in curve(broken)] == list(range(1, STEPS + 1))
    assert curve(broken) == curve(whole)
    assert curve(whole)[-1][1] < curve(whole)[0][1]
    assert [step for step, _, held_out in curve(whole) if held_out is not None] == [4, 8, 12]

    # Both curves are in the picture, the steps before the interruption too.
    pictures = [ElementTree.parse(folder / PLOT_FILE) for folder in (whole, broken)]
    drawn = [
        [each.get("points") for each in picture.iter("{http://www.w3.org/2000/svg}polyline")]
        for picture in pictures
    ]
    assert drawn[0] == drawn[1]
    assert [len(str(points).split()) for points in drawn[0]] == [3, STEPS, 3]

    # A finished run has nothing left to do, and says the same again.
    again = run(*options, "-o", str(broken), "--resume", env=env)
    assert json.loads(again.stdout) == json.loads(resumed.stdout)


def test_a_changed_file_is_another_run(
    run: Run, data: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    options = ("train", "sft", str(data), "--tokenizer", str(byte_tokenizer), "--steps", "2")
    assert run(*options, "-o", str(tmp_path / "run")).exit_code == 0
    data.write_text(data.read_text().replace('"0+1="', '"1+0="'))
    result = run(*options, "-o", str(tmp_path / "run"), "--resume")
    assert result.exit_code == 1
    assert "was another one (examples_digest was" in result.stderr


def test_a_picture_leaves_out_what_is_not_a_number() -> None:
    picture = svg({"a": [(1, 2.0), (2, float("nan")), (3, 1.0)]}, "a & b")
    assert "nan" not in picture
    assert ElementTree.fromstring(picture).tag.endswith("svg")
