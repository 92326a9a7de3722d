"""The calls of the interface are declared once, and every engine that computes has them all."""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from pathlib import Path

import pytest

from tests.engine.boundary.stub_core import StubCore
from tinsmith.engine.base import Engine, Health
from tinsmith.engine.calls import CALLS
from tinsmith.engine.fake import FakeEngine
from tinsmith.engine.local.boundary.messages import Patience, Start
from tinsmith.engine.local.boundary.remote import RemoteEngine
from tinsmith.engine.local.core import EngineCore
from tinsmith.errors import EngineDiedError

IN_PARTS = {"run_passes", "sample"}
"""What a core does a turn at a time; the worker calls it by another signature."""


def test_the_table_says_what_is_a_stream_and_what_is_answered_at_once() -> None:
    assert {name for name, call in CALLS.items() if call.is_stream} == {"run_passes", "sample"}
    assert {name for name, call in CALLS.items() if call.is_at_once} == {
        "capabilities",
        "health",
        "cancel",
    }
    assert "close" not in CALLS


@pytest.mark.parametrize("core", [EngineCore, StubCore])
@pytest.mark.parametrize("name", sorted(CALLS.keys() - IN_PARTS))
def test_a_core_has_every_call_with_the_declared_signature(core: type, name: str) -> None:
    """It answers with what is declared, or with how to come to that."""
    method = getattr(core, name)
    assert not inspect.iscoroutinefunction(method)
    found, declared = inspect.signature(method), inspect.signature(getattr(Engine, name))
    assert found.parameters == declared.parameters
    answer = declared.return_annotation
    later = f"Later[{answer}]"
    assert found.return_annotation in (answer, later, f"{answer} | {later}")


@pytest.mark.parametrize("engine", [FakeEngine, RemoteEngine])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_engine_has_every_call_with_the_declared_signature(
    engine: type[Engine], name: str
) -> None:
    method, declared = getattr(engine, name), getattr(Engine, name)
    assert method is not declared
    assert inspect.signature(method) == inspect.signature(declared)
    assert inspect.iscoroutinefunction(method) == inspect.iscoroutinefunction(declared)


def test_arguments_that_do_not_fit_a_call_are_a_type_error() -> None:
    call = CALLS["freeze"]
    assert call.arguments("a", weights_id="s") == ("a", "s")
    assert call.argument("weights_id", ("a", "s")) == "s"
    assert call.argument("folder", ("a", "s")) is None
    with pytest.raises(TypeError):
        call.arguments("a")


async def test_an_engine_is_reached_over_tcp_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary takes any connected socket, so it may one day lie on another machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tinsmith.engine.local.boundary.process", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
        )
    engine = RemoteEngine()
    await engine.connect(ours, Start("tests.engine.boundary.stub_core:StubCore", {}, Patience()))
    assert (await engine.capabilities()).max_lora_rank == 64
    assert isinstance(await engine.health(), Health)
    await engine.close()
    async with asyncio.timeout(10):
        assert await process.wait() == 0
    with pytest.raises(EngineDiedError, match="closed"):
        await engine.health()
