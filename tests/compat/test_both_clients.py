"""One program, the official client and ours, two identical servers: the same requests, and results
that are equal to the last bit.

S110, S114: the engine is the real one in deterministic mode. Requests are compared after replacing
the session's id, which the server draws.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import recording_proxy
from tests.support.child import ended_well
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.support.server_process import ServerProcess

pytest.importorskip("tinker")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SESSION_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NEW_ID = "00000000-0000-0000-0000-000000000000"
HEADERS = ("accept", "content-type", "x-tinker-request-type", "x-tinker-sampling-backpressure")
POLLS = ("/retrieve_future", "/retrieve_futures")


def short_chunks(path: str, body: bytes) -> bytes:
    """Two datums to a chunk, so that ten make five."""
    if not path.endswith("/client/config"):
        return body
    return json.dumps({**json.loads(body), "fwdbwd_max_chunk_len": 2}).encode()


def run(server: ServerProcess, sdk: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the program computed, and what it sent."""
    proxy = recording_proxy.RecordingProxy(server.url, short_chunks)
    environment = {
        **os.environ,
        **server.script_environment,
        "TINKER_BASE_URL": proxy.url,
        "TINKER_API_KEY": server.key,
        "TINKER_TELEMETRY": "0",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "scripts" / "either_client.py"), sdk],
            capture_output=True,
            text=True,
            env=environment,
            timeout=180,
        )
    finally:
        requests = list(proxy.requests)
        proxy.close()
    assert ended_well(done.returncode, done.stderr), (
        sdk,
        done.stderr[-3000:],
        server.log()[-3000:],
    )
    return json.loads(done.stdout.splitlines()[-1]), [comparable(each) for each in requests]


def comparable(request: Any) -> dict[str, Any]:
    path = request.path.removeprefix("/api/v1")
    body: Any = None
    if path == "/forward_backward":
        # Ids have one length, so that replacing one leaves the message's framing whole.
        body = proto.decode_pass(re.sub(SESSION_ID.pattern.encode(), NEW_ID.encode(), request.body))
    elif request.body:
        body = json.loads(SESSION_ID.sub(NEW_ID, request.body.decode()))
    return {
        "method": request.method,
        "path": SESSION_ID.sub(NEW_ID, path),
        "query": request.query,
        "headers": {name: request.headers[name] for name in HEADERS if name in request.headers},
        "body": body,
    }


def in_order(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without polls and heartbeats, whose number is a matter of time. The chunks of a pass may
    overtake each other, and only they."""
    kept = [each for each in trace if each["path"] not in (*POLLS, "/session_heartbeat")]
    done = 0
    while done < len(kept):
        end = done
        while end < len(kept) and kept[end]["path"] == "/forward_backward":
            end += 1
        kept[done:end] = sorted(kept[done:end], key=lambda each: each["body"].seq_id)
        done = max(end, done + 1)
    # Each connection of the official client asks for the config; ours asks once.
    started: set[str] = set()
    return [
        each
        for each in kept
        if not each["path"].startswith("/client/")
        or (each["path"] not in started and not started.add(each["path"]))  # type: ignore[func-returns-value]
    ]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, local_server_in: Any
) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    found = {}
    for sdk in ("tinker", "tinsmith"):
        with local_server_in(tmp_path_factory.mktemp(sdk)) as server:
            found[sdk] = run(server, sdk)
    return found


def test_results_are_equal_to_the_last_bit(runs: Any) -> None:
    official, ours = runs["tinker"][0], runs["tinsmith"][0]
    assert ours.keys() == official.keys()
    for name in official:
        assert ours[name] == official[name], name
    supervised = [official[f"supervised {i}"]["metrics"]["loss:sum"] for i in range(3)]
    assert supervised == sorted(supervised, reverse=True), "and it has learned something"


def requests_of(runs: Any, sdk: str) -> list[dict[str, Any]]:
    """In order, without what our client alone says: that a sampler was dropped."""
    return [
        each
        for each in in_order(runs[sdk][1])
        if not (each["method"] == "DELETE" and each["path"].startswith("/samplers/"))
    ]


def test_the_same_requests_in_the_same_order(runs: Any) -> None:
    official, ours = (requests_of(runs, sdk) for sdk in ("tinker", "tinsmith"))
    assert [(e["method"], e["path"]) for e in ours] == [(e["method"], e["path"]) for e in official]
    passes = [each["body"] for each in official if each["path"] == "/forward_backward"]
    assert [message.seq_id for message in passes[:5]] == [1, 2, 3, 4, 5], "five chunks to a step"


def test_the_same_bodies_queries_and_headers(runs: Any) -> None:
    official, ours = (requests_of(runs, sdk) for sdk in ("tinker", "tinsmith"))
    for theirs, own in zip(official, ours, strict=True):
        assert own["body"] == theirs["body"], theirs["path"]
        assert own["query"] == theirs["query"], theirs["path"]
        if theirs["body"] is not None:
            assert own["headers"] == theirs["headers"], theirs["path"]


def test_as_many_results_are_asked_for(runs: Any) -> None:
    def asked(trace: list[dict[str, Any]]) -> Counter[str]:
        requests = {
            each["body"]["request_id"]: each["headers"]["x-tinker-request-type"]
            for each in trace
            if each["path"] == "/retrieve_future"
        }
        return Counter(requests.values())

    assert asked(runs["tinsmith"][1]) == asked(runs["tinker"][1])
