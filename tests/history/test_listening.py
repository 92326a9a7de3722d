"""What both clients see of a real server, written down as it passes, is believed by the checker."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from history.calls import Answer, Submission
from history.checker import violations
from history.listening import Exchange, Listener
from tests.support.child import Child
from tests.support.listening_proxy import ListeningProxy
from tests.support.server_process import ServerProcess, serving

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def history(server: ServerProcess) -> list[Any]:
    pytest.importorskip("tinker", reason="the official client is not installed")
    with ListeningProxy([server.port]) as proxy:
        environment = server.environment | {"TINKER_BASE_URL": proxy.url}
        for package in ("tinker", "tinsmith"):
            child = Child([sys.executable, str(PROGRAM), package], env=environment)
            out, errors = child.finish(120)
            assert out == "end\n", errors
    return proxy.history.calls


def test_a_real_history_is_believed(history: list[Any]) -> None:
    assert violations(history) == []
    kinds = [call.kind for call in history if isinstance(call, Submission)]
    assert kinds.count("forward_backward") == 4 and kinds.count("asample") == 4
    assert kinds.count("create_from") == 2


@pytest.mark.parametrize("kind", ["forward_backward", "forward", "asample"])
def test_other_numbers_after_the_same_operations_are_noticed(history: list[Any], kind: str) -> None:
    """Of the client that came second, whichever it was: the first one's are the measure."""
    ids = [c.request_id for c in history if isinstance(c, Submission) and c.kind == kind]
    changed = [
        dataclasses.replace(call, value="others")
        if isinstance(call, Answer) and call.request_id == ids[-1] and call.value is not None
        else call
        for call in history
    ]
    assert any("others" in each for each in violations(changed))


def test_an_answer_that_breaks_off_was_never_seen() -> None:
    heard: list[Exchange] = []
    listener = Listener(heard.append)
    listener.from_client(b"POST /a HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi")
    listener.from_server(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel")
    assert heard == []
    listener.from_server(b"lo")
    (exchange,) = heard
    assert (exchange.request.path, exchange.request.body) == ("/a", b"hi")
    assert (exchange.answer.status, exchange.answer.body) == (200, b"hello")


def test_what_is_not_http_is_passed_over() -> None:
    heard: list[Exchange] = []
    listener = Listener(heard.append)
    listener.from_client(b"\x00\x01 nonsense \r\n\r\n")
    listener.from_client(b"GET /a HTTP/1.1\r\n\r\n")
    assert heard == []
