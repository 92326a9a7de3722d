"""What all runs of `tinsmith train` have: settings, few checkpoints, an early end, a report."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.cli.training.run_folder import RUN_FILE, RunFolder
from tinsmith.cli.training.schedule import learning_rate

if TYPE_CHECKING:
    from tests.cli.conftest import Run
    from tests.support.server_process import ServerProcess


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(10)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture
def options(byte_tokenizer: Path) -> tuple[str, ...]:
    return ("--tokenizer", str(byte_tokenizer), "--samples", "0", "--batch-size", "2")


# --- settings ---------------------------------------------------------------------------------


def test_a_settings_file_says_everything_and_options_say_it_otherwise(
    run_json: Any, data: Path, byte_tokenizer: Path
) -> None:
    config = data.with_name("config.toml")
    config.write_text(
        f'data = "{data.name}"\ntokenizer = "{byte_tokenizer}"\nname = "my-sums"\n'
        'batch-size = 2\nlearning_rate = 1e-3\nsteps = 5\nschedule = "cosine"\n'
    )
    facts = run_json("train", "sft", str(config), "--steps", "3")
    folder = RunFolder.open(Path(facts["folder"]))
    assert folder.path == data.parent / "my-sums"
    assert (folder.settings.steps, folder.settings.batch_size) == (3, 2)
    assert folder.settings.schedule == "cosine"
    assert folder.settings.data == str(data), "relative to the file that names it"
    rates = [line["learning_rate"] for line in folder.metrics()]
    assert rates == pytest.approx(
        [learning_rate(1e-3, step, 3, 1, "cosine") for step in range(3)], rel=1e-5
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("bacth_size = 2", "Did you mean 'batch_size'?"),
        ("batch_size = 0", "batch_size: 0 is not in the range"),
        ('batch_size = "2"', "batch_size: expected int, got '2'"),
        ("learning_rate = true", "learning_rate: expected float, got True"),
        ('log = "wandb"', "log: expected a list"),
        ('schedule = "square"', "schedule: 'square' is not one of"),
        ("batch_size =", "is not TOML"),
    ],
)
def test_a_mistake_in_a_settings_file_names_the_file_and_the_key(
    run: Run, tmp_path: Path, line: str, complaint: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"{line}\n")
    refused = run("train", "sft", str(config))
    assert refused.exit_code == 1
    assert complaint in refused.stderr and str(config) in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("train", "sft"), "Give data to train on"),
        (("train", "sft", "a.jsonl", "--data", "b.jsonl"), "Give the data once"),
        (("train", "sft", "missing.jsonl"), "no such file: missing.jsonl"),
        (("train", "rl", "a.jsonl"), "give a reward"),
        (("train", "distill", "a.jsonl"), "needs a teacher"),
    ],
)
def test_what_is_missing_is_said(
    run: Run,
    byte_tokenizer: Path,
    arguments: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    refused = run(*arguments, "--tokenizer", str(byte_tokenizer))
    assert refused.exit_code == 1
    assert complaint in refused.stderr


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_a_schedule_rises_to_the_peak_and_never_above_it(schedule: str) -> None:
    rates = [learning_rate(1.0, step, 20, 4, schedule) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[3:]))
    assert all(rate > 0 for rate in rates)
    assert (rates[-1] == 1.0) is (schedule == "constant")


# --- checkpoints and evaluations --------------------------------------------------------------


def names(run_json: Any, facts: dict[str, Any]) -> set[str]:
    """The checkpoints that a run has left on the server."""
    run_id = facts["checkpoint"].split("/")[2]
    listed = run_json("checkpoint", "list", "--run-id", run_id)["checkpoints"]
    return {each["checkpoint_id"] for each in listed}


def test_few_checkpoints_are_kept(run_json: Any, data: Path, options: tuple[str, ...]) -> None:
    """All of them were."""
    facts = run_json(
        *("train", "sft", str(data), *options, "--steps", "8", "--learning-rate", "0.05"),
        *("--save-every", "1", "--eval-every", "1", "--keep", "2"),
    )
    best = f"best-{facts['best_step']:06d}"
    assert names(run_json, facts) == {
        *("weights/step-000007", "weights/final"),
        *("sampler_weights/final", f"sampler_weights/{best}"),
    }


def test_checkpoints_end_when_the_user_said_they_would(
    run_json: Any, data: Path, options: tuple[str, ...]
) -> None:
    facts = run_json("train", "sft", str(data), *options, "--steps", "1", "--ttl-hours", "2")
    for path in (facts["checkpoint"], facts["sampler_checkpoint"], facts["best_checkpoint"]):
        assert run_json("checkpoint", "info", path)["expires_at"] is not None


def test_a_run_ends_when_evaluations_no_longer_get_better(
    run_json: Any, data: Path, options: tuple[str, ...]
) -> None:
    """At this learning rate it learns its three examples by heart and loses all others."""
    other = data.with_name("other.jsonl")
    other.write_text(json.dumps({"prompt": "0+1=", "completion": "zzz"}))
    facts = run_json(
        *("train", "sft", str(data), *options, "--steps", "30", "--learning-rate", "0.2"),
        *("--validation", str(other), "--eval-every", "1", "--patience", "3"),
    )
    lines = RunFolder.open(Path(facts["folder"])).metrics()
    losses = [line["eval_loss"] for line in lines]
    assert facts["steps"] == len(lines) < 30
    assert losses.index(min(losses)) == len(losses) - 4
    assert facts["best_step"] == len(losses) - 3
    assert facts["held_out"] == 1 and facts["examples"] == 10


def test_the_run_s_name_is_with_it_on_the_server(
    run_json: Any, data: Path, options: tuple[str, ...]
) -> None:
    facts = run_json("train", "sft", str(data), *options, "--steps", "1", "--name", "first-try")
    assert facts["folder"] == str(data.with_name("first-try"))
    shown = run_json("run", "info", facts["checkpoint"].split("/")[2])
    assert "first-try" in json.dumps(shown)


# --- what is shown ----------------------------------------------------------------------------


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_report_has_curves_samples_and_the_commands_to_go_on(
    run_json: Any, data: Path, byte_tokenizer: Path
) -> None:
    facts = run_json(
        *("train", "sft", str(data), "--tokenizer", str(byte_tokenizer), "--steps", "2"),
        *("--samples", "2", "--sample-tokens", "6", "--name", "a<b"),
    )
    folder = RunFolder.open(Path(facts["folder"]))
    samples = folder.samples()
    assert {name: len(texts) for name, texts in samples.items()} == {
        "prompt": 2,
        "before": 2,
        "after": 2,
    }
    assert samples["prompt"][0].endswith("+1=")
    markdown = (folder.path / "report.md").read_text("utf-8")
    assert "![loss.svg](loss.svg)" in markdown and (folder.path / "loss.svg").exists()
    page = _Texts()
    page.feed((folder.path / "report.html").read_text("utf-8"))
    assert page.open == []
    shown = "".join(page.texts)
    for text in ("a<b", samples["prompt"][1], f"tinsmith chat {facts['best_checkpoint']}"):
        assert text in shown
    assert "Loss per token" in shown and f"--from {facts['checkpoint']}" in shown


def test_a_curve_grows_on_a_terminal(
    server: ServerProcess, data: Path, options: tuple[str, ...]
) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "tinsmith.cli", "train", "sft", str(data), "--steps", "2"]
    environment = server.environment | {"COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=child, env=environment
    )
    os.close(child)
    shown = b""
    try:
        while piece := os.read(parent, 65536):
            shown += piece
    except OSError:  # a terminal whose other end is closed
        pass
    os.close(parent)
    assert process.wait(timeout=60) == 0, shown.decode()
    text = shown.decode()
    assert "Loss per token" in text and "█" in text
    assert "step 2/2: loss " in text
    link = rf"watch it at {server.url}/training_runs/[-0-9a-f]{{36}}:train:0\s"
    assert re.search(link, text), "whole, though it is longer than a line"


def test_metrics_go_to_a_tracker_and_none_is_taken_for_granted(
    run: Run,
    run_json: Any,
    data: Path,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
        refused = run("train", "sft", str(data), *options, "--log", name)
        assert refused.exit_code == 1
        assert f"pip install {name}" in refused.stderr
        monkeypatch.delitem(sys.modules, name)
    assert not (tmp_path / "sums-sft" / RUN_FILE).exists(), "nothing has begun"
    (tmp_path / "trackio.py").write_text(
        "calls = []\n"
        "def init(**about): calls.append(about)\n"
        "def log(values, step): calls.append((step, values)); print('logged')\n"
        "def finish(): calls.append('end')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run_json("train", "sft", str(data), *options, "--steps", "2", "--log", "trackio")
    first, *steps, last = sys.modules.pop("trackio").calls  # type: ignore[attr-defined]  # above
    assert (first["project"], first["name"], last) == ("tinsmith", "sums-sft", "end")
    assert first["config"]["steps"] == 2
    assert [step for step, _ in steps] == [1, 2]
    assert "loss" in steps[0][1] and "step" not in steps[0][1]
