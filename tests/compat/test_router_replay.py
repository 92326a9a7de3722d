"""Router replay for the official client, on a tiny model with experts over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.child import ended_well
from tests.support.server_process import ServerProcess, StartServer

pytest.importorskip("torch", reason="the local engine needs torch")
pytestmark = pytest.mark.slow

NUM_TOKENS = 2 * (3 + 5 + 37) + 6 * 11
"""That the sampler has read: prompts, and of twelve sampled tokens all but the last."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.conftest import save_tokenizer
    from tests.support.tiny_families import save_tiny

    folder = tmp_path_factory.mktemp("model")
    save_tiny("qwen3_moe", folder)
    save_tokenizer(folder)
    return folder


def start(start_server: StartServer, model: Path, *options: str) -> ServerProcess:
    engine = ("--engine", "local", "--device", "cpu", "--deterministic")
    return start_server(*engine, "--model", f"tiny={model}", *options)


@pytest.mark.parametrize("snapshot_steps", [50, 2], ids=["log", "snapshot"])
def test_a_killed_server_gets_the_same_weights_again_though_the_samplers_choices_are_gone(
    start_server: StartServer, model: Path, snapshot_steps: int
) -> None:
    """From the log of all three steps, and from a snapshot and the log after it."""
    options = ("--set", "router_replay=true", "--set", f"snapshot_steps={snapshot_steps}")
    server = start(start_server, model, *options)
    undisturbed = server.run("router_replay.py").splitlines()
    counts = [line.split()[0] for line in undisturbed[:3]]
    assert counts == [str(float(NUM_TOKENS))] * 3
    child = server.start_script("router_replay.py")
    lines = child.out.take(4)
    server.kill()
    server.start()
    rest, errors = child.finish(90)
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert lines + rest.splitlines() == undisturbed


def test_without_the_setting_the_same_program_routes_by_itself(
    start_server: StartServer, model: Path
) -> None:
    """And learns something else: after a step, the router would choose other experts."""
    replaying = start(start_server, model, "--set", "router_replay=true")
    with_replay = replaying.run("router_replay.py").splitlines()
    replaying.stop()
    plain = start(start_server, model).run("router_replay.py").splitlines()
    assert [line.split()[0] for line in plain[:3]] == ["None"] * 3
    losses = [[line.split()[-1] for line in lines] for lines in (with_replay, plain)]
    assert losses[0][0] == losses[1][0], "on the sampler's own weights both choose alike"
    assert losses[0][1] != losses[1][1] and losses[0][-1] != losses[1][-1]
