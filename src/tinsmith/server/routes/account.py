"""The caller's key, what was done with it, and what it used.

This is a self-hosted service: usage is counted in tokens and bytes, and every amount of money
is absent rather than invented.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from time import time as now
from typing import Any

from starlette.requests import Request

from tinsmith.errors import ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal, moment
from tinsmith.server.edge.lists import check_listed_bytes, listed
from tinsmith.server.edge.routing import bare_route
from tinsmith.server.service import Service
from tinsmith.server.store.records import AuditRecord, UsageRecord
from tinsmith.types import (
    ApiKeyDetails,
    AuditLogEntry,
    AuditLogResponse,
    BillingUsageEvent,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    OrganizationDetails,
    SelfApiKeyResponse,
    UserDetails,
)
from tinsmith.wire import endpoints, json

AREAS = ("all", "checkpoints", "projects", "teams", "organizations")
_LONGEST_USAGE_DAYS = 14
_GIGABYTE = 1024**3
_READ_TOGETHER = 200


async def get_own_key(service: Service, caller: Caller, request: Request) -> SelfApiKeyResponse:
    return SelfApiKeyResponse(
        key_id=caller.key_id,
        name=caller.key_name,
        note=caller.key_note,
        details=ApiKeyDetails(
            org_details=OrganizationDetails(name=caller.owner),
            user_details=UserDetails(email=""),
        ),
    )


async def delete_own_key(service: Service, caller: Caller, request: Request) -> None:
    if not service.config.auth:
        raise Refusal(400, "this server runs without authentication; there is no key to revoke")
    if caller.token_expires_at is not None:
        raise Refusal(403, "a token cannot revoke the key that it was made from; send the key")
    await service.store.keys.revoke(caller.key_id, now())
    service.auth.forget_keys()


async def audit(service: Service, caller: Caller, request: Request) -> AuditLogResponse:
    area = request.query_params.get("event_type", "all")
    if area not in AREAS:
        raise ValidationError(f"must be one of {', '.join(AREAS)}, got {area[:40]!r}", "event_type")
    since, until = 0.0, now() + 1
    if (day := request.query_params.get("day")) is not None:
        try:
            since = datetime.combine(date.fromisoformat(day), time(), UTC).timestamp()
        except ValueError:
            raise ValidationError(f"expected YYYY-MM-DD, got {day[:40]!r}", "day") from None
        until = since + timedelta(days=1).total_seconds()
    wanted = None if area == "all" else area
    read = partial(service.store.account.list_audit, caller.owner, wanted, since, until)
    entries = await listed(request, read, "ask for a `day`, or for parts with limit and offset")
    return await service.texts.run(caller.owner, _audit_message, entries)


async def usage_events(service: Service, caller: Caller, request: Request) -> BillingUsageResponse:
    start = _hour(request, "starting_on")
    end = _hour(request, "ending_before")
    if not timedelta(0) < end - start <= timedelta(days=_LONGEST_USAGE_DAYS):
        raise ValidationError(
            f"must be after starting_on and at most {_LONGEST_USAGE_DAYS} days later",
            "ending_before",
        )
    await service.usage.flush()
    hours = [int(moment.timestamp() // 3600) for moment in (start, end)]
    read = partial(service.store.account.list_usage, caller.owner, *hours)
    found = await listed(
        request, read, "ask for a shorter time, or for parts with limit and offset"
    )
    sessions = await _metadata_of_sessions(service, caller, found)
    return await service.texts.run(caller.owner, _usage_message, caller, found, sessions)


async def _metadata_of_sessions(
    service: Service, caller: Caller, usage: Sequence[UsageRecord]
) -> dict[str, Any]:
    """By the id of each session that used something, where it is known."""
    ids = sorted({u.session_id for u in usage if u.session_id})
    found: dict[str, Any] = dict.fromkeys(ids)
    num_bytes = 0
    for start in range(0, len(ids), _READ_TOGETHER):
        some = ids[start : start + _READ_TOGETHER]
        read = await service.store.sessions.metadata_of(caller.owner, some)
        num_bytes += await service.texts.run(caller.owner, _num_bytes, read)
        check_listed_bytes(num_bytes)
        found.update(read)
    return found


def _num_bytes(metadata: dict[str, Any]) -> int:
    return len(json.encode([m for m in metadata.values() if m]))


def _usage_message(
    caller: Caller, usage: Sequence[UsageRecord], sessions: dict[str, Any]
) -> BillingUsageResponse:
    shown = {
        session_id: {"user_metadata": metadata and {k: str(v) for k, v in metadata.items()}}
        for session_id, metadata in sessions.items()
    }
    return BillingUsageResponse.model_validate(
        {"data": [_usage_event(caller, u) for u in usage], "sessions": shown}
    )


def _audit_message(entries: Sequence[AuditRecord]) -> AuditLogResponse:
    return AuditLogResponse(entries=[_entry(e) for e in entries])


async def current_storage(
    service: Service, caller: Caller, request: Request
) -> CurrentCheckpointStorageUsageResponse:
    count, size = await service.store.checkpoints.storage_of_owner(caller.owner)
    item = CurrentCheckpointStorageUsageItem(
        project_id=request.query_params.get("project_id"),
        org_user_urn=caller.user_urn,
        user_name=caller.owner,
        checkpoint_count=count,
        size_bytes=size,
        size_gigabytes=size / _GIGABYTE,
    )
    return CurrentCheckpointStorageUsageResponse(data=[item] if count else [])


def _entry(entry: AuditRecord) -> AuditLogEntry:
    return AuditLogEntry(
        timestamp=moment(entry.at),
        event=entry.event,
        event_details=entry.details,
        model_id=entry.model_id,
        tinker_path=entry.tinker_path,
    )


def _usage_event(caller: Caller, usage: UsageRecord) -> BillingUsageEvent:
    start = moment(usage.hour * 3600)
    if usage.kind == "training":
        info: dict[str, Any] = {"type": "training", "token_count": usage.count}
    elif usage.kind == "sampling_sample":
        info = {"type": "sampling_sample", "token_count": usage.count}
    else:
        is_cached = usage.kind == "sampling_prefill_cached"
        info = {"type": "sampling_prefill", "cached": is_cached, "token_count": usage.count}
    return BillingUsageEvent.model_validate(
        {
            "bucket_start": start,
            "bucket_end": start + timedelta(hours=1),
            "base_model": usage.base_model,
            "user_id": caller.user_urn,
            "user_name": caller.owner,
            "session_id": usage.session_id or None,
            "event_info": info,
        }
    )


def _hour(request: Request, name: str) -> datetime:
    text = request.query_params.get(name, "")
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValidationError(f"expected an RFC 3339 time, got {text[:40]!r}", name) from None
    if (moment.minute, moment.second, moment.microsecond) != (0, 0, 0):
        raise ValidationError(f"must be a whole hour, got {text[:40]!r}", name)
    return moment


ROUTES = [
    bare_route(endpoints.GET_OWN_KEY, get_own_key),
    bare_route(endpoints.DELETE_OWN_KEY, delete_own_key),
    bare_route(endpoints.AUDIT, audit),
    bare_route(endpoints.USAGE_EVENTS, usage_events),
    bare_route(endpoints.CURRENT_STORAGE, current_storage),
]
