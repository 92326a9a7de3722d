"""`tinsmith train sft`, killed and resumed: the curve is the one of a run that nobody disturbed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.cli.training.plot import plot, svg
from tinsmith.cli.training.run_folder import METRICS_FILE, RUN_FILE

if TYPE_CHECKING:
    from tests.cli.conftest import Run
    from tests.support.server_process import ServerProcess

STEPS = 12
CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho!"}]


HELD = """
import runpy, sys
from tinsmith.cli.training.run_folder import RunFolder

last, add = int(sys.argv.pop(1)), RunFolder.add_metrics

def add_and_wait(folder, line):
    add(folder, line)
    if line["step"] == last:
        print("there", flush=True)
        sys.stdin.readline()

RunFolder.add_metrics = add_and_wait
runpy.run_module("tinsmith.cli", run_name="__main__", alter_sys=True)
"""
"""The command, which waits for a line once it has taken a step."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "talks.jsonl"
    lines: list[dict[str, Any]] = [{"messages": CHAT}] * 7
    lines += [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(13)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def lines_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / METRICS_FILE
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def curve(folder: Path) -> list[tuple[int, float, float | None]]:
    return [(each["step"], each["loss"], each.get("eval_loss")) for each in lines_of(folder)]


def begun(server: ServerProcess, *arguments: str, until: int) -> subprocess.Popen[str]:
    """A run in a process of its own, that has taken so many steps and waits for a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, str(until), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=server.environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n", process.communicate()
    return process


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(
    server: ServerProcess, data: Path, byte_tokenizer: Path, run: Run, tmp_path: Path
) -> None:
    options = (
        *("train", "sft", str(data), "--tokenizer", str(byte_tokenizer), "--json"),
        *("--steps", str(STEPS), "--save-every", "3", "--eval-every", "4", "--batch-size", "4"),
        *("--learning-rate", "0.05", "--samples", "0"),
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = begun(server, *options, "-o", str(broken), until=5)
    process.kill()
    process.communicate()
    assert len(lines_of(broken)) == 5
    assert json.loads((broken / RUN_FILE).read_text())["progress"]["step"] == 3

    resumed = run("--json", "train", "--resume", str(broken))
    assert resumed.exit_code == 0, resumed.output
    assert run(*options, "-o", str(whole)).exit_code == 0
    assert [step for step, _, _ in curve(broken)] == list(range(1, STEPS + 1))
    assert curve(broken) == curve(whole)
    assert curve(whole)[-1][1] < curve(whole)[0][1]
    assert [step for step, _, held_out in curve(whole) if held_out is not None] == [4, 8, 12]

    # Both curves are in the picture, the steps before the interruption too.
    pictures = [ElementTree.parse(folder / "loss.svg") for folder in (whole, broken)]
    drawn = [
        [each.get("points") for each in picture.iter("{http://www.w3.org/2000/svg}polyline")]
        for picture in pictures
    ]
    assert drawn[0] == drawn[1]
    assert [len(str(points).split()) for points in drawn[0]] == [3, STEPS, 3]

    # A finished run has nothing left to do, and says the same again.
    again = run("--json", "train", "--resume", str(broken))
    assert json.loads(again.stdout) == json.loads(resumed.stdout)


def test_an_interrupted_run_saves_what_it_has_and_says_how_to_go_on(
    server: ServerProcess, data: Path, byte_tokenizer: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = begun(
        server,
        *("train", "sft", str(data), "--tokenizer", str(byte_tokenizer), "--samples", "0"),
        *("--steps", str(STEPS), "--held-out", "0", "-o", str(folder)),
        until=2,
    )
    process.send_signal(signal.SIGINT)
    _, told = process.communicate("\n", timeout=120)
    assert process.returncode == 130, told
    assert f"tinsmith train --resume {folder}" in told
    saved = json.loads((folder / RUN_FILE).read_text())["progress"]["step"]
    assert saved == len(lines_of(folder)) == 2, "no step has to be taken again"
    assert run("train", "--resume", str(folder)).exit_code == 0
    assert [line["step"] for line in lines_of(folder)] == list(range(1, STEPS + 1))


def test_training_on_a_file_learns_saves_and_reports(
    run: Run, run_json: Any, data: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    options = ("--tokenizer", str(byte_tokenizer), "--learning-rate", "0.05", "--batch-size", "3")
    folder = tmp_path / "run"
    facts = run_json("train", "sft", str(data), "--steps", "6", *options, "-o", str(folder))
    assert (facts["examples"], facts["held_out"], facts["steps"]) == (18, 2, 6)
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["eval_loss"] == facts["eval_loss"]
    assert all(len(str(line["loss"])) <= 8 for line in lines), "sixteen digits say nothing"
    assert run("checkpoint", "info", facts["checkpoint"]).exit_code == 0
    assert run("sample", facts["sampler_checkpoint"], "x", *options[:2]).exit_code == 0
    again = run("train", "sft", str(data), *options, "-o", str(folder))
    assert again.exit_code == 1
    assert "has a run in it" in again.stderr and f"--resume {folder}" in again.stderr
    table = run("train", "sft", str(data), "--epochs", "0.5", *options)
    assert table.exit_code == 0, table.output
    assert (data.parent / "talks-sft" / RUN_FILE).exists()
    assert "sampler_checkpoint" in table.stdout
    assert "Loss per token" in table.stdout
    assert "tinsmith chat tinker://" in table.stderr


def test_a_run_whose_data_has_changed_is_not_resumed(
    run: Run, data: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    options = ("train", "sft", str(data), "--tokenizer", str(byte_tokenizer), "--steps", "2")
    assert run(*options, "-o", str(tmp_path / "run")).exit_code == 0
    data.write_text(data.read_text().replace('"0+1="', '"1+0="'))
    result = run("train", "--resume", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert "has changed since it began" in result.stderr and str(data) in result.stderr


def test_a_folder_without_a_run_cannot_be_resumed(run: Run, tmp_path: Path) -> None:
    refused = run("train", "--resume", str(tmp_path))
    assert refused.exit_code == 1
    assert "there is no run in" in refused.stderr


def test_long_examples_are_counted_and_left_out(
    run: Run, run_json: Any, byte_tokenizer: Path, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    lines = [{"prompt": "a", "completion": "b" * size} for size in (1, 2, 50)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    options = ("--tokenizer", str(byte_tokenizer), "--max-length", "10", "--steps", "1")
    facts = run_json("train", "sft", str(file), *options)
    assert (facts["examples"], facts["held_out"], facts["left_out"]) == (1, 1, 1)
    nothing = run("train", "sft", str(file), *options[:2], "--max-length", "2", "-o", "x")
    assert nothing.exit_code == 1 and "at most 2 tokens" in nothing.stderr


def test_a_picture_leaves_out_what_is_not_a_number_and_goes_below_zero() -> None:
    picture = svg({"a": [(1, 2.0), (2, float("nan")), (3, -1.0)]}, "a & b")
    assert "nan" not in picture
    assert ">-1<" in picture
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert plot([-1.0, 1.0], height=2).splitlines()[-1].startswith("-1.00 ┼")
