"""The official client, unmodified, in its own process, against our server in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.child import ended_well

if TYPE_CHECKING:
    from tests.support.server_process import ServerProcess, StartServer


def test_the_newest_release_trains_saves_samples_and_resumes(start_server: StartServer) -> None:
    """S33, S34, S47, S95: chunked passes, steps, weights for sampling, saving and loading."""
    server = start_server()
    assert server.run("train_and_sample.py").strip() == "ok"
    assert server.stop() == 0


@pytest.mark.slow
def test_the_rest_client_sees_runs_checkpoints_sessions_and_usage(
    start_server: StartServer,
) -> None:
    server = start_server()
    assert server.run("rest.py").strip() == "ok"


@pytest.mark.slow
def test_every_asynchronous_twin_gives_what_its_sibling_gives(start_server: StartServer) -> None:
    """S44"""
    assert start_server().run("async_twins.py").strip() == "ok"


def test_a_small_reinforcement_learning_loop_raises_its_reward(server: ServerProcess) -> None:
    assert server.run("small_rl.py").strip() == "ok"


@pytest.mark.slow
def test_clones_handles_rich_samples_and_custom_losses_work(start_server: StartServer) -> None:
    """S57, S74, S81."""
    server = start_server("--set", "fake_token_seconds=0.001")
    assert server.run("samplers.py").strip() == "ok"


@pytest.mark.slow
def test_mistakes_are_answered_promptly_and_by_name(start_server: StartServer) -> None:
    server = start_server("--set", "custom_loss_server_side=true")
    assert server.run("mistakes.py").strip() == "ok"


FLIPPED = {
    "pjwt_auth_enabled": "true",
    "parallel_fwdbwd_chunks": "false",
    "proto_compress_fwdbwd": "true",
    "create_model_via_load_weights": "false",
    "sample_use_retrieve_futures": "true",
    "sample_join_sampling_session": "false",
    "sample_cancel_enabled": "false",
    "metadata_only_bytes": "100",
}


@pytest.mark.slow
def test_every_feature_flag_works_the_other_way_too(start_server: StartServer) -> None:
    options = [text for k, v in FLIPPED.items() for text in ("--set", f"{k}={v}")]
    server = start_server(*options, "--set", "fake_token_seconds=0.001")
    assert server.run("train_and_sample.py", "jwt").strip() == "ok"
    assert server.run("samplers.py", "jwt").strip() == "ok"


@pytest.mark.slow
def test_the_real_engine_serves_the_official_client(start_local_server: StartServer) -> None:
    server = start_local_server()
    assert server.run("train_and_sample.py", timeout=240).strip() == "ok"
    assert server.run("samplers.py", timeout=240).strip() == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "where"), [("true", "uploaded"), ("false", "local")])
def test_a_traced_loss_runs_on_the_server_or_at_the_client(
    start_local_server: StartServer, flag: str, where: str
) -> None:
    server = start_local_server("--set", f"custom_loss_server_side={flag}")
    assert server.run("uploaded_loss.py", where).strip() == "ok"


@pytest.mark.slow
def test_the_official_command_line_lists_and_downloads(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server()
    state = server.run("save_state.py").strip()

    def tinker(*arguments: str) -> Any:
        command = [str(Path(sys.executable).with_name("tinker")), "-f", "json", *arguments]
        environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
        )
        assert ended_well(done.returncode, done.stderr), done.stdout + done.stderr
        return json.loads(done.stdout)

    run_id = state.removeprefix("tinker://").partition("/")[0]
    assert [run["training_run_id"] for run in tinker("run", "list")["runs"]] == [run_id]
    assert tinker("checkpoint", "info", state)["tinker_path"] == state
    found = tinker("checkpoint", "download", state, "--output", str(tmp_path / "out"))
    assert (Path(found["destination"]) / "adapter_config.json").exists()
    left = [c["tinker_path"] for c in tinker("checkpoint", "list")["checkpoints"]]
    assert left == [state], "the export that the download made is gone again"
    session_id = run_id.partition(":")[0]
    trace = tmp_path / "trace.json"
    tinker("session", "export-trace", session_id, "--output", str(trace))
    assert json.loads(trace.read_bytes())["traceEvents"]
