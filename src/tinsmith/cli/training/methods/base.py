"""What the loop asks of a method: the data of a step and its loss, an evaluation, some prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from tinsmith.cli.training import batches, records
from tinsmith.cli.training.batches import Batches
from tinsmith.cli.training.conversation import Example, Tokenizer
from tinsmith.cli.training.records import Record
from tinsmith.cli.training.settings import Settings
from tinsmith.errors import ValidationError
from tinsmith.types import Datum, LossFnType

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient

T = TypeVar("T")
S = TypeVar("S", bound=Settings)

_TEXT_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step learns from."""

    data: list[Datum]
    loss_fn: LossFnType
    loss_divisor: float | None = None
    """What the pass's summed loss is divided by for the metric `loss`; None: no such metric."""
    num_passes: int = 1
    """Optimizer steps that are taken on the same data."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was known before the pass."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over one pair of axes: metrics by the name that the legend has for them."""

    title: str
    curves: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class World:
    """What a method may use besides its settings."""

    service: ServiceClient
    model: str
    tokenizer: Tokenizer
    start_sampler: Callable[[], SamplingClient]
    """Samples from the weights that the run began with."""


class Method(ABC, Generic[T, S]):
    """One run of a method, with its data: `T` is what its data consists of."""

    watched: ClassVar[str]
    """The metric of an evaluation that tells which weights are best."""
    is_higher_better: ClassVar[bool] = False
    shown: ClassVar[tuple[str, ...]]
    """Metrics that are shown while it runs."""
    charts: ClassVar[tuple[Chart, ...]]
    """The first is shown while it runs."""

    def __init__(self, settings: S, world: World) -> None:
        self.settings = settings
        self.world = world
        self.num_left_out = 0
        everything = self._read(settings.data)
        if settings.validation is None:
            self.items, self.held_out = batches.split(everything, settings.held_out, settings.seed)
        else:
            self.items, self.held_out = everything, self._read(settings.validation)
        self._batches = Batches(self.items, settings.batch_size, settings.seed)

    @abstractmethod
    def parse(self, record: Record) -> list[T]:
        """What a record of the data is for this method."""

    @abstractmethod
    def num_tokens(self, item: T) -> int:
        """The length that `max_length` bounds."""

    @abstractmethod
    def batch(self, step: int, training: TrainingClient) -> Batch:
        """What step `step` learns from. Depends on the step and the weights alone."""

    @abstractmethod
    def evaluate(self, training: TrainingClient) -> dict[str, float]:
        """Metrics of the held-out data, which there is."""

    @abstractmethod
    def prompt_of(self, item: T) -> list[int]:
        """The tokens that a sample for the report continues."""

    @property
    def digest(self) -> str:
        return batches.digest([*self.items, *self.held_out])

    @property
    def num_steps(self) -> int:
        settings = self.settings
        return settings.steps or batches.num_steps(
            len(self.items), settings.batch_size, settings.epochs
        )

    def prompts(self) -> list[list[int]]:
        """Prompts whose answers the report shows: held-out ones, where there are enough."""
        chosen = [*self.held_out, *self.items][: self.settings.samples]
        return [self.prompt_of(each) for each in chosen]

    def of_step(self, step: int) -> list[T]:
        return self._batches.of_step(step)

    def _read(self, source: str) -> list[T]:
        found: list[T] = []
        for record in records.read(source):
            for item in self.parse(record):
                if self.num_tokens(item) > self.settings.max_length:
                    self.num_left_out += 1
                else:
                    found.append(item)
        if not found:
            raise ValidationError(
                f"has no example of at most {self.settings.max_length} tokens (--max-length)",
                source,
            )
        return found


def prompt_of_example(example: Example) -> list[int]:
    """What comes before the first reply, or the first words of a text."""
    learned = next(i for i, weight in enumerate(example.weights) if weight)
    return example.tokens[: learned if learned > 0 else _TEXT_PROMPT_TOKENS]


def in_parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Consecutive parts of at most `size` items."""
    return [items[i : i + size] for i in range(0, len(items), size)]
