"""Metrics that only the program knows (rewards, evaluations), added to a run's curves.

A call returns at once and the metrics are sent in the background; a warning is logged for what
could not be delivered. At its end the program waits a few seconds for what is still being sent.
"""

from __future__ import annotations

import atexit
import logging
import numbers
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from tinsmith.errors import ValidationError
from tinsmith.types.convert import kind_of

if TYPE_CHECKING:
    from tinsmith.client.training import TrainingClient

logger = logging.getLogger(__name__)

_GOODBYE_SECONDS = 5.0
_under_way: set[Future[None]] = set()
"""One for each call, done when the metrics are delivered or the warning is logged."""
_newest: weakref.ref[TrainingClient] | None = None
_next_steps: weakref.WeakKeyDictionary[TrainingClient, int] = weakref.WeakKeyDictionary()


def log(
    metrics: Mapping[str, float], step: int | None = None, *, run: TrainingClient | None = None
) -> None:
    """Add metrics to a run's curves, under a step; by default the run of the training client that
    was made last, and the step after the last one.

        tinsmith.log({"reward": 0.5, "eval/accuracy": 0.7}, step=12)
    """
    client = run if run is not None else _newest() if _newest is not None else None
    if client is None:
        raise ValidationError("there is no training client yet; make one, or give `run`")
    if step is None:
        step = _next_steps.get(client, 0)
    _next_steps[client] = step + 1
    sent = client.log_metrics({name: _number(name, metrics[name]) for name in metrics}, step)
    told: Future[None] = Future()
    _under_way.add(told)
    sent.add_done_callback(partial(_delivered, told, client.model_id, step))


def wait_for_all() -> None:
    """Return when the metrics under way are delivered, or after some seconds."""
    wait(set(_under_way), timeout=_GOODBYE_SECONDS)


atexit.register(wait_for_all)


def note(client: TrainingClient) -> None:
    """Remember the training client that was made last."""
    global _newest
    _newest = weakref.ref(client)


class RunLogger:
    """Sends the metrics of tinker-cookbook's training loops to the server's console, too.

        ml_logger = ml_log.setup_logging(...)
        ml_logger.loggers.append(tinsmith.RunLogger(training_client))

    It has the methods of the cookbook's `Logger`. Values that are not numbers are left to the
    cookbook's other loggers.
    """

    def __init__(self, run: TrainingClient | None = None) -> None:
        """Logs to the run of `training_client`; by default to that of the client that was made last
        when the first metrics come."""
        self._run = run
        self.store = None
        """The cookbook's place for files; there is none here."""

    def log_hparams(self, config: Any) -> None:
        """Nothing: the server knows the run's configuration."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self._run is None and _newest is not None:
            self._run = _newest()
        known = {k: float(v) for k, v in metrics.items() if isinstance(v, numbers.Real)}
        log(known, step, run=self._run)

    def log_long_text(self, key: str, text: str) -> None:
        """Nothing: the server's console shows numbers."""

    def sync(self) -> None:
        wait_for_all()

    def close(self) -> None:
        wait_for_all()

    def get_logger_url(self) -> str | None:
        """The run's page, once it is known which run that is."""
        return None if self._run is None else self._run.get_console_url()


def _number(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise ValidationError(f"expected a number, got {kind_of(value)}", name)
    return float(value)


def _delivered(told: Future[None], model_id: str, step: int, sent: Future[None]) -> None:
    error = None if sent.cancelled() else sent.exception()
    if error is not None:
        logger.warning("the metrics of step %d of %s were not recorded: %s", step, model_id, error)
    _under_way.discard(told)
    told.set_result(None)
