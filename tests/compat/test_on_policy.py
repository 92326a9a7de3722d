"""Sampler and trainer of a server that promises it agree in every bit, for the official client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server_process import serving

pytest.importorskip("torch", reason="the local engine needs torch")
pytestmark = pytest.mark.slow


def test_kl_between_sampler_and_trainer_is_zero_at_every_step(tmp_path: Path) -> None:
    """Each step has other weights than the one before, and batches of many lengths."""
    from tests.engine.conftest import build_reference, save_tokenizer

    model = tmp_path / "model"
    build_reference("qwen3").save_pretrained(model)
    save_tokenizer(model)
    options = ("--engine", "local", "--device", "cpu", "--on-policy", "exact")
    with serving(tmp_path, *options, "--model", f"tiny={model}") as server:
        lines = server.run("on_policy.py").splitlines()
    assert [[float.fromhex(part) for part in line.split()] for line in lines] == [[0.0, 1.0]] * 3
