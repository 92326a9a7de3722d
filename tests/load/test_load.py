"""The server under load for a few seconds, with bounds that hold on a busy machine.

The real thing is `make load`: 500 clients, 4,000 held polls, 1,000 requests a second.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

_SPEC = importlib.util.spec_from_file_location(
    "load_driver", Path(__file__).parents[2] / "benchmarks" / "load.py"
)
assert _SPEC is not None and _SPEC.loader is not None
load = importlib.util.module_from_spec(_SPEC)
sys.modules["load_driver"] = load
_SPEC.loader.exec_module(load)

CLIENTS, POLLS, RATE = 40, 400, 200.0


def _run(folder: Path, *, seconds: float, beside: str | None = None) -> dict[str, Any]:
    server = load.Server(folder / "data", CLIENTS, fake_token_seconds=2)
    try:
        return uvloop.run(  # type: ignore[no-any-return]
            load.drive(
                server, seconds=seconds, polls=POLLS, rate=RATE, token_seconds=2, beside=beside
            )
        )
    finally:
        server.stop()


def test_a_steady_load_is_carried(tmp_path: Path) -> None:
    found = _run(tmp_path, seconds=9)
    assert found["errors"] == {}
    assert found["polls_outstanding"]["min"] > 0.8 * POLLS
    assert found["requests_per_second"] > 0.6 * RATE
    assert found["latency_ms"]["optim_step"]["p99"] < 1000
    memory = found["server_memory_mb"]
    assert memory["last_third"] < 1.1 * memory["first_third"] + 10
    descriptors = found["server_descriptors"]
    assert descriptors["max"] < descriptors["min"] + 20


@pytest.mark.parametrize("beside", ["large", "silent", "flood"])
def test_somebody_who_means_harm_does_not_stop_the_others(tmp_path: Path, beside: str) -> None:
    found = _run(tmp_path, seconds=6, beside=beside)
    assert found["errors"] == {}
    assert found["harm"], "the harm was done"
    assert found["requests_per_second"] > 0.4 * RATE
    assert found["latency_ms"]["optim_step"]["p90"] < 2000
    if beside == "flood":
        refused = found["harm"]["flood 429"]["count"]
        assert refused > 0, "who sends too fast is told to wait"
