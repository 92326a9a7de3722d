"""The engine interface: what a caller may ask of the thing that does the mathematics.

An engine holds base models, adapters that train on them, and samplers (frozen adapters, or
the bare base model). It knows nothing of users, sessions, rows or HTTP; ids are opaque
strings that the caller chooses. Everything that crosses the interface is a plain value.

Order is the caller's affair: operations on one adapter are carried out in the order in which
they are handed over, and the engine never reorders them. Work on different adapters may
run in one batch, which changes speed and never results.

A mistake in one item must not disturb the items beside it, so batch calls report failure as
a value (`Failure`) in the item's place. Exceptions mean that the engine itself is in trouble.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from tinsmith.disk import FileRecord
from tinsmith.engine.images import ImageRules
from tinsmith.types import (
    AdamParams,
    CustomLossGraph,
    CustomLossInput,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)

FailureCategory = Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one item of a call could not be done. Nothing of the item took effect."""

    message: str
    category: FailureCategory


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelInfo:
    """A base model the engine can serve, whether or not it is in memory now."""

    name: str
    max_context_length: int
    vocab_size: int
    architecture: str
    is_trainable: bool = True
    is_sampleable: bool = True
    tokenizer_folder: Path | None = None
    """Where the tokenizer's files are, for callers that render text."""

    images: ImageRules | None = None
    """How it reads images; None where it reads text only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedModel:
    """A base model the engine was asked to serve and cannot."""

    name: str
    reason: str
    """For people: what is wrong with it and what to do, without paths or traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    models: tuple[BaseModelInfo, ...]
    max_lora_rank: int
    refused: tuple[RefusedModel, ...] = ()
    """Models that were asked for and are not served, each with the reason."""
    device: str = ""
    """Where the mathematics runs, and the type of the base weights: "cpu, float32"."""
    arithmetic: str = ""
    """What last bits depend on beside the settings: the kind of machine, and torch's release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A moment's view; `alive` is false once the engine can no longer serve."""

    alive: bool
    detail: str = ""
    num_adapters: int = 0
    num_samplers: int = 0
    running_samples: int = 0
    waiting_samples: int = 0
    memory_bytes: int = 0
    decoded_tokens: int = 0
    """Tokens sampled since the engine started, those of samples under way among them."""
    weights_bytes: int = 0
    """Of base models in memory."""
    cache_bytes: int = 0
    """Of keys and values in use, of `cache_limit_bytes`."""
    cache_limit_bytes: int = 0
    adapter_bytes: int = 0
    """Of adapters, their gradients and moments, and frozen samplers."""
    sampler_bytes: int = 0
    """Of these, the frozen samplers."""
    adapter_limit_bytes: int = 0
    """Above it, idle models and samplers should be unloaded; 0 means no limit."""
    busy_seconds: float = 0.0
    """Time spent computing since the engine started; the rest of the time it waited for work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """An uploaded loss: which inputs it reads, in the order of its placeholders, and its graph."""

    inputs: tuple[CustomLossInput, ...]
    graph: CustomLossGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass of one adapter, with or without accumulating gradients."""

    adapter_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    custom_loss: CustomLoss | None = None
    """The graph behind `loss_fn="custom"`; the caller has looked it up."""

    scope: str = ""
    """As in `SampleJob`: what was made of an image is cached for passes and jobs of one scope."""

    choices: Sequence[np.ndarray | None] = ()
    """For each datum the experts that its tokens go to, as `expert_choices` has them; None, and an
    empty sequence, leave it to the routers."""

    is_replay: bool = False
    """Whether it replays a pass that ran before: an uploaded loss then has no time limit."""


@dataclass(frozen=True, slots=True)
class FinishedPass:
    """What became of the pass at `index` of a call."""

    index: int
    result: ForwardBackwardOutput | Failure
    seconds: float
    """Computing time: its share, by tokens, of the micro-batches it was in, and all of its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of one adapter; consumes the gradients accumulated so far."""

    adapter_id: str
    params: AdamParams


SavedKind = Literal["sampler", "training", "exact"]
"""What is saved of an adapter: weights; optimizer state and steps too; pending gradients too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    size_bytes: int
    step: int
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """What was written, by name; empty where something was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What a sampled text must match, from its first character to its last."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """How a job changes the choice of tokens, beyond the protocol's parameters (`shaping`)."""

    min_p: float = 0.0
    """Leave out tokens below this part of the likeliest token's probability."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the sequence has sampled."""

    frequency_penalty: float = 0.0
    """Subtracted likewise, once for each time that the token was sampled."""

    repetition_penalty: float = 1.0
    """Divides the logits above zero, and multiplies those below, of tokens that it has sampled or
    that its prompt has."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""

    grammar: Grammar | None = None
    """Leave out tokens with which the text would not match, and end only where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedAdapter:
    """What an adapter that was trained elsewhere has become."""

    lora: LoraConfig
    """What an adapter must be created with to load it."""
    size_bytes: int
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """What was written, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    """One sampling request: `num_samples` continuations of one prompt."""

    job_id: str
    base_model: str
    weights_id: str | None
    """A frozen adapter made by `freeze` or `load_sampler`; None samples the bare base model."""

    prompt: ModelInput
    params: SamplingParams
    shaping: Shaping | None = None
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    stream: bool = False
    """Whether to report tokens as they are decoded (`TokensSampled`)."""

    reports_experts: bool = False
    """Whether to report the experts that tokens went to (`ExpertsChosen`), before the response. An
    engine that keeps none reports none."""

    scope: str = ""
    """An opaque name. Only jobs of one scope share cached prompts, so that neither an answer nor
    its speed reveals another scope's prompts; and scopes that have work share the device evenly."""


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """Tokens just decoded for sample `index` of a streaming job, with their log-probabilities."""

    index: int
    tokens: np.ndarray
    logprobs: np.ndarray
    topk: TopkLogprobs | None = None
    """The likeliest tokens at each position, where the job asked for them."""


@dataclass(frozen=True, slots=True)
class ExpertsChosen:
    """Which experts the tokens of a job went to, as `expert_choices` has them; the last token of a
    sample went to none yet."""

    prompt: np.ndarray
    """Of the prompt's tokens, which all samples share; the last may be among the samples' own."""

    samples: tuple[np.ndarray, ...]
    """Of the tokens behind these, by sample."""


SampleEvent = TokensSampled | SampleResponse | Failure

EngineSampleEvent = SampleEvent | ExpertsChosen


Method = TypeVar("Method", bound=Callable[..., Any])


def at_once(method: Method) -> Method:
    """Mark a call that is answered whatever is queued; every other call waits for its turn."""
    method.is_at_once = True  # type: ignore[attr-defined]  # read by `calls`
    return method


class Engine:
    """Batch-shaped and asynchronous; see the module's notes on order and failure.

    This is the one declaration of the calls. `calls` reads it, and the messages that carry a call
    to another process, and its dispatch there, follow from it; a new call is declared here and
    implemented by the engines that compute.
    """

    @at_once
    async def capabilities(self) -> Capabilities:
        raise NotImplementedError

    @at_once
    async def health(self) -> Health:
        raise NotImplementedError

    async def create_adapter(
        self, adapter_id: str, base_model: str, lora: LoraConfig
    ) -> Failure | None:
        """Make a fresh adapter. A base model not in memory is loaded first."""
        raise NotImplementedError

    async def unload_adapter(self, adapter_id: str) -> None:
        """Forget an adapter and free its memory. Unknown ids are ignored."""
        raise NotImplementedError

    def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        """Run passes, of any adapters, together; yield each as it is finished.

        Closing the iterator gives up passes that are not finished yet: whether one of them still
        takes effect is then unknown, so a caller that goes on must restore their adapters.
        """
        raise NotImplementedError

    async def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        """Take optimizer steps; each result is the step's metrics."""
        raise NotImplementedError

    async def save(self, adapter_id: str, folder: Path, kind: SavedKind) -> SavedAdapter | Failure:
        """Write the adapter to `folder`, which must not exist; it appears whole or not at all."""
        raise NotImplementedError

    async def restore(
        self, adapter_id: str, folder: Path, kind: SavedKind
    ) -> SavedAdapter | Failure:
        """Overwrite an existing adapter from what `save` wrote.

        With kind "sampler" only the weights are taken, and optimizer state and pending gradients
        start afresh; "training" also restores the optimizer; "exact" the pending gradients too.
        """
        raise NotImplementedError

    async def import_adapter(
        self, base_model: str, source: Path, folder: Path, kind: SavedKind
    ) -> ImportedAdapter | Failure:
        """Write the adapter that PEFT or the hosted service left in `source` as `save` would.

        `folder` must not exist, and appears whole or not at all. The optimizer starts afresh.
        """
        raise NotImplementedError

    async def freeze(self, adapter_id: str, weights_id: str) -> Failure | None:
        """Copy the adapter's present weights, in memory, into a new sampler."""
        raise NotImplementedError

    async def load_sampler(self, weights_id: str, base_model: str, folder: Path) -> Failure | None:
        """Make a sampler from the weights in a folder that `save` wrote."""
        raise NotImplementedError

    async def unload_sampler(self, weights_id: str) -> None:
        raise NotImplementedError

    def sample(self, job: SampleJob) -> AsyncIterator[EngineSampleEvent]:
        """Run one job. The last event is a `SampleResponse` or a `Failure`; none follows it."""
        raise NotImplementedError

    @at_once
    async def cancel(self, job_id: str) -> None:
        """Give up a sampling job and free its place. Unknown or finished ids are ignored."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
