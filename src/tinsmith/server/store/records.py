"""The store's records: one plain value per row.

The tables in `schema` are made of these fields, so a column is written here and nowhere else (and
once in the migration that adds it). Moments are seconds since 1970 (UTC).

The log of a model is its operations in the order of `seq_id`; the row of seq_id 0 created it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from tinsmith.disk import FileRecord

R = TypeVar("R")

OperationStatus = Literal["pending", "done", "failed"]
SessionState = Literal["active", "finished", "cancelled"]
"""Finished by its client; cancelled when the store was set back to an earlier moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityRecord:
    """Which store this is; the data folder that belongs to it says the same."""

    store_id: str
    epoch: int
    """Counts up now and then while the store is used, so that an older copy of either is noticed,
    also after a power cut."""
    position: int = 0
    """Counts the commits. The folder is told of each before anybody is answered, so that an older
    copy of the store is noticed that was made a moment before the server was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedIdentity(IdentityRecord):
    """What a data folder or storage says of the store that it belongs to."""

    expected_epoch: int = 0
    """How far servers were about to count up in the store, where that is above `epoch`: each wrote
    it down before it did so, and may have died before it could write down that it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """Which of several servers runs the engines, and until when it does unless it says so again."""

    name: str
    holder: str
    """A random id of the server's process."""
    place: str
    """The machine and the port; a new process there knows that the old one is gone."""
    url: str
    """Where the other servers reach it."""
    epoch: int
    """Counts up each time that the lease is taken. What is written under a lower one is refused."""
    expires_at: float
    """By the database's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An API key. Only its hash is kept."""

    key_id: int = 0
    owner: str
    name: str
    note: str = ""
    key_hash: str
    created_at: float
    revoked_at: float | None = None
    expires_at: float | None = None

    def is_good(self, now: float) -> bool:
        """Whether it still opens anything."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    session_id: str
    owner: str
    created_at: float
    last_seen_at: float
    sdk_version: str
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    project_id: str | None = None
    display_name: str | None = None
    state: SessionState = "active"
    finish_reason: str | None = None
    finish_detail: str | None = None

    @property
    def why_ended(self) -> str:
        """Why nothing new may begin in it, once it is no longer active."""
        if self.state == "cancelled":
            return f"session {self.session_id} has ended: {self.finish_detail}"
        return f"session {self.session_id} is finished; start another"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A model, which is also a training run. Copies of checkpoints have no session."""

    model_id: str
    session_id: str | None
    model_seq_id: int | None
    owner: str
    base_model: str
    lora: dict[str, Any]
    optimizer: dict[str, Any]
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    created_at: float
    last_request_at: float
    snapshot_seq_id: int = -1
    """The last operation whose effect the snapshot holds; -1 when there is none."""
    snapshot_weights_id: str | None = None
    previous_snapshot_seq_id: int = -1
    """The same of the snapshot before, which is kept in case the newest turns out damaged; the
    payloads of the log are kept from here on."""
    previous_snapshot_weights_id: str | None = None
    trimmed_seq_id: int = -1
    """The log has no operations up to this one any more: they ended long ago."""
    trimmed_entry_id: int = 0
    """The highest number that a step had which is no longer in the log."""
    closed_seq_id: int = -1
    """Numbers up to this one that are not in the log were waited for in vain; they may no longer
    come."""
    is_corrupted: bool = False
    retired_at: float | None = None
    """When the state was dropped because nobody had used it for very long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One entry of a model's log. `payload` is the request as it came."""

    request_id: str
    model_id: str
    seq_id: int
    owner: str
    kind: str
    content_type: str
    payload: bytes | None = None
    payload_file: str | None = None
    payload_bytes: int = 0
    num_tokens: int = 0
    created_at: float
    status: OperationStatus = "pending"
    finished_at: float | None = None
    result_type: str | None = None
    result: bytes | None = None
    result_file: str | None = None
    result_bytes: int = 0
    retrieved_at: float | None = None
    error: str | None = None
    category: str | None = None
    weights_id: str | None = None
    """The weights that a load takes, kept for as long as the load may be replayed."""
    digest: str | None = None
    """Tells a request that is sent again from another with the same number; operations of release
    0.1 have none."""
    took_effect: bool = False
    """Whether the engine carried it out, so that a rebuilt model must have seen it as well. A step
    that failed for its gradient did: it dropped that gradient."""

    @property
    def log_fields(self) -> dict[str, Any]:
        """What a line in the log should say about the operation."""
        return {
            "request_id": self.request_id,
            "model_id": self.model_id,
            "seq_id": self.seq_id,
            "kind": self.kind,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRecord:
    """A folder of weights. Checkpoints, samplers, snapshots and loads refer to it."""

    weights_id: str
    kind: str
    base_model: str
    lora: dict[str, Any]
    optimizer: dict[str, Any]
    size_bytes: int
    created_at: float
    deleted_checkpoint: dict[str, Any] | None = None
    """The fields of the last checkpoint with these weights that was deleted, for bringing it
    back from the trash."""
    files: dict[str, Any] | None = None
    """Size and checksum of each file; None of weights that an earlier release wrote."""
    lost: str | None = None
    """Why these weights cannot be had any more, where that was found out."""

    @property
    def file_records(self) -> dict[str, FileRecord]:
        return {name: FileRecord(**record) for name, record in (self.files or {}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A name for weights: `tinker://<model_id>/<checkpoint_id>`."""

    model_id: str
    checkpoint_id: str
    owner: str
    checkpoint_type: str
    weights_id: str
    size_bytes: int
    created_at: float
    is_public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: float | None = None

    @property
    def tinker_path(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """A sampling session: a base model, or frozen weights of it."""

    sampler_id: str
    session_id: str
    sampling_session_seq_id: int
    owner: str
    base_model: str
    model_path: str | None = None
    weights_id: str | None = None
    num_clients: int = 1
    created_at: float
    model_id: str | None = None
    """The run that the weights come from, where it is the owner's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLossRecord:
    loss_id: str
    request_id: str
    """What the client asks for the result of its upload by."""
    session_id: str
    custom_loss_seq_id: int
    owner: str
    name: str
    definition: dict[str, Any]
    num_bytes: int
    """Of the definition, as JSON."""
    created_at: float
    used_at: float
    """When a pass with it was last recorded, to the hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    owner: str
    at: float
    area: str
    event: str
    details: dict[str, Any] = field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """Tokens (or checkpoints) counted for one owner in one hour."""

    owner: str
    hour: int
    base_model: str
    session_id: str
    kind: str
    count: int
    model_id: str = ""
    """The run that they were for; empty where there is none."""


StepSource = Literal["operation", "posted"]


class StepRecord(NamedTuple):
    """A point of a run's curves: an operation that ended, or metrics that a client posted.

    Written in the commit that ends the operation, into its entry in the log, and kept when that is
    gone. One is made for every operation, so it is of the kind that is made quickest.
    """

    model_id: str
    seq_id: int
    """The operation's number, or the step that the client gave."""
    at: float
    """When it ended."""
    kind: str
    source: StepSource = "operation"
    status: OperationStatus = "done"
    loss_fn: str | None = None
    num_tokens: int = 0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0
    metrics: str = "{}"
    """JSON: a number by name; those that are not finite as words."""
    error: str | None = None
    made: str | None = None
    """The checkpoint, or the id of the sampler, that it brought into being."""
    entry_id: int = 0
    """Counts up over all runs in the order of recording; where a reader of events goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """The steps of a run from `block * size` on, `size` of them, drawn together."""

    model_id: str
    source: StepSource
    size: int
    block: int
    summary: str
    """JSON; see `blocks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRecord:
    """Up to where a run's steps are in blocks."""

    model_id: str
    source: StepSource
    up_to: int
    """The first number that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRecord:
    """One sequence of a pass, or one answer; kept only where whoever runs the server wants it."""

    entry_id: int = 0
    owner: str
    model_id: str
    seq_id: int
    num_bytes: int
    body: bytes
    """JSON: the tokens that were predicted or sampled, and for each what is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStatsRecord:
    """What a sampler has given so far."""

    sampler_id: str
    owner: str
    model_id: str
    """The run that the weights come from; empty where there is none."""
    num_requests: int
    num_sequences: int
    prompt_tokens: int
    sampled_tokens: int
    longest_tokens: int
    logprob_sum: float
    num_stopped: int
    """Sequences that ended by themselves; the others ran into their limit of tokens."""
    first_at: float
    last_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserSessionRecord:
    """A browser that was let in with a key. Only the hash of its cookie is kept."""

    cookie_hash: str
    key_id: int
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of an operation, and what it brought into being; recorded together or not at all."""

    request_id: str
    status: OperationStatus
    finished_at: float
    result_type: str | None = None
    result: bytes | None = None
    error: str | None = None
    category: str | None = None
    took_effect: bool = False
    used_weights_id: str | None = None
    weights: WeightsRecord | None = None
    checkpoint: CheckpointRecord | None = None
    sampler: SamplerRecord | None = None
    audit: AuditRecord | None = None
    step: StepRecord | None = None
    """What stays of it when the result is gone."""
    examples: Sequence[ExampleRecord] = ()
    """A few of the sequences it saw, to be looked at."""


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """A part of a list, and how long the whole is."""

    items: Sequence[R]
    total: int
