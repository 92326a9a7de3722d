"""Long lists, from the command line down to the requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.scripted_server import Answer, ScriptedServer
from tinsmith.cli.__main__ import cli

TOTAL = 250


@pytest.fixture
def service() -> Any:
    """A service with 250 training runs."""
    server = ScriptedServer()

    def runs(request: Any) -> Any:
        limit, offset = (int(request.query[name][0]) for name in ("limit", "offset"))
        page = [
            {
                "training_run_id": f"r{number}:train:0",
                "base_model": "m",
                "model_owner": "me",
                "is_lora": True,
                "lora_rank": 8,
                "last_request_time": "2026-01-01T00:00:00Z",
            }
            for number in range(offset, min(offset + limit, TOTAL))
        ]
        cursor = {"offset": offset, "limit": limit, "total_count": TOTAL}
        return Answer(200, {"training_runs": page, "cursor": cursor})

    server.default = lambda request: Answer(200, {})
    server.on("/api/v1/training_runs", runs)
    yield server
    server.close()


@pytest.mark.parametrize(("limit", "requests", "rows"), [(0, 3, 250), (130, 2, 130), (20, 1, 20)])
def test_a_list_is_fetched_page_by_page(service: Any, limit: int, requests: int, rows: int) -> None:
    """S83: 250 items in pages of 100 are three requests, and no more than asked for."""
    environment = {
        "TINKER_BASE_URL": service.url,
        "TINKER_API_KEY": f"tml-paging-{limit}",
        "TINKER_TELEMETRY": "0",
    }
    done = CliRunner().invoke(
        cli, ["--format", "json", "run", "list", "--limit", str(limit)], env=environment
    )
    assert done.exit_code == 0, done.output
    found = [run["training_run_id"] for run in json.loads(done.stdout)["runs"]]
    assert found == [f"r{number}:train:0" for number in range(rows)]
    pages = [(int(r.query["offset"][0])) for r in service.seen("/training_runs")]
    assert pages == [100 * number for number in range(requests)]
