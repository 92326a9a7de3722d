"""RestClient and AdminClient: what they ask and how they page. Bodies: see test_parity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from tests.client.conftest import rest_client
from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.admin import AdminClient
from tinsmith.client.rest import RestClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.warn import ExperimentalWarning
from tinsmith.errors import NotFoundError, TinkerError, ValidationError
from tinsmith.transport.config import Timing
from tinsmith.types import SessionSearchRequest


@pytest.fixture
def rest(service: ServiceClient) -> RestClient:
    return rest_client(service)


def run(n: int) -> dict[str, Any]:
    return {
        "training_run_id": f"run-{n}",
        "base_model": "m",
        "model_owner": "me",
        "is_lora": True,
        "last_request_time": "2026-01-01T00:00:00Z",
        "surprise": {"from": "a newer server"},
    }


def page_of_runs(request: Recorded) -> Answer:
    offset, limit = int(request.query["offset"][0]), int(request.query["limit"][0])
    runs = [run(n) for n in range(offset, min(offset + limit, 250))]
    cursor = {"offset": offset, "limit": limit, "total_count": 250}
    return Answer(200, {"training_runs": runs, "cursor": cursor})


def test_a_plain_loop_fetches_pages_as_it_goes(stub: Any, rest: RestClient) -> None:
    """S8, S84: 250 items, three requests; leaving early, one."""
    stub.on("/api/v1/training_runs", page_of_runs)
    runs = list(rest.iter_training_runs(page_size=100))
    assert [each.training_run_id for each in runs] == [f"run-{n}" for n in range(250)]
    assert stub.count("/training_runs") == 3
    for _ in rest.iter_training_runs(page_size=100):
        break
    assert stub.count("/training_runs") == 4


async def test_an_async_loop_does_too(stub: Any, rest: RestClient) -> None:
    stub.on("/api/v1/training_runs", page_of_runs)
    assert len([each async for each in rest.iter_training_runs(page_size=125)]) == 250
    assert stub.count("/training_runs") == 3  # the last page was full, so one more was asked for


def test_the_other_lists(stub: Any, rest: RestClient) -> None:
    stub.on("/api/v1/sessions", Answer(200, {"sessions": ["a", "b"]}))
    checkpoint = {
        "checkpoint_id": "weights/a",
        "checkpoint_type": "training",
        "time": "2026-01-01T00:00:00Z",
        "tinker_path": "tinker://r/weights/a",
    }
    stub.on("/api/v1/checkpoints", Answer(200, {"checkpoints": [checkpoint]}))
    assert list(rest.iter_sessions()) == ["a", "b"]
    assert [each.checkpoint_id for each in rest.iter_checkpoints()] == ["weights/a"]
    with pytest.raises(ValueError, match="page_size"):
        rest.iter_sessions(page_size=0)


def test_removing_a_ttl_sends_null(stub: Any, rest: RestClient) -> None:
    """S23"""
    path = "/api/v1/training_runs/r/checkpoints/weights/a/ttl"
    stub.on(path, Answer(204, b""))
    assert rest.set_checkpoint_ttl_from_tinker_path("tinker://r/weights/a", None).result(5) is None
    assert stub.seen("/ttl")[0].json() == {"ttl_seconds": None}
    assert stub.seen("/ttl")[0].headers["x-sdk-method"] == "set_checkpoint_ttl_from_tinker_path"


def test_bodyless_posts_state_their_length(stub: Any, rest: RestClient) -> None:
    stub.on("/api/v1/training_runs/r:train:0/checkpoints/weights/a/publish", Answer(204, b""))
    asyncio.run(rest.publish_checkpoint_from_tinker_path_async("tinker://r:train:0/weights/a"))
    assert stub.seen("/publish")[0].headers["content-length"] == "0"


def test_malformed_paths_are_refused_here(stub: Any, rest: RestClient) -> None:
    for path in (
        "weights/a",
        "tinker://r/weights",
        "tinker://r/nothing/a",
        "tinker://r/weights/a/b",
    ):
        with pytest.raises(ValidationError):
            rest.delete_checkpoint_from_tinker_path(path)
    with pytest.raises(ValueError, match="external"):
        rest.get_external_weights_urls("tinker://r/weights/a")
    assert stub.requests == []


def test_errors_are_those_of_the_status(stub: Any, rest: RestClient) -> None:
    stub.on("/api/v1/training_runs/r", Answer(404, {"detail": "no such run"}))
    with pytest.raises(NotFoundError, match="no such run") as caught:
        rest.get_training_run("r").result(5)
    assert caught.value.body == {"detail": "no such run"} and caught.value.status_code == 404


def test_a_trace_is_waited_for(stub: Any, make_service: Callable[..., ServiceClient]) -> None:
    rest = rest_client(make_service(timing=Timing(trace_seconds=0.01)))
    path = "/api/v1/sessions/s/trace_export"
    stub.on(path, Answer(200, {"status": "pending"}), Answer(200, {"status": "ready", "url": "u"}))
    assert rest.export_session_trace("s").result(5) == "u"
    stub.on(path, Answer(200, {"status": "failed", "error": "too big"}))
    with pytest.raises(TinkerError, match="too big"):
        rest.export_session_trace("s").result(5)


def test_who_one_is_cannot_be_read_from_a_key_where_there_are_no_tokens(
    stub: Any, rest: RestClient
) -> None:
    stub.on("/api/v1/auth/token", Answer(404, {"detail": "no such path"}))
    with pytest.raises(TinkerError, match="none for a key"):
        rest.whoami().result(5)


def test_copies_keep_one_key_over_all_attempts_and_hide_the_token(
    stub: Any, rest: RestClient
) -> None:
    stub.on(
        "/api/v1/copy_weights", Answer(503), Answer(200, {"tinker_path": "tinker://x/weights/a"})
    )
    path = rest.copy_weights("tinker://r/weights/a", "p", weights_access_token="secret").result(5)
    assert path == "tinker://x/weights/a"
    first, second = stub.seen("/copy_weights")
    assert first.headers["x-idempotency-key"] == second.headers["x-idempotency-key"]
    assert first.headers["x-tinker-weights-access-token"] == "secret"
    assert "secret" not in first.body.decode()
    with pytest.raises(ValueError, match="TINKER_PROJECT_ID"):
        rest.copy_weights("tinker://r/weights/a")


def test_unsettled_and_moved_methods_say_so(stub: Any, rest: RestClient) -> None:
    """S93"""
    stub.on("/api/v1/sessions/search", Answer(200, {"sessions": []}))
    with pytest.warns(ExperimentalWarning):
        assert rest.search_sessions(SessionSearchRequest()).result(5).sessions == []
    stub.on("/api/v1/audit", Answer(200, {"entries": []}))
    with pytest.warns(FutureWarning, match="AdminClient"):
        rest.get_audit_log().result(5)


def test_the_audit_log_of_a_day(stub: Any, make_service: Callable[..., ServiceClient]) -> None:
    stub.on("/api/v1/audit", Answer(200, {"entries": []}))
    admin = AdminClient(rest_client(make_service()).holder)
    admin.get_audit_log("teams", date(2026, 1, 15)).result(5)
    assert stub.seen("/audit")[0].query == {"event_type": ["teams"], "day": ["2026-01-15"]}
