"""Start-up, sessions, heartbeats, closing, and several clients side by side."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.rest import RestClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.uplink.loop import io_loop, submit
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.errors import (
    APIStatusError,
    AuthenticationError,
    ClosedError,
    NotFoundError,
    TinkerError,
)
from tinsmith.transport.config import ClientConfig, Timing
from tinsmith.types import AdamParams, ModelInput, SamplingParams

CONFIG = "/api/v1/client/config"
DYNAMIC = "/api/v1/client/dynamic_config"


def paths(stub: Any) -> list[str]:
    return [r.path.removeprefix("/api/v1") for r in stub.requests]


def background_tasks() -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return submit(count()).result(5)


def settle(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return condition()


def test_making_a_client_contacts_nobody(stub: Any, service: ServiceClient) -> None:
    assert stub.requests == []


def test_start_up_is_the_official_one(stub: Any, service: ServiceClient) -> None:
    service.create_lora_training_client("m")
    assert paths(stub)[:5] == [
        "/client/config",
        "/client/dynamic_config",
        "/create_session",
        "/create_model",
        "/retrieve_future",
    ]
    assert stub.seen("/client/config")[0].json() == {"sdk_version": "0.36.0"}
    assert all(r.headers["x-api-key"] == "tml-test" for r in stub.requests)


def test_rest_calls_need_no_session(stub: Any, service: ServiceClient) -> None:
    assert service.get_server_capabilities().supported_models[0].model_name == "m"
    assert paths(stub) == ["/client/config", "/client/dynamic_config", "/get_server_capabilities"]


def test_a_service_without_dynamic_config_is_fine(stub: Any, service: ServiceClient) -> None:
    stub.on(DYNAMIC, Answer(404))
    service.create_sampling_client(base_model="m")


def test_a_service_without_config_is_not_and_the_next_call_tries_again(
    stub: Any, service: ServiceClient
) -> None:
    stub.on(CONFIG, Answer(404, {"detail": "no"}))
    for _ in range(2):
        with pytest.raises(NotFoundError):
            service.create_sampling_client(base_model="m")
    del stub.handlers[CONFIG]
    service.create_sampling_client(base_model="m")
    assert stub.count("/client/config") == 3


def test_fifty_threads_open_one_session(stub: Any, service: ServiceClient) -> None:
    """S76"""
    barrier = threading.Barrier(50)
    failures: list[BaseException] = []

    def use() -> None:
        barrier.wait()
        try:
            service.create_sampling_client(base_model="m")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert stub.count("/client/config") == 1 and stub.count("/create_session") == 1
    seqs = [r.json()["sampling_session_seq_id"] for r in stub.seen("/create_sampling_session")]
    assert sorted(seqs) == list(range(50))


def test_the_session_says_what_the_caller_said(
    stub: Any, make_service: Callable[..., ServiceClient], caplog: pytest.LogCaptureFixture
) -> None:
    stub.on(
        "/api/v1/create_session",
        Answer(200, {"session_id": "s", "info_message": "hello", "warning_message": "careful"}),
    )
    config = ClientConfig(
        base_url=stub.url, api_key="tml-x", telemetry=False, tags=("a", "b"), project_id="p"
    )
    service = ServiceClient({"k": "v"}, display_name="mine", config=config)
    with caplog.at_level(logging.INFO):
        assert service.holder.get_session_id() == "s"
    service.close("success").result(5)
    assert stub.seen("/create_session")[0].json() == {
        "tags": ["a", "b"],
        "user_metadata": {"k": "v"},
        "sdk_version": "0.36.0",
        "project_id": "p",
        "display_name": "mine",
        "type": "create_session",
    }
    assert "hello" in caplog.text and "careful" in caplog.text


def test_unknown_arguments_are_named(stub: Any) -> None:
    with pytest.warns(FutureWarning, match="colour"):
        ServiceClient(base_url=stub.url, api_key="tml-x", colour="blue")


def test_heartbeats_go_on_during_long_work_and_stop_when_the_session_ends(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S79"""
    service = make_service(heartbeat_seconds=0.05)
    training = service.create_lora_training_client("m")

    async def long(request: Recorded) -> Answer:
        while stub.count("/session_heartbeat") < 4:  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.01)
        return Answer(200, {"request_id": "r1"})

    num_refused = 0

    def refuse(request: Recorded) -> Answer:
        nonlocal num_refused
        num_refused += 1
        return Answer(410)

    stub.on("/api/v1/optim_step", long)
    training.optim_step(AdamParams()).result(30)
    stub.on("/api/v1/session_heartbeat", refuse)
    assert settle(lambda: num_refused > 0)
    time.sleep(0.2)
    assert num_refused == 1


def test_a_long_silence_is_a_warning(
    stub: Any,
    make_service: Callable[..., ServiceClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S79"""
    timing = Timing(silence_seconds=0.1)
    stub.on("/api/v1/session_heartbeat", Answer(500))
    with caplog.at_level(logging.WARNING):
        make_service(heartbeat_seconds=0.04, timing=timing).create_sampling_client(base_model="m")
        assert settle(lambda: "No heartbeat" in caplog.text)


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "success"), (ValueError, "errored"), (KeyboardInterrupt, "interrupted")],
)
def test_leaving_the_block_finishes_the_session(
    stub: Any, error: type[BaseException] | None, status: str
) -> None:
    try:
        with ServiceClient(base_url=stub.url, api_key="tml-x") as service:
            service.create_sampling_client(base_model="m")
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    finish = stub.seen("/sessions/s1/finish")
    assert [r.json() for r in finish] == [{"reason": {"type": status}, "detail": None}]


async def test_the_block_can_be_async(stub: Any) -> None:
    async with ServiceClient(base_url=stub.url, api_key="tml-x") as service:
        await service.create_sampling_client_async(base_model="m")
    assert stub.count("/finish") == 1


def test_a_closed_client_says_so(stub: Any, service: ServiceClient) -> None:
    """S75"""
    training = service.create_lora_training_client("m")
    sampler = service.create_sampling_client(base_model="m")
    service.close("success", "done").result(5)
    service.close("success").result(5)
    assert stub.seen("/finish")[0].json()["detail"] == "done" and stub.count("/finish") == 1
    for use in (
        lambda: service.create_sampling_client(base_model="m"),
        lambda: training.optim_step(AdamParams()).result(5),
        lambda: sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams()).result(5),
        lambda: service.__enter__(),
    ):
        with pytest.raises(ClosedError, match="closed") as caught:
            use()
        assert isinstance(caught.value, TinkerError) and isinstance(caught.value, RuntimeError)


def test_closing_one_client_leaves_the_others(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S78"""
    one, two = make_service(), make_service()
    one.create_sampling_client(base_model="m")
    sampler = two.create_sampling_client(base_model="m")
    one.close("success").result(5)
    sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)).result(5)


def test_closing_during_a_request_ends_it(stub: Any, service: ServiceClient) -> None:
    training = service.create_lora_training_client("m")
    stub.on("/api/v1/optim_step", Answer(fault="stall"))
    pending = training.optim_step(AdamParams())
    while not stub.count("/optim_step"):
        time.sleep(0.01)
    service.close("interrupted").result(10)
    with pytest.raises(ClosedError, match="under way"):
        pending.result(1)


def test_a_thousand_clients_that_are_dropped_leave_nothing(stub: Any) -> None:
    """S77: tasks, sockets and objects return to the base line, without a close."""
    config = ClientConfig(base_url=stub.url, api_key="tml-x", telemetry=True)

    def use(count: int) -> None:
        for _ in range(count):
            service = ServiceClient(config=config)
            service.create_sampling_client(base_model="m")

    settle(lambda: background_tasks() <= 2)
    tasks = max(2, background_tasks())  # clients of earlier tests may still be held somewhere
    use(5)
    assert settle(lambda: background_tasks() <= tasks, 20)
    sockets = len(list(Path("/proc/self/fd").iterdir()))
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(20):
        service = ServiceClient(config=config)
        service.create_sampling_client(base_model="m")
        alive.add(service.holder)
        del service
    use(975)
    assert settle(lambda: background_tasks() <= tasks and not alive, 20)
    assert len(list(Path("/proc/self/fd").iterdir())) <= sockets + 5


def test_two_service_clients_never_mix(make_service: Callable[..., ServiceClient]) -> None:
    """S60, S72: each key goes to its own server."""
    from tests.support import tinker_stub

    servers = [tinker_stub.TinkerStub(), tinker_stub.TinkerStub()]
    services = [
        make_service(base_url=server.url, api_key=f"tml-{i}") for i, server in enumerate(servers)
    ]
    samplers = [service.create_sampling_client(base_model="m") for service in services]
    futures = [
        sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))
        for _ in range(20)
        for sampler in samplers
    ]
    for future in futures:
        future.result(10)
    for i, server in enumerate(servers):
        assert {r.headers["x-api-key"] for r in server.requests} == {f"tml-{i}"}
        assert len(server.samples) == 20
    for service in services:
        service.close("success").result(5)
    for server in servers:
        server.close()


def test_the_environment_is_read_when_a_client_is_made(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S72, S73"""
    monkeypatch.setenv("TINKER_BASE_URL", stub.url + "/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = ServiceClient()
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("TINKER_API_KEY", "tml-later")
    service.create_sampling_client(base_model="m")
    service.close("success").result(5)
    assert {r.headers["x-api-key"] for r in stub.requests} == {"tml-env"}


def test_without_a_credential_the_error_says_where_to_put_one(tmp_path: Path) -> None:
    """No request is made. A server on this machine needs none: tests/compat/test_no_auth.py."""
    config = ClientConfig(
        base_url="https://service.invalid", credentials_file=tmp_path / "none.json"
    )
    with pytest.raises(TinkerError, match="TINKER_API_KEY"):
        ServiceClient(config=config).create_sampling_client(base_model="m")


def jwt(**claims: Any) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{payload}.x"


def test_a_key_is_exchanged_for_a_token_when_the_service_asks(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    token = jwt(exp=time.time() + 3600, sub="tml:user:u", org_id="o", email="")
    stub.flags = {"pjwt_auth_enabled": True, "_jwt": token}
    service = make_service()
    service.create_sampling_client(base_model="m")
    by_path = {r.path.removeprefix("/api/v1"): r.headers["x-api-key"] for r in stub.requests}
    assert by_path["/client/config"] == by_path["/auth/token"] == "tml-test"
    assert by_path["/create_session"] == token
    assert stub.count("/auth/token") == 1
    with pytest.warns(FutureWarning):
        rest = service.create_rest_client()
    who = rest.whoami().result(5)
    assert (who.user_urn, who.org_urn, who.email) == ("tml:user:u", "tml:organization:o", None)


def test_a_credential_command_feeds_the_exchange(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    stub.flags = {
        "pjwt_auth_enabled": True,
        "credential_default_source": "credential_cmd",
        "_jwt": jwt(exp=time.time() + 3600),
    }
    make_service(credential_command="echo tml-fresh").create_sampling_client(base_model="m")
    assert stub.seen("/auth/token")[0].headers["x-api-key"] == "tml-fresh"


def test_only_a_command_is_not_enough_for_a_service_that_takes_keys(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    service = make_service(api_key=None, credential_command="echo tml-fresh")
    with pytest.raises(TinkerError, match="no API key"):
        service.create_sampling_client(base_model="m")


def test_a_refused_key_is_refused_once(stub: Any, service: ServiceClient) -> None:
    stub.on(CONFIG, Answer(401, {"detail": "bad key"}))
    with pytest.raises(AuthenticationError, match="bad key"):
        service.create_sampling_client(base_model="m")
    assert stub.count("/client/config") == 1


def test_rest_clients_of_one_key_share_an_uplink(stub: Any) -> None:
    one = RestClient(base_url=stub.url, api_key="tml-a")
    two = RestClient(base_url=stub.url + "/", api_key="tml-a")
    other = RestClient(base_url=stub.url, api_key="tml-b")
    assert one.holder is two.holder is not other.holder
    with pytest.raises(ValueError, match="not both"):
        RestClient(one.holder, api_key="tml-a")
    for each in (one, other):
        submit(each.holder.aclose()).result(5)


def test_resuming_creates_and_loads(stub: Any, service: ServiceClient) -> None:
    training = service.create_training_client_from_state("tinker://a/weights/b")
    created = stub.seen("/create_model")[0].json()
    assert created["lora_config"]["rank"] == 8
    loaded = stub.seen("/load_weights")[0].json()
    assert loaded == {
        "model_id": training.model_id,
        "seq_id": 1,
        "path": "tinker://a/weights/b",
        "optimizer": False,
        "type": "load_weights",
    }
    training.optim_step(AdamParams()).result(5)
    assert stub.order[-1] == ("optim_step", 2)


def test_resuming_with_anothers_token_asks_as_the_other(stub: Any, service: ServiceClient) -> None:
    service.create_training_client_from_state_with_optimizer(
        "tinker://a/weights/b", weights_access_token="tml-theirs"
    )
    assert stub.seen("/weights_info")[0].headers["x-api-key"] == "tml-theirs"
    loaded = stub.seen("/load_weights")[0]
    assert loaded.headers["x-api-key"] == "tml-test"
    assert loaded.json()["weights_access_token"] == "tml-theirs" and loaded.json()["optimizer"]


def test_resuming_in_one_request_when_the_service_can(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    stub.flags = {"create_model_via_load_weights": True}
    training = make_service().create_training_client_from_state("tinker://a/weights/b", "base")
    assert training.model_id == "s1:train:0"
    assert stub.count("/create_model") == 0
    body = stub.seen("/load_weights")[0].json()
    assert (body["session_id"], body["model_seq_id"], body["base_model"]) == ("s1", 0, "base")
    training.optim_step(AdamParams()).result(5)
    assert stub.order[-1] == ("optim_step", 1)


def test_switches_are_refreshed_and_kept_when_that_fails(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    stub.switches = {"refresh_interval_sec": 0}
    uplink = make_service(timing=Timing(refresh_seconds=0.03)).holder
    stub.switches = {"refresh_interval_sec": 0, "sample_cancel_enabled": True}
    assert settle(lambda: uplink.get_client_dynamic_config().sample_cancel_enabled)
    stub.on(DYNAMIC, Answer(500))
    time.sleep(0.1)
    assert uplink.get_client_dynamic_config().sample_cancel_enabled


def test_deprecation_notes_are_shown_once(
    stub: Any, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    note = {"x-deprecation-note": "move on", "x-deprecation-level": "error"}
    stub.on("/api/v1/get_server_capabilities", Answer(200, {"supported_models": []}, note))
    for _ in range(3):
        service.get_server_capabilities()
    assert caplog.text.count("move on") == 1


def test_servers_are_told_which_client_and_which_protocol(
    stub: Any, service: ServiceClient
) -> None:
    service.get_server_capabilities()
    headers = stub.requests[-1].headers
    assert headers["user-agent"] == "tinsmith/Python (protocol 0.36.0)"
    assert headers["x-stainless-package-version"] == "0.36.0"


def test_local_counters_need_no_telemetry(stub: Any, service: ServiceClient) -> None:
    """S101: what is counted here is sent nowhere."""
    sampler = service.create_sampling_client(base_model="m")
    stub.on("/api/v1/asample", Answer(503), stub._do_asample)
    sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)).result(5)
    sample = service.stats()["sample"]
    assert (sample.requests, sample.retries, sample.failures, sample.in_flight) == (1, 1, 0, 0)
    assert sample.latency_p50 is not None and sample.latency_p50 > 0
    assert stub.count("/telemetry") == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_instead_of_hanging(stub: Any, service: ServiceClient) -> None:
    import warnings

    service.create_sampling_client(base_model="m")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: the point here
        child = os.fork()
    if child == 0:
        try:
            io_loop()
        except TinkerError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert b"spawn" in os.read(read, 1000)
    os.close(read)


def test_an_opened_uplink_survives_impatient_callers(stub: Any, service: ServiceClient) -> None:
    stub.on(CONFIG, Answer(200, {}, delay=0.2))
    uplink = service._session_uplink()
    assert isinstance(uplink, Uplink)
    impatient = submit(uplink.ready())
    time.sleep(0.05)
    impatient.cancel()
    service.create_sampling_client(base_model="m")
    assert stub.count("/client/config") == 1


def test_accessibility_is_checked_with_one_request(stub: Any, service: ServiceClient) -> None:
    stub.on("/api/v1/get_server_capabilities", Answer(503))
    with pytest.raises(APIStatusError):
        service.check_accessible()
    assert stub.count("/get_server_capabilities") == 1


@pytest.mark.parametrize("tracing", [True, False])
def test_requests_carry_the_callers_trace_when_tracing_is_on(
    stub: Any, make_service: Callable[..., ServiceClient], tracing: bool
) -> None:
    """S102: from the caller's thread to the wire, through the I/O thread."""
    trace = pytest.importorskip("opentelemetry.trace")
    parent = trace.NonRecordingSpan(
        trace.SpanContext(
            trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1)
        )
    )
    service = make_service(tracing=tracing)
    with trace.use_span(parent):
        service.get_server_capabilities()
    sent = stub.seen("/get_server_capabilities")[0].headers.get("traceparent", "")
    assert (f"{0xABC:032x}" in sent) == tracing


def test_clients_say_what_they_are_of(stub: Any, service: ServiceClient) -> None:
    training = service.create_lora_training_client("m")
    sampler = service.create_sampling_client(base_model="m")
    assert repr(service) == f"<ServiceClient of {stub.url}>"
    assert repr(training) == f"<TrainingClient of model {training.model_id!r}>"
    assert repr(sampler) == "<SamplingClient of sampling session 's1:sample:0'>"
