"""The store's interface and its records.

A record is a plain value, one per row. Moments are seconds since the epoch (UTC). Every method
that writes returns only after what it wrote is on disk; reads see all earlier writes.

The log of a model is its operations in the order of `seq_id`; the row of seq_id 0 created it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tinsmith.errors import TinkerError


class StoreConflictError(TinkerError):
    """What was to be written contradicts what is there; writing it again will not help."""


class StoreInUseError(TinkerError):
    """Another server works on the same database."""


class StoreUnavailableError(TinkerError):
    """The database or its disk cannot be read or written now. Trying again later may help, and
    what was to be written may be there or not."""


class StoreDamagedError(TinkerError):
    """What is on disk is not what was written."""


class StoreTooNewError(TinkerError):
    """A later version of this software has written the database."""


OperationStatus = Literal["pending", "done", "failed"]
SessionState = Literal["active", "finished"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLossRecord:
    loss_id: str
    session_id: str
    custom_loss_seq_id: int
    owner: str
    name: str
    definition: dict[str, Any]
    created_at: float


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
    used_weights_id: str | None = None
    weights: WeightsRecord | None = None
    checkpoint: CheckpointRecord | None = None
    sampler: SamplerRecord | None = None
    audit: AuditRecord | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list, and how long the whole is."""

    items: Sequence[Any]
    total: int


class Store(Protocol):
    async def prepare(self) -> None:
        """For the one server of this store: keep others out, and clear away what a write that
        did not end left behind. Tools that only read or add keys do without."""
        ...

    async def close(self) -> None: ...

    async def secret(self, name: str) -> bytes:
        """32 random bytes, made on first use and the same ever after."""
        ...

    # Keys

    async def add_key(self, key: KeyRecord) -> KeyRecord: ...
    async def list_keys(self) -> Sequence[KeyRecord]: ...
    async def revoke_key(self, key_id: int, at: float) -> bool: ...

    # Sessions

    async def add_session(self, session: SessionRecord) -> None: ...
    async def get_session(self, session_id: str) -> SessionRecord | None: ...
    async def list_sessions(self, owner: str, limit: int, offset: int) -> Page: ...
    async def active_sessions(self) -> Sequence[SessionRecord]: ...
    async def sessions_of(self, owner: str) -> Sequence[SessionRecord]: ...
    async def set_session(self, session_id: str, values: Mapping[str, Any]) -> None: ...
    async def touch_sessions(self, seen: Mapping[str, float]) -> None: ...

    # Models and their logs

    async def record(
        self, operation: OperationRecord, model: ModelRecord | None = None
    ) -> tuple[OperationRecord, bool]:
        """Enter an operation (and the model that it creates) into the log.

        When its (model_id, seq_id) is taken, nothing changes, and the answer is the first
        operation and False.
        """
        ...

    async def finish(self, finishes: Sequence[Finish]) -> None:
        """Record ends, all or none. An operation that has ended already is left as it is."""
        ...

    async def get_operation(self, request_id: str) -> OperationRecord | None: ...
    async def read_log(self, model_id: str, after_seq_id: int) -> Sequence[OperationRecord]:
        """The operations above `after_seq_id`, in order, without payloads and results."""
        ...

    async def read_payload(self, request_id: str) -> bytes: ...
    async def models_with_pending(self) -> Sequence[str]: ...
    async def get_model(self, model_id: str) -> ModelRecord | None: ...
    async def list_models(
        self, owner: str, limit: int, offset: int, project_id: str | None = None
    ) -> Page: ...
    async def models_of_session(self, session_id: str) -> Sequence[ModelRecord]: ...
    async def set_model(self, model_id: str, values: Mapping[str, Any]) -> None: ...
    async def record_snapshot(self, model_id: str, seq_id: int, weights: WeightsRecord) -> None:
        """Make `weights` the model's snapshot, keep the one before it as the previous one, and
        drop the payloads that are older than that."""
        ...

    async def revert_snapshot(self, model_id: str) -> None:
        """Forget the model's snapshot, which is damaged: the previous one takes its place."""
        ...

    async def forgotten_models(self, seen_before: float) -> Sequence[str]:
        """Models with a state whose sessions have been silent since before a moment."""
        ...

    async def retire_model(self, model_id: str, at: float) -> None:
        """Drop a model's snapshot and what is left of its log's payloads."""
        ...

    async def mark_retrieved(self, retrieved: Mapping[str, float]) -> None: ...
    async def drop_results(
        self, *, retrieved_before: float, finished_before: float, max_bytes: int
    ) -> int:
        """Forget results that were fetched, or ended, before a moment, and the oldest beyond
        `max_bytes`; how many there were."""
        ...

    # Weights, checkpoints, samplers

    async def get_weights(self, weights_id: str) -> WeightsRecord | None: ...
    async def list_weights(self) -> Sequence[str]:
        """The ids of all weights."""
        ...

    async def unreferenced_weights(self) -> Sequence[str]:
        """Weights that no checkpoint, sampler, snapshot or replayable load refers to."""
        ...

    async def forget_weights(self, weights_ids: Sequence[str]) -> Sequence[str]:
        """Forget those of them that are still not referred to; which they were."""
        ...

    async def hold_weights(self, request_id: str, weights_id: str) -> bool:
        """Keep weights for an operation that is about to use them; whether they are there."""
        ...

    async def add_checkpoint(
        self, checkpoint: CheckpointRecord, model: ModelRecord | None, audit: AuditRecord
    ) -> None: ...
    async def get_checkpoint(
        self, model_id: str, checkpoint_id: str
    ) -> CheckpointRecord | None: ...
    async def list_checkpoints(self, model_id: str) -> Sequence[CheckpointRecord]: ...
    async def list_owner_checkpoints(self, owner: str, limit: int, offset: int) -> Page: ...
    async def set_checkpoint(
        self, model_id: str, checkpoint_id: str, values: Mapping[str, Any], audit: AuditRecord
    ) -> None: ...
    async def delete_checkpoint(
        self, model_id: str, checkpoint_id: str, audit: AuditRecord
    ) -> bool: ...
    async def expired_checkpoints(self, now: float) -> Sequence[CheckpointRecord]: ...
    async def storage_of(self, owner: str) -> tuple[int, int]:
        """How many checkpoints an owner has, and their bytes."""
        ...

    async def add_sampler(self, sampler: SamplerRecord) -> SamplerRecord:
        """The sampler, or the earlier one with the same session and sequence number."""
        ...

    async def get_sampler(self, sampler_id: str) -> SamplerRecord | None: ...
    async def samplers_of_session(self, session_id: str) -> Sequence[SamplerRecord]: ...
    async def join_sampler(self, sampler_id: str) -> int:
        """A number for one more client of the sampler; the first client has 0."""
        ...

    async def silent_sessions_with_samplers(self, seen_before: float) -> Sequence[str]: ...
    async def forget_samplers(self, session_id: str) -> None: ...

    # Custom losses

    async def add_custom_loss(
        self, loss: CustomLossRecord, operation: OperationRecord
    ) -> OperationRecord:
        """Keep the loss with its finished operation; the answer is the first of its number."""
        ...

    async def get_custom_loss(self, loss_id: str) -> CustomLossRecord | None: ...

    # Account

    async def add_audit(self, entry: AuditRecord) -> None: ...
    async def list_audit(
        self, owner: str, area: str | None, since: float, until: float
    ) -> Sequence[AuditRecord]: ...
    async def add_usage(self, usage: Sequence[UsageRecord]) -> None: ...
    async def list_usage(
        self, owner: str, first_hour: int, end_hour: int
    ) -> Sequence[UsageRecord]: ...
