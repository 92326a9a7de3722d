"""`tinsmith train --log`, with the libraries themselves; a child each, for they keep threads."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.cli.training.run_folder import RunFolder

if TYPE_CHECKING:
    from tests.support.server_process import ServerProcess

Logged = Callable[..., RunFolder]
"""(tracker, steps, is_resumed) -> the run, which may have been resumed once after its end."""


@pytest.fixture
def logged(server: ServerProcess, byte_tokenizer: Path, tmp_path: Path) -> Logged:
    environment = server.environment | {
        "HOME": str(tmp_path),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }

    def command(*arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "tinsmith.cli", "--json", "train", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # and nothing else is there

    def logged(tracker: str, num_steps: int, *, is_resumed: bool = False) -> RunFolder:
        data = tmp_path / "sums.jsonl"
        sums = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(8)]
        data.write_text("\n".join(map(json.dumps, sums)))
        facts = command(
            *("sft", str(data), "--tokenizer", str(byte_tokenizer), "--samples", "0"),
            *("--steps", str(num_steps), "--batch-size", "2", "--log", tracker),
        )
        if is_resumed:
            assert command("--resume", facts["folder"]) == facts
        return RunFolder.open(Path(facts["folder"]))

    return logged


@pytest.mark.slow
def test_tensorboard_reads_the_curves(logged: Logged) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    run = logged("tensorboard", 3)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    points = [
        (each.step, float(tensor_util.make_ndarray(each.tensor_proto)))
        for each in events.Tensors("loss")
    ]
    assert [step for step, _ in points] == [1, 2, 3]
    assert [loss for _, loss in points] == pytest.approx(
        [line["loss"] for line in run.metrics()], rel=1e-6
    )


@pytest.mark.slow
def test_trackio_has_one_run_also_when_it_was_resumed(logged: Logged, tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="needs trackio, which is not among the test packages")
    run = logged("trackio", 2, is_resumed=True)
    (file,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("SELECT run_id, run_name, step, metrics FROM metrics")
    runs, names, steps, metrics = zip(*rows, strict=True)
    assert (len(set(runs)), set(names), steps) == (1, {"sums-sft"}, (1, 2))
    assert [json.loads(each)["loss"] for each in metrics] == [
        line["loss"] for line in run.metrics()
    ]


@pytest.mark.slow
def test_weights_and_biases_has_one_run_also_when_it_was_resumed(
    logged: Logged, tmp_path: Path
) -> None:
    pytest.importorskip("wandb", reason="needs wandb, which is not among the test packages")
    run = logged("wandb", 2, is_resumed=True)
    begun, resumed = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert begun.name == resumed.name, "its id"
    kept = begun.read_bytes()
    for line in run.metrics():
        assert f"{line['loss']}".encode() in kept
