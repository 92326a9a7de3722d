"""Ids need not be typed whole, and runs have names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.client.service import ServiceClient

if TYPE_CHECKING:
    from tests.cli.conftest import Paths, Run
    from tests.support.server_process import ServerProcess

FAKE = "tinsmith/fake"


@pytest.fixture(scope="module")
def pirates(server: ServerProcess) -> Iterator[list[str]]:
    """Two runs of one session, whose ids differ in the last digit only; the first has a name."""
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        named = service.create_lora_training_client(FAKE, user_metadata={"name": "pirate"})
        named.save_state("final").result()
        other = service.create_lora_training_client(FAKE)
        yield [named.model_id, other.model_id]


def test_the_beginning_of_an_id_is_enough_in_every_command(
    run: Run, run_json: Any, paths: Paths, tmp_path: Any
) -> None:
    short = paths.run_id[:6]
    state = paths.state.replace(paths.run_id, short)
    sampler = paths.sampler.replace(paths.run_id, short)
    assert run_json("run", "info", short)["training_run_id"] == paths.run_id
    assert run_json("checkpoint", "list", "--run-id", short)["run_id"] == paths.run_id
    assert run_json("checkpoint", "info", state)["tinker_path"] == paths.state
    for line in (
        ("checkpoint", "publish", state),
        ("checkpoint", "unpublish", state),
        ("checkpoint", "set-ttl", state, "--ttl", "7200"),
        ("checkpoint", "download", state, "-o", str(tmp_path)),
        ("session", "export-trace", paths.session_id[:6], "-o", str(tmp_path / "trace")),
    ):
        done = run(*line)
        assert done.exit_code == 0, done.output
    exported = run_json("export", state, "-o", str(tmp_path / "adapter"))
    assert exported["checkpoint_path"] == paths.state
    asked = run("checkpoint", "delete", sampler, stdin="n\n")
    assert paths.sampler in asked.stdout


def test_a_run_is_found_by_its_name_and_listed_with_it(
    run: Run, run_json: Any, pirates: list[str]
) -> None:
    assert run_json("run", "info", "pirate")["training_run_id"] == pirates[0]
    path = f"tinker://{pirates[0]}/weights/final"
    assert run_json("checkpoint", "info", "tinker://pirate/weights/final")["tinker_path"] == path
    (line,) = [each for each in run("run", "list").stdout.splitlines() if pirates[0] in each]
    assert line.split()[:2] == [pirates[0], "pirate"]


def test_what_could_be_several_is_refused_with_the_candidates(run: Run, pirates: list[str]) -> None:
    refused = run("run", "info", pirates[0][:-1])
    assert refused.exit_code == 1
    assert f"  {pirates[0]}  pirate\n" in refused.stderr
    assert pirates[1] in refused.stderr
    whole = run("run", "info", pirates[0])
    assert whole.exit_code == 0


def test_what_fits_nothing_is_not_found(run: Run, pirates: list[str]) -> None:
    missing = run("run", "info", "corsair")
    assert missing.exit_code == 1
    assert "corsair" in missing.stderr
