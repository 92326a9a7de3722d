"""AdminClient: what an organization's administrators may see."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from datetime import date, datetime
from typing import TypeVar

from tinsmith.client.futures import AwaitableConcurrentFuture
from tinsmith.client.rest import AuditEventType
from tinsmith.client.sessionless import SessionlessClient
from tinsmith.client.twins import documented_twins
from tinsmith.types import (
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    GetCurrentCheckpointStorageUsageRequest,
)
from tinsmith.wire import endpoints
from tinsmith.wire.endpoints import Endpoint

Resp = TypeVar("Resp")


@documented_twins
class AdminClient(SessionlessClient):
    """Audit log, billing, storage. Made like a `RestClient`; needs an administrator's credential.

    log = tinsmith.AdminClient().get_audit_log(day=date(2026, 1, 15)).result()
    """

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> Future[AuditLogResponse]:
        """What happened on a day (UTC, default today), to one kind of thing or all."""
        query: dict[str, object] = {"event_type": event_type}
        if day is not None:
            query["day"] = day.isoformat()
        return self._get(endpoints.AUDIT, "get_audit_log", query)

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> AuditLogResponse:
        return await AwaitableConcurrentFuture(self.get_audit_log(event_type, day))

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[BillingUsageResponse]:
        """Usage by the hour. Both ends are whole UTC hours, at most 14 days apart."""
        request = GetBillingUsageRequest(starting_on=starting_on, ending_before=ending_before)  # type: ignore[arg-type]  # text is read as a date
        return self._get(endpoints.USAGE_EVENTS, "get_billing_usage", request.to_wire())

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> BillingUsageResponse:
        return await AwaitableConcurrentFuture(self.get_billing_usage(starting_on, ending_before))

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[CurrentCheckpointStorageUsageResponse]:
        """What checkpoints take up now, in all projects or one."""
        request = GetCurrentCheckpointStorageUsageRequest(project_id=project_id)
        return self._get(
            endpoints.CURRENT_STORAGE,
            "get_current_checkpoint_storage_usage",
            request.to_wire(),
        )

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        return await AwaitableConcurrentFuture(
            self.get_current_checkpoint_storage_usage(project_id)
        )

    def _get(
        self, endpoint: Endpoint[None, Resp], sdk_method: str, query: Mapping[str, object]
    ) -> Future[Resp]:
        return self.holder.submit(
            self.holder.api.call, endpoint, None, query=query, sdk_method=sdk_method
        ).future()
