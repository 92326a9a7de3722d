"""Training loops that survive: after a terminal failure, a new client from the newest checkpoint.

    loop = Recovery(service, start=lambda: service.create_lora_training_client("Qwen/Qwen3-8B"))
    for attempt in loop.attempts():
        with attempt as (training, first_step):
            for step in range(first_step, 1000):
                ...
                if step % 50 == 49:
                    checkpoint = training.save_state(f"step-{step}", overwrite=True).result()
                    loop.saved(checkpoint, step + 1)

Leaving the block with a recoverable error starts the next attempt from the last save; leaving it
without an error ends the loop. Any other error, such as a mistake of the user, is raised at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.client.uplink.user_errors import is_user_error
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)
from tinsmith.types import SaveWeightsResponse

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    max_attempts: int = 5
    """Attempts without any progress after which the error is raised; a save counts as progress."""

    delay_seconds: float = 10.0
    """Before a new attempt; doubles up to ten minutes while there is no progress."""


def is_recoverable(error: BaseException) -> bool:
    """Whether a new client may succeed: yes after failures of the service and lost connections, no
    after mistakes of the user and errors of the loop itself."""
    kinds = (APIConnectionError, APIStatusError, RequestFailedError, RetryableException)
    return isinstance(error, kinds) and not is_user_error(error)


@dataclass
class Recovery:
    service: ServiceClient
    start: Callable[[], TrainingClient]
    """Makes the client of the first attempt, and of later ones while nothing was saved."""
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    on_recovery: Callable[[BaseException, int], None] | None = None
    """Called with the error and the step to go on from."""
    sleep: Callable[[float], None] = time.sleep
    path: str | None = None
    """The newest checkpoint; set it to go on with a run of an earlier process."""
    next_step: int = 0
    """The first step after that checkpoint."""
    _fruitless: int = 0
    _is_done: bool = False

    def saved(self, checkpoint: SaveWeightsResponse, next_step: int) -> None:
        """Note a finished save: from here the next attempt goes on."""
        self.path, self.next_step, self._fruitless = checkpoint.path, next_step, 0

    def attempts(self) -> Iterator[Attempt]:
        """One attempt, and another after each recoverable failure."""
        while not self._is_done:
            yield Attempt(self)

    def _client(self) -> TrainingClient:
        if self.path is None:
            return self.start()
        return self.service.create_training_client_from_state_with_optimizer(self.path)

    def _failed(self, error: BaseException) -> bool:
        """True if the error is dealt with and another attempt follows."""
        self._fruitless += 1
        if self._fruitless >= self.policy.max_attempts:
            return False
        if not (is_recoverable(error) or self._session_ended(error)):
            return False
        wait = min(self.policy.delay_seconds * 2.0 ** (self._fruitless - 1), 600.0)
        logger.warning(
            "Training failed (%s); going on from step %d in %.0f s.", error, self.next_step, wait
        )
        if self.on_recovery is not None:
            self.on_recovery(error, self.next_step)
        self.sleep(wait)
        return True

    def _session_ended(self, error: BaseException) -> bool:
        """In a session that is over, every request is refused as if the user had made a mistake."""
        try:
            return isinstance(error, APIStatusError) and self.service.session_has_ended()
        except TinkerError:
            return False


class Attempt:
    """A `with` block around the loop; gives the client and the step to begin with."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    def __enter__(self) -> tuple[TrainingClient, int]:
        recovery = self._recovery
        while True:
            try:
                return recovery._client(), recovery.next_step
            except TinkerError as error:
                # Making the client can fail like anything else.
                if not recovery._failed(error):
                    raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if exc_value is None:
            self._recovery._is_done = True
            return False
        return self._recovery._failed(exc_value)
