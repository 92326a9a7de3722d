"""Curves in the terminal: `tinsmith run show`, and the runs of `tinsmith top`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.child import Child
from tinsmith.cli.server.runs import speed
from tinsmith.cli.training.plot import plot, sparkline
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.types import AdamParams, Datum, ModelInput
from tinsmith.types.observing import PostMetricsRequest, RunOperation
from tinsmith.wire import endpoints

if TYPE_CHECKING:
    from tests.cli.conftest import Run
    from tests.support.server_process import ServerProcess

NAME = "curved"


@pytest.fixture(scope="module")
def training(server: ServerProcess) -> Iterator[TrainingClient]:
    """A run of three steps, with a reward that its client posted."""
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        client = service.create_lora_training_client(
            "tinsmith/fake", rank=8, seed=1, user_metadata={"name": NAME}
        )
        for _ in range(3):
            learn(client)
        reward = PostMetricsRequest(step=7, metrics={"reward": 0.5})
        endpoint = endpoints.POST_RUN_METRICS.at(run_id=client.model_id)
        service.holder.submit(lambda: service.holder.api.send(endpoint, reward)).result()
        yield client


def learn(training: TrainingClient) -> None:
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.05)).result()


def show_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tinsmith.cli", "run", "show", NAME, "--follow", *arguments]


def test_a_run_is_drawn_once(training: TrainingClient, run: Run, run_json: Any) -> None:
    facts = run_json("run", "show", NAME)
    losses = facts["curve"]["mean"]
    assert len(losses) >= 3
    assert losses[-1] < losses[0]
    assert facts["tokens_per_second"] > 0
    shown = run("run", "show", NAME).stdout
    assert shown.startswith(f"{NAME} ({training.model_id})\ntinsmith/fake · Training · ")
    assert f"Loss per token: {losses[-1]:.4g} now, {losses[0]:.4g} at first; " in shown
    assert re.search(rf"^{losses[0]:.2f} ┤ ███", shown, re.MULTILINE)
    assert f"Operations {facts['curve']['x'][0]} to {facts['curve']['x'][-1]}\n" in shown


def test_what_a_client_posted_is_drawn_by_its_name(
    training: TrainingClient, run: Run, run_json: Any
) -> None:
    facts = run_json("run", "show", NAME, "--metric", "reward")
    assert (facts["curve"]["x"], facts["curve"]["mean"]) == ([7], [0.5])
    assert "Steps 7 to 7" in run("run", "show", NAME, "--metric", "reward").stdout
    unknown = run("run", "show", NAME, "--metric", "rewards")
    assert unknown.exit_code == 1
    assert "no metric called 'rewards'" in unknown.stderr
    assert "loss" in unknown.stderr and "reward" in unknown.stderr


def test_a_run_without_a_loss_says_so(server: ServerProcess, run: Run) -> None:
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        new = service.create_lora_training_client("tinsmith/fake", rank=8)
        shown = run("run", "show", new.model_id)
    assert shown.exit_code == 0, shown.output
    assert "Loss per token: no point yet" in shown.stdout


def test_a_pipe_follows_a_run_point_by_point(
    training: TrainingClient, server: ServerProcess, run_json: Any
) -> None:
    known = run_json("run", "show", NAME)["curve"]
    child = Child(show_command("--interval", "0.1", "--json"), env=server.environment)
    try:
        first = [json.loads(line) for line in child.out.take(len(known["x"]))]
        learn(training)
        later = json.loads(child.out.take(1)[0])
    finally:
        child.process.send_signal(signal.SIGINT)
    rest, errors = child.finish(30)
    assert [(p["seq"], p["loss"]) for p in first] == list(
        zip(known["x"], known["mean"], strict=True)
    )
    assert later["seq"] > first[-1]["seq"]
    assert later["loss"] < first[-1]["loss"]
    assert (rest, errors, child.process.returncode) == ("", "", 0)


def test_on_a_terminal_the_curve_grows_until_ctrl_c(
    training: TrainingClient, server: ServerProcess
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        show_command("--interval", "0.1"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=server.environment | {"TERM": "xterm"},
    )
    os.close(theirs)
    shown = ""

    def last_operation(after: int) -> int:
        """Of the first drawing that goes beyond an operation."""
        nonlocal shown
        while True:
            found = [int(number) for number in re.findall(r"Operations \d+ to (\d+)\r", shown)]
            if found and found[-1] > after:
                return found[-1]
            shown += os.read(ours, 4096).decode(errors="replace")

    try:
        before = last_operation(0)
        learn(training)
        last_operation(before)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert "Aborted" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_shows_runs_with_their_curves(
    training: TrainingClient, run: Run, run_json: Any
) -> None:
    learn(training)
    facts = run_json("top", "--interval", "0.1")
    mine = next(each for each in facts["runs"] if each["run"] == training.model_id)
    assert mine["losses"][-1] < mine["losses"][0]
    assert (mine["name"], mine["status"], mine["waiting"]) == (NAME, "Training", 0)
    shown = run("top", "--interval", "0.1").stdout
    assert "Trained tokens per second" in shown
    line = re.search(rf"^{NAME} +Training +(█\S*) +([\d.e-]+) +[\d,]+ +0$", shown, re.MULTILINE)
    assert line is not None, shown
    assert (line[1][-1], line[2]) == ("▁", f"{mine['losses'][-1]:.4g}")
    alone = run("top", "--interval", "0.1", "--runs", "0").stdout
    assert "Trained tokens per second" in alone
    assert NAME not in alone


def test_in_top_keys_choose_a_run_draw_its_curve_and_quit(
    training: TrainingClient, server: ServerProcess
) -> None:
    learn(training)  # the last request of all: its run comes first
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "tinsmith.cli", "top", "--interval", "0.5"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=server.environment | {"TERM": "xterm"},
    )
    shown = ""

    def until(sign: str) -> None:
        """Read on to the end of a view that shows the sign."""
        nonlocal shown
        while not re.search(rf"{sign}(?:(?!q quits).)*q quits", shown, re.DOTALL):
            assert process.poll() is None, shown
            shown += os.read(ours, 4096).decode(errors="replace")
        shown = ""

    try:
        until(f"▸ {NAME}")
        os.write(ours, b"\r")
        until(rf"{training.model_id}.*Loss per token: .*Operations \d+ to \d+")
        os.write(ours, b"\x1b")
        until(f"▸ {NAME}")
        os.write(ours, b"q")
        while process.poll() is None:
            # What it shows meanwhile has to go somewhere.
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 4096)
        assert process.returncode == 0
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


def test_top_without_a_good_key_shows_the_server_and_says_why_no_runs(
    run: Run, run_json: Any
) -> None:
    bad = {"TINKER_API_KEY": "tml-nobody"}
    result = run("top", "--interval", "0.1", env=bad)
    assert result.exit_code == 0, result.output
    assert re.search("^Engine +up", result.stdout, re.MULTILINE)
    assert "Your runs are not shown: " in result.stderr
    assert "key" in result.stderr
    facts = run_json("top", "--interval", "0.1", env=bad)
    assert facts["runs"] is None
    assert "key" in facts["no_runs_because"]


def test_values_below_zero_are_drawn_from_the_smallest() -> None:
    assert plot([1.0, -1.0, 0.0], height=2).splitlines() == [
        " 1.00 ┤ ███",
        "      │ ███   ███",
        "-1.00 ┼──────────",
    ]
    assert plot([2e-4], height=1).splitlines()[0] == "2.0e-04 ┤ ███"


def test_a_sparkline_has_a_gap_for_what_is_not_finite() -> None:
    assert sparkline([2.0, float("nan"), 1.0]) == "█ ▁"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == ""


def test_speed_counts_what_was_computed_lately() -> None:
    def operation(ended: float, tokens: int) -> RunOperation:
        return RunOperation(
            seq=1,
            kind="forward_backward",
            status="done",
            submitted=ended - 9,
            started=ended - 2,
            ended=ended,
            tokens=tokens,
        )

    assert speed([operation(1000, 300), operation(1000, 0), operation(900, 9999)], 1001) == 75
    assert speed([operation(900, 300)], 1001) is None
