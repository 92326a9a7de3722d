"""Deleted checkpoints come back from the trash of a running server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.server_process import ServerProcess
from tinsmith.cli.failures import CommandError
from tinsmith.cli.naming import trash_entry_id
from tinsmith.client.service import ServiceClient
from tinsmith.types import AdamParams, Datum, ModelInput

if TYPE_CHECKING:
    from tests.cli.conftest import Run

DATUM = Datum(
    model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]}
)


def _saved(server: ServerProcess, name: str) -> tuple[str, float]:
    """A checkpoint of a model that has learnt something, and its loss there."""
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client("tinsmith/fake", rank=4, seed=1)
        training.forward_backward([DATUM], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=0.5)).result()
        path = training.save_state(name).result().path
        return path, training.forward([DATUM], "cross_entropy").result().metrics["loss:sum"]


def _loss(server: ServerProcess, path: str) -> float:
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_training_client_from_state(path)
        return training.forward([DATUM], "cross_entropy").result().metrics["loss:sum"]


def _trash(run: Run, server: ServerProcess) -> list[dict[str, Any]]:
    listed = run("--json", "storage", "trash", "--data-dir", str(server.data_dir))
    return list(json.loads(listed.stdout)["trash"])


def test_a_deleted_checkpoint_comes_back_whole_under_its_name(
    run: Run, server: ServerProcess
) -> None:
    path, expected = _saved(server, "precious")
    assert run("checkpoint", "delete", "--yes", path).exit_code == 0
    assert run("checkpoint", "info", path).exit_code != 0
    (entry,) = [e for e in _trash(run, server) if path in e["reason"]]
    result = run("storage", "restore", entry["id"][:8], "--data-dir", str(server.data_dir))
    assert result.exit_code == 0 and path in result.stdout
    assert _loss(server, path) == expected
    assert entry["id"] not in [e["id"] for e in _trash(run, server)]


def test_a_checkpoint_whose_name_is_taken_stays_in_the_trash(
    run: Run, server: ServerProcess
) -> None:
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        training = service.create_lora_training_client("tinsmith/fake", rank=4)
        path = training.save_state("again").result().path
        run("checkpoint", "delete", "--yes", path)
        training.save_state("again").result()
    (entry,) = [e for e in _trash(run, server) if path in e["reason"]]
    result = run("storage", "restore", entry["id"], "--data-dir", str(server.data_dir))
    assert result.exit_code == 1 and "another checkpoint" in result.stderr
    assert entry["id"] in [e["id"] for e in _trash(run, server)]


def test_the_trash_of_a_running_server_is_not_emptied_by_others(
    run: Run, server: ServerProcess
) -> None:
    result = run("storage", "trash", "--empty", "--data-dir", str(server.data_dir))
    assert result.exit_code == 1 and "another server" in result.stderr


def test_the_beginning_of_an_entry_s_id_is_enough_if_it_begins_no_other() -> None:
    known = ["3f2a00000000", "3f2b00000000", "3f2b0000", "9c0000000000"]
    assert trash_entry_id(known, "9") == "9c0000000000"
    assert trash_entry_id(known, "3f2b0000") == "3f2b0000", "it is whole"
    assert trash_entry_id(known, "7") == "7", "what fits nothing is refused by its own name"
    with pytest.raises(CommandError, match="'3f2' could be one of 3 entries"):
        trash_entry_id(known, "3f2")


def test_an_entry_that_is_not_there_is_named(run: Run, server: ServerProcess) -> None:
    result = run("storage", "restore", "nothing", "--data-dir", str(server.data_dir))
    assert result.exit_code == 1 and "'nothing'" in result.stderr
