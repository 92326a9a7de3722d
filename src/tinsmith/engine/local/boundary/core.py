"""What the worker asks of the core that computes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tinsmith.engine.base import EngineSampleEvent, Failure, FinishedPass, Pass, SampleJob

PassResults = Generator[FinishedPass | None, None, None]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Later(Generic[T]):
    """The rest of a call, for which the core is not needed: a function that gives the answer, in
    any thread, and the folder that it writes."""

    finish: Callable[[], T]
    folder: Path


class Core(Protocol):
    """The thing that computes. Synchronous, used by one thread.

    It has every call of the interface (`CALLS`) as a plain method of the same signature, which may
    return the answer or the rest of the call as `Later`. Those that are named here are the ones
    that the worker does in parts, a turn at a time.
    """

    def run_passes(self, passes: Sequence[Pass]) -> PassResults:
        """Results as each pass is finished; None where other work may be done in between.

        Closing the generator gives up what is not finished.
        """
        ...

    @property
    def is_sampling(self) -> bool: ...

    def has_room_for(self, base_model: str) -> bool:
        """Whether a base model is in memory or can come there now, beside those in use."""
        ...

    def base_model_of(self, adapter_id: str) -> str | None: ...

    def submit_sample(self, job: SampleJob) -> Failure | None:
        """Take on a job; its events come from later sampling turns.

        A job of the same id that is still under way is a reason to refuse it.
        """
        ...

    def cancel(self, job_id: str) -> None:
        """Forget a job without a further event. Unknown ids are ignored."""
        ...

    def sampling_turn(self, *, ahead: bool) -> list[tuple[str, EngineSampleEvent]]:
        """Decode a little for the jobs under way; (job id, event) in order.

        With `ahead` the device may go on with what the next turn reports.
        """
        ...
