"""Telemetry is taken, whatever it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.in_process_server import Api


async def test_telemetry_is_always_accepted(api: Api) -> None:
    for body in (b"not json", b'{"events": [], "platform": "x"}'):
        assert await api.ok("/telemetry", body) == {"status": "accepted"}
