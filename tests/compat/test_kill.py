"""`kill -9` in mid-work: the same unmodified client, still waiting, gets its results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from chaos.machinery import Postgres
from tests.support.child import ended_well
from tests.support.server_process import children

if TYPE_CHECKING:
    from tests.support.server_process import ServerProcess, StartServer

STEPS = "12"


@pytest.mark.slow
def test_a_server_killed_twice_loses_nothing_that_it_answered(start_server: StartServer) -> None:
    """Before the first snapshot, and after it."""
    server = start_server("--set", "fake_pass_seconds=0.1", "--set", "snapshot_steps=4")
    undisturbed = server.run("long_training.py", STEPS).splitlines()
    child = server.start_script("long_training.py", STEPS)
    lines = []
    for num_steps in (1, 5):
        lines += child.out.take(num_steps)
        server.kill()
        server.start()
    rest, errors = child.finish(90)
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert lines + rest.splitlines() == undisturbed
    whole, killed = loss_curves(server)
    assert killed == whole, "no gap, and no point twice"
    assert [float.fromhex(line.split()[1]) for line in undisturbed[: int(STEPS)]] == whole[1][:-1]


def loss_curves(server: ServerProcess) -> list[tuple[list[int], list[float]]]:
    """Numbers and sums of the losses of each run, the first run first."""
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": server.key}) as api:
        runs = api.get("/training_runs").raise_for_status().json()["training_runs"]
        ids = [run["training_run_id"] for run in reversed(runs)]
        found = [api.get(f"/training_runs/{i}/metrics").raise_for_status().json() for i in ids]
    series = [each["series"]["loss:sum"] for each in found]
    return [(each["x"], each["mean"]) for each in series]


@pytest.mark.slow
def test_a_client_that_waits_for_all_samples_with_one_question_outlives_a_restart(
    start_server: StartServer,
) -> None:
    """Such a client hears of its samples by cursor, also of those that the restart has lost."""
    flag = ("--set", "sample_use_retrieve_futures=true")
    server = start_server("--set", "fake_token_seconds=0.005", *flag)
    child = server.start_script("sample_over_restart.py")
    assert child.out.take(1) == ["under way"]
    time.sleep(0.5)
    server.kill()
    server.start()
    rest, errors = child.finish(60)
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert rest.strip() == "ok"


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("Postgres is not installed (Debian: apt install postgresql)")
    pytest.importorskip("psycopg", reason="the Postgres driver is not installed")
    database = Postgres()
    database.start()
    yield database
    database.close()


@pytest.mark.slow
def test_a_server_on_postgres_loses_nothing_when_it_and_its_database_are_killed(
    start_server: StartServer, postgres: Postgres
) -> None:
    options = ("--set", "fake_pass_seconds=0.1", "--set", "snapshot_steps=4")
    server = start_server("--database-url", postgres.url, *options)
    undisturbed = server.run("long_training.py", STEPS).splitlines()
    assert not (server.data_dir / "tinsmith.db").exists()
    child = server.start_script("long_training.py", STEPS)
    lines = child.out.take(2)
    server.kill()
    server.start()
    lines += child.out.take(2)
    postgres.stop()
    time.sleep(1.0)
    postgres.start()
    rest, errors = child.finish(90)
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert lines + rest.splitlines() == undisturbed


def test_a_second_server_on_the_same_folder_is_refused_with_a_clear_message(
    start_server: StartServer,
) -> None:
    first = start_server()
    second = type(first)(first.data_dir)
    with pytest.raises(AssertionError, match=r"another server .* uses the data folder"):
        second.start()
    assert second.process is not None and second.process.wait(timeout=60) == 1
    assert second.process.stdout is not None
    second.process.stdout.close()


@pytest.mark.slow
def test_a_real_model_ends_with_the_same_bits_whoever_is_killed(
    start_local_server: StartServer,
) -> None:
    server = start_local_server("--set", "snapshot_steps=15")
    steps = "40"
    undisturbed = server.run("long_training.py", steps).splitlines()
    child = server.start_script("long_training.py", steps)
    lines = child.out.take(3)
    os.kill(server.engines()[-1], signal.SIGKILL)
    lines += child.out.take(17)
    server.kill()
    server.start()
    rest, errors = child.finish(120)
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert lines + rest.splitlines() == undisturbed
    assert any(line.startswith("probe") for line in rest.splitlines())


@pytest.mark.slow
def test_a_model_on_two_ranks_ends_with_the_same_bits_when_one_of_them_is_killed(
    start_local_server: StartServer,
) -> None:
    server = start_local_server("--ranks", "2", "--set", "snapshot_steps=5")
    steps = "12"
    undisturbed = server.run("long_training.py", steps).splitlines()
    engine = server.engines()[-1]
    child = server.start_script("long_training.py", steps)
    lines = child.out.take(3)
    (rank,) = children(engine, b"tinsmith.engine.local.ranks.process")
    os.kill(rank, signal.SIGKILL)
    rest, errors = child.finish(120)
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert lines + rest.splitlines() == undisturbed
    assert server.engines()[-1] != engine


@pytest.mark.slow
def test_tenants_who_train_at_once_get_the_bits_that_each_gets_alone(
    start_local_server: StartServer,
) -> None:
    server = start_local_server()
    alone = server.run("long_training.py", "10")
    together = [server.start_script("long_training.py", "10") for _ in range(3)]
    for child in together:
        output, errors = child.finish(120)
        assert output == alone, errors
