"""A backup of a server at work holds one moment of it, whole; a server made of it says so."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.databases import emptied, postgres_url  # noqa: F401  # a fixture
from tests.support.server_process import ServerProcess, serving
from tinsmith.client.rest import RestClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.warn import ExperimentalWarning
from tinsmith.errors import APIStatusError, ValidationError
from tinsmith.server import backups
from tinsmith.server.config import ServerConfig
from tinsmith.server.config_sources import build_config
from tinsmith.server.data_folder import DataFolder
from tinsmith.types import AdamParams, Datum, ModelInput, SessionCancelled, SessionSearchRequest

if TYPE_CHECKING:
    from tinsmith.client.training import TrainingClient

MODEL = "tinsmith/fake"
SET_BACK = r"restored from a backup of 20.*set back to that moment; begin a new one from a check"
# Large enough for its request to be kept in a file.
TOKENS = [1 + number % 200 for number in range(3000)]
DATA = [
    Datum(model_input=ModelInput.from_ints(TOKENS), loss_fn_inputs={"target_tokens": TOKENS})
    for _ in range(8)
]


def _learn(training: TrainingClient) -> None:
    training.forward_backward(DATA, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.05)).result()


def _loss(service: ServiceClient, path: str) -> float:
    training = service.create_training_client_from_state(path)
    return training.forward(DATA[:1], "cross_entropy").result().metrics["loss:sum"]


def _config(data_dir: Path, database_url: str | None = None) -> ServerConfig:
    return build_config({"data_dir": str(data_dir), "database_url": database_url})


def _files(folder: Path) -> set[str]:
    return {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: ServerProcess) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=server.url, api_key=server.key) as service:
        yield service


@pytest.fixture(scope="module")
def rest(server: ServerProcess) -> RestClient:
    return RestClient(base_url=server.url, api_key=server.key)


@pytest.fixture(scope="module")
def training(service: ServiceClient) -> TrainingClient:
    training = service.create_lora_training_client(MODEL, rank=4, seed=1)
    _learn(training)
    return training


@pytest.fixture(scope="module")
def saved(training: TrainingClient, service: ServiceClient) -> tuple[str, float]:
    """A checkpoint, and the loss there."""
    path = training.save_state("precious").result().path
    return path, _loss(service, path)


@pytest.fixture(scope="module")
def backup(
    server: ServerProcess, saved: tuple[str, float], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("backups") / "one"
    backups.create(_config(server.data_dir), folder)
    return folder


def test_it_holds_what_it_says_and_nothing_else(backup: Path) -> None:
    facts = backups.verify(backup)
    assert _files(backup) == {*facts.files, "backup.json"}
    assert any(path.startswith("weights/") for path in facts.files)
    assert any(path.startswith("blobs/") for path in facts.files)
    assert backup.stat().st_mode & 0o077 == 0


def test_runs_of_a_restored_server_say_that_they_were_set_back(tmp_path: Path) -> None:
    """One program all along; its server comes back as it was before two answered operations."""
    with (
        serving(tmp_path) as server,
        ServiceClient(base_url=server.url, api_key=server.key) as service,
    ):
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        _learn(training)
        path = training.save_state("precious").result().path
        expected = _loss(service, path)
        backups.create(_config(server.data_dir), tmp_path / "backup")
        _learn(training)
        server.stop()
        server.data_dir.rename(tmp_path / "lost")
        backups.restore(tmp_path / "backup", _config(server.data_dir))
        server.start()
        with pytest.raises(APIStatusError, match=SET_BACK):
            _learn(training)
        with ServiceClient(base_url=server.url, api_key=server.key) as another:
            assert _loss(another, path) == expected
        rest = RestClient(base_url=server.url, api_key=server.key)
        with pytest.warns(ExperimentalWarning):
            summaries = rest.search_sessions(SessionSearchRequest()).result().sessions
        (status,) = [s.status for s in summaries if training.model_id.startswith(s.session_id)]
        assert isinstance(status, SessionCancelled)
        assert status.detail is not None and re.search(SET_BACK, status.detail)


def test_a_damaged_backup_is_refused_by_name_and_nothing_is_made_of_it(
    backup: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(backup, damaged)
    weights = min(p for p in backups.read(backup).files if p.startswith("weights/"))
    blob = min(p for p in backups.read(backup).files if p.startswith("blobs/"))
    content = bytearray((damaged / weights).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / weights).write_bytes(content)
    (damaged / blob).unlink()
    with pytest.raises(backups.DamagedBackupError) as refused:
        backups.restore(damaged, _config(tmp_path / "data"))
    assert f"{weights}: its checksum differs" in str(refused.value)
    assert f"{blob}: No such file" in str(refused.value)
    assert not (tmp_path / "data").exists()


def test_what_goes_while_it_is_copied_is_not_in_it(
    server: ServerProcess,
    rest: RestClient,
    training: TrainingClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The database names a checkpoint whose files go a moment later: it is copied once more."""
    doomed = training.save_state("doomed").result().path
    copies: list[Path] = []
    copy_out = backups.copy_out

    def copy_and_delete(url: str, file: Path) -> None:
        copy_out(url, file)
        copies.append(file)
        if len(copies) == 1:
            before = _weights(server)
            rest.delete_checkpoint_from_tinker_path(doomed).result()
            deadline = time.monotonic() + 60
            while not _weights(server) < before:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    monkeypatch.setattr(backups, "copy_out", copy_and_delete)
    folder = tmp_path / "backup"
    backups.create(_config(server.data_dir), folder)
    assert len(copies) == 2
    assert _files(folder) == {*backups.verify(folder).files, "backup.json"}


def test_backups_of_a_server_at_work_are_whole(
    server: ServerProcess, service: ServiceClient, rest: RestClient, tmp_path: Path
) -> None:
    is_over = threading.Event()

    def work() -> None:
        training = service.create_lora_training_client(MODEL, rank=4, seed=2)
        while not is_over.is_set():
            _learn(training)
            path = training.save_state("again", overwrite=True).result().path
            rest.delete_checkpoint_from_tinker_path(path).result()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for number in range(5):
            backups.create(_config(server.data_dir), tmp_path / str(number))
            backups.verify(tmp_path / str(number))
    finally:
        is_over.set()
        worker.join()


def test_an_existing_data_folder_is_not_touched(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ValidationError, match="'data' exists already"):
        backups.restore(backup, _config(tmp_path / "data"))
    assert not _files(tmp_path)


def test_what_is_no_backup_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"is not a backup: it has no backup\.json"):
        backups.verify(tmp_path)
    (tmp_path / "backup.json").write_text('{"form": 1, "files": 3}')
    with pytest.raises(backups.DamagedBackupError, match=r"backup\.json is damaged"):
        backups.verify(tmp_path)


@pytest.mark.slow
def test_a_backup_on_sqlite_becomes_a_server_on_postgres_and_the_other_way_round(
    backup: Path,
    server: ServerProcess,
    saved: tuple[str, float],
    postgres_url: str,  # noqa: F811  # the fixture
    tmp_path: Path,
) -> None:
    """The same rows, whichever way they went, and numbers that go on."""
    new_database = emptied(postgres_url)
    config = _config(tmp_path / "data", new_database)
    backups.restore(backup, config)
    (tmp_path / "key").write_text(server.key)
    with (
        serving(tmp_path, "--database-url", new_database) as restored,
        ServiceClient(base_url=restored.url, api_key=server.key) as service,
    ):
        assert _loss(service, saved[0]) == saved[1]
        training = service.create_lora_training_client(MODEL, rank=4, seed=3)
        _learn(training)
        mine = training.save_state("mine").result().path
        expected = _loss(service, mine)
        backups.create(config, tmp_path / "again")
    backups.restore(tmp_path / "again", _config(tmp_path / "third" / "data"))
    (tmp_path / "third" / "key").write_text(server.key)
    with (
        serving(tmp_path / "third") as restored,
        ServiceClient(base_url=restored.url, api_key=server.key) as service,
    ):
        assert _loss(service, saved[0]) == saved[1]
        assert _loss(service, mine) == expected
    with pytest.raises(ValidationError, match="is not empty: it has a table"):
        backups.restore(backup, _config(tmp_path / "fourth", new_database))
    assert not (tmp_path / "fourth").exists()


def _weights(server: ServerProcess) -> set[str]:
    return {folder.name for folder in DataFolder(server.data_dir).weights.iterdir()}
