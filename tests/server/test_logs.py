"""Log lines that a machine reads."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from tinsmith.server.logs import JsonFormatter

if TYPE_CHECKING:
    import pytest

    from tests.support.in_process_server import TestServer


async def test_log_lines_name_the_request_and_the_model(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = await server.api.model()
    request_id = await server.api.send_pass(model, 1)
    await server.api.result(request_id)
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    ended = [x for x in lines if x.get("request_id") == request_id and x.get("status") == "done"]
    assert ended[0]["model_id"] == model and ended[0]["kind"] == "forward_backward"
    assert ended[0]["seconds"] >= 0
