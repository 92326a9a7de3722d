"""`tinsmith train` and `eval` on the real small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import server_process
from tinsmith.cli.__main__ import cli
from tinsmith.cli.training.persona import LESSONS
from tinsmith.cli.training.run_folder import RunFolder

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


def test_the_real_model_learns_a_style_without_code(tmp_path: Path) -> None:
    data = tmp_path / "pirate.jsonl"
    data.write_text("\n".join(json.dumps({"messages": lesson}) for lesson in LESSONS))
    options = ("--engine", "local", "--device", "cpu")
    with server_process.serving(tmp_path, *options) as server:

        def run(*arguments: str) -> dict[str, object]:
            done = CliRunner().invoke(cli, ["--json", *arguments], env=server.environment)
            assert done.exit_code == 0, done.output
            return dict(json.loads(done.stdout))

        facts = run(
            *("train", "sft", str(data), "--steps", "5", "--batch-size", "4", "--eval-every", "5"),
            *("--learning-rate", "1e-3", "--samples", "1", "--sample-tokens", "8"),
        )
        scores = run(
            *("eval", str(facts["sampler_checkpoint"]), str(data), "--limit", "2"),
            *("--check", "regex:^Arr", "--max-tokens", "4"),
        )
    folder = RunFolder.open(Path(str(facts["folder"])))
    losses = [line["loss"] for line in folder.metrics()]
    assert losses[-1] < losses[0] - 0.3
    assert folder.samples()["before"] != folder.samples()["after"]
    assert scores["prompts"] == 2
