"""When an engine holds too much, and idle models have to go to disk."""

from __future__ import annotations

import pytest

from tinsmith.engine.base import Health
from tinsmith.server.operations.residence import is_full


@pytest.mark.parametrize(
    ("health", "max_bytes", "wanted"),
    [
        (Health(alive=True, memory_bytes=10), None, False),
        (Health(alive=True, memory_bytes=10), 10, False),
        (Health(alive=True, memory_bytes=11), 10, True),
        (Health(alive=True, adapter_bytes=11), None, False),
        (Health(alive=True, adapter_bytes=10, adapter_limit_bytes=10), None, False),
        (Health(alive=True, adapter_bytes=11, adapter_limit_bytes=10), None, True),
        (Health(alive=True, adapter_bytes=11, adapter_limit_bytes=10), 100, True),
    ],
)
def test_an_engine_is_full_beyond_its_limit_or_when_adapters_exceed_their_share(
    health: Health, max_bytes: int | None, wanted: bool
) -> None:
    assert is_full(health, max_bytes) == wanted
