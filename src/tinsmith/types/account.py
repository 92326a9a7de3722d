"""Who the caller is, what was done under the key, and what it used."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from tinsmith.types.convert import Tagged
from tinsmith.types.model import Request, Response


class WhoamiResponse(Response):
    user_urn: str
    org_urn: str
    email: str | None = None


class OrganizationDetails(Response):
    name: str


class UserDetails(Response):
    email: str


class ApiKeyDetails(Response):
    org_details: OrganizationDetails
    user_details: UserDetails


class SelfApiKeyResponse(Response):
    """The key that made the request."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


class AuditLogEntry(Response):
    timestamp: datetime
    event: str
    event_details: dict[str, object] = {}
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Response):
    entries: list[AuditLogEntry]


class GetBillingUsageRequest(Request):
    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(Response):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Response):
    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Response):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Response):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Response):
    type: Literal["storage"] = "storage"
    gigabyte_hours: float


BillingEventInfo = Annotated[
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent,
    Tagged("type"),
]


class BillingUsageEvent(Response):
    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Response):
    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(Response):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = {}
    cost_data_through: datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(Request):
    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(Response):
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Response):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
