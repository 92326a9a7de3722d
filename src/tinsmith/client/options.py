"""Types that programs written for the official client name in their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True)
class Timeout:
    """Time limits of a request in seconds; None means none."""

    timeout: float | None = 60.0
    connect: float | None = 5.0
    read: float | None = None
    write: float | None = None
    pool: float | None = None


class RequestOptions(TypedDict, total=False):
    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
