"""Looking at a run from outside: its curves, its operations, its place in the queue, its samplers.

Not part of the protocol: the hosted service has no such calls.
"""

from __future__ import annotations

from typing import Annotated, Literal

from tinsmith.types.convert import Bounds
from tinsmith.types.model import Request, Response
from tinsmith.types.non_finite import ResultFloat

MAX_POSTED_KEYS = 256
MAX_KEY_CHARACTERS = 200
MAX_STEP = 2**53
NO_TEXT = -1
"""Stands in a prompt for a chunk that is no text, such as an image."""


class Series(Response):
    """One metric over a run. Where several steps share a point, `mean`, `min` and `max` are theirs;
    null stands for numbers that are not finite."""

    axis: Literal["seq", "step"]
    """What `x` counts: the run's operations, or the steps that the client gave."""
    x: list[int]
    t: list[float]
    """When, in seconds since 1970."""
    mean: list[float | None]
    min: list[float | None]
    max: list[float | None]


class RunMetricsResponse(Response):
    keys: list[str]
    series: dict[str, Series]


class PostMetricsRequest(Request):
    """Metrics of the client's own; numbers that are not finite come as words."""

    __wire_mode__ = "answer"

    step: Annotated[int, Bounds(ge=0, lt=MAX_STEP)]
    metrics: dict[str, ResultFloat]


class RunOperation(Response):
    """An operation of a run; moments in seconds since 1970."""

    seq: int
    kind: str
    status: Literal["pending", "done", "failed"]
    submitted: float
    started: float | None = None
    ended: float | None = None
    tokens: int
    error: str | None = None
    made: str | None = None
    """The checkpoint, or the sampler, that it made."""


class RunOperationsResponse(Response):
    operations: list[RunOperation]


class RunQueueResponse(Response):
    __explicit_null__ = frozenset({"place"})

    waiting: int
    """Operations of the run that have not started."""
    place: int | None = None
    """How many runs are served before this one, plus one; null when it does not wait for a turn."""
    ahead_tokens: int
    """Tokens of what runs now and of what is served before."""
    reason: str
    """Why nothing of the run is running, in a sentence."""


class RunExample(Response):
    """A sequence of a pass, or an answer: its tokens, and what is known of each."""

    step: int
    """The number of the operation: the pass, or the one that made the weights of the answer."""
    source: Literal["trained", "sampled"] = "trained"
    tokens: list[str]
    """As texts; as their numbers where the server has no tokenizer."""
    ids: list[int]
    logprobs: list[float] | None = None
    """As a pass found them; of an answer, as they were when it was sampled."""
    sampled_logprobs: list[float] | None = None
    weights: list[float] | None = None
    advantages: list[float] | None = None
    length: int
    """Tokens of the whole sequence; only the first of a very long one are kept."""
    prompt: list[str] | None = None
    """The prompt of an answer, as texts; only the last tokens of a very long one."""
    prompt_ids: list[int] | None = None
    """-1 stands for an image."""
    stop_reason: str | None = None


class RunExamplesResponse(Response):
    examples: list[RunExample]
    is_recorded: bool
    """Whether this server keeps examples now (`keep_examples`)."""


class RunSampler(Response):
    """What a sampler of a run's weights has given; moments in seconds since 1970."""

    sampler: str
    seq: int | None = None
    """The operation that froze its weights, where the sampler was made in that."""
    requests: int
    sequences: int
    prompt_tokens: int
    sampled_tokens: int
    mean_length: float
    longest: int
    stopped_fraction: float
    """Of the sequences, how many ended by themselves and not at their limit of tokens."""
    mean_logprob: float
    """Per sampled token."""
    first: float
    last: float


class RunSamplersResponse(Response):
    samplers: list[RunSampler]


class ConsoleUsageItem(Response):
    by: str
    """The run, the base model or the day."""
    training_tokens: int = 0
    prefill_tokens: int = 0
    cached_prefill_tokens: int = 0
    sampled_tokens: int = 0
    stored_bytes: int = 0
    """What the checkpoints take; only where usage is by run."""


class ConsoleUsageResponse(Response):
    usage: list[ConsoleUsageItem]


class RunInQueue(RunQueueResponse):
    run: str
    is_running: bool


class ConsoleServerResponse(Response):
    version: str
    url: str
    started: float
    status: str
    """"ready", or why not."""
    device: str
    memory_bytes: int
    restarts: int
    running_samples: int
    storage: str = ""
    """Where weights are kept: "s3", "gs", "az" or "file"; empty for the server's data folder."""
    epoch: int | None = None
    """How often the lead has changed hands, where several servers share a store: the one at `url`
    has it. None for a server that is alone."""
    on_policy: str = ""
    """"exact" where log-probabilities of sampling and of training are the same bits, otherwise
    "close"."""
    models: list[str]
    refused_models: list[dict[str, str]]
    queues: list[RunInQueue]
    """The caller's runs that have something under way."""


class ClusterSlot(Response):
    """The place of one engine process."""

    slot: int
    """Its number."""
    role: str
    """"train", "sample" or "both"."""
    device: str
    state: str
    """"up", "starting", "restarting", "lost", "draining" or "drained"."""
    detail: str
    """Why it has no engine; empty while it has one."""
    models: int
    """How many train there, of all owners."""
    own_runs: list[str]
    """The caller's among them."""
    running_samples: int
    memory_bytes: int
    """The engine's memory, as it last reported it; the figures below are parts of it."""
    weights_bytes: int = 0
    """Of base models."""
    cache_bytes: int = 0
    """Of the keys and values of samples under way."""
    cache_limit_bytes: int = 0
    adapter_bytes: int = 0
    """Of adapters, their gradients and moments, and frozen samplers."""
    adapter_limit_bytes: int = 0
    """0 means no limit."""
    restarts: int
    ranks: int = 1
    """How many processes its engine divides the base models among."""
    host: str = ""
    """The machine of its engine; empty for a process of the server."""


class ClusterNode(Response):
    """A machine that engines are placed on."""

    node: str
    """Its id in the cluster."""
    address: str
    is_alive: bool
    cpus: float
    gpus: float
    memory_bytes: int


class ClusterResponse(Response):
    slots: list[ClusterSlot]
    nodes: list[ClusterNode] = []
    """Those of a Ray cluster, if the engines run on one."""
    trouble: str = ""
    """Why nothing new is placed; empty when nothing is in the way."""


class MoveModelRequest(Request):
    slot: int
    """The number of the slot in which the model is to train."""


class MoveModelResponse(Response):
    run: str
    before: int | None = None
    """The slot that it is in now; None while no engine holds it."""
    slot: int
    """The slot that it goes to between two of its operations."""


class ConsoleKey(Response):
    key_id: int
    name: str
    note: str
    created: float
    expires: float | None = None
    revoked: float | None = None
    is_current: bool
    """Whether this request was made with it."""


class ConsoleKeysResponse(Response):
    keys: list[ConsoleKey]


class ConsoleLoginRequest(Request):
    key: Annotated[str, Bounds(min_length=1, max_length=10_000)]
