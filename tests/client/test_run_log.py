"""Metrics of a program's own reach the run's curves; links lead to the server's own console."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import pytest

import tinsmith
from tests.support.scripted_server import Answer
from tinsmith.client import run_log
from tinsmith.errors import ValidationError
from tinsmith.transport.config import DEFAULT_BASE_URL
from tinsmith.types.console import CONSOLE, console_of

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient


@pytest.fixture
def training(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("m")


def _path(training: TrainingClient) -> str:
    return f"/api/v1/training_runs/{training.model_id}/metrics"


def _posted(stub: Any, training: TrainingClient) -> list[Any]:
    run_log.wait_for_all()
    return [request.json() for request in stub.requests if request.path == _path(training)]


def test_metrics_go_to_the_run_of_the_client_made_last(
    stub: Any, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (service.create_lora_training_client("m") for _ in range(2))
    for client in (first, second):
        stub.on(_path(client), Answer(204, b""))
    tinsmith.log({"reward": 0.5, "count": 3}, step=7)
    tinsmith.log({"reward": 0.75})
    tinsmith.log({"reward": math.nan}, run=first)
    assert _posted(stub, second) == [
        {"step": 7, "metrics": {"reward": 0.5, "count": 3.0}},
        {"step": 8, "metrics": {"reward": 0.75}},
    ]
    assert _posted(stub, first) == [{"step": 0, "metrics": {"reward": "NaN"}}]
    assert not caplog.records, "what was delivered is not warned of"


def test_metrics_arrive_in_the_order_of_their_calls(stub: Any, training: TrainingClient) -> None:
    stub.on(_path(training), Answer(204, b"", delay=0.05), Answer(204, b""))
    for step in range(5):
        tinsmith.log({"reward": 0.5}, step, run=training)
    assert [posted["step"] for posted in _posted(stub, training)] == [0, 1, 2, 3, 4]


def test_what_is_no_number_is_refused_by_name(training: TrainingClient) -> None:
    with pytest.raises(ValidationError, match="reward: expected a number, got str"):
        tinsmith.log({"reward": "high"}, run=training)  # type: ignore[dict-item]  # on purpose


def test_metrics_that_were_not_delivered_are_warned_of(
    stub: Any, training: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    stub.on(_path(training), Answer(400, {"detail": "too many"}))
    with caplog.at_level(logging.WARNING):
        tinsmith.log({"reward": 0.5}, step=3, run=training)
        run_log.wait_for_all()
    assert "the metrics of step 3" in caplog.text and "too many" in caplog.text


def test_a_logger_for_the_cookbook_has_its_methods(stub: Any, training: TrainingClient) -> None:
    stub.on(_path(training), Answer(204, b""))
    logger = tinsmith.RunLogger(training)
    logger.log_hparams({"learning_rate": 1e-4})
    logger.log_metrics({"reward": 0.5, "is_last": True, "note": "a text", "none": None}, step=2)
    logger.log_long_text("sample", "words")
    logger.sync()
    logger.close()
    assert logger.store is None and logger.get_logger_url() == training.get_console_url()
    assert _posted(stub, training) == [{"step": 2, "metrics": {"reward": 0.5, "is_last": 1.0}}]


def test_a_logger_without_a_run_keeps_to_the_newest_when_its_first_metrics_come(
    stub: Any, service: ServiceClient
) -> None:
    before = service.create_lora_training_client("m")
    logger = tinsmith.RunLogger()
    assert logger.get_logger_url() is None, "the run is still to come"
    own = service.create_lora_training_client("m")
    stub.on(_path(own), Answer(204, b""))
    logger.log_metrics({"reward": 0.5}, step=0)
    after = service.create_lora_training_client("m")
    logger.log_metrics({"reward": 0.75}, step=1)
    assert [posted["step"] for posted in _posted(stub, own)] == [0, 1]
    assert _posted(stub, before) == _posted(stub, after) == []
    assert logger.get_logger_url() == own.get_console_url()


def test_links_lead_to_the_console_of_the_server_that_is_used(
    stub: Any, service: ServiceClient, training: TrainingClient
) -> None:
    assert training.get_console_url() == f"{stub.url}/training_runs/{training.model_id}"
    assert service.get_console_url().startswith(f"{stub.url}/sessions/")
    assert console_of(DEFAULT_BASE_URL) == CONSOLE
    assert console_of("https://thinkingmachines.dev.example/") != CONSOLE
