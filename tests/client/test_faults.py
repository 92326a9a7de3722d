"""Whole operations against a service that misbehaves.

Each case states how many requests the service sees and what the caller gets: S46, S50, S51, S57.
The single rules behind it are tested in tests/transport; here they act together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import Answer, ScriptedServer
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    ConflictError,
    InternalServerError,
    RateLimitError,
    TinkerError,
)
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.retry import NO_RETRY
from tinsmith.types import AdamParams, ModelInput, SamplingParams

STEP = "/api/v1/optim_step"
SAMPLE = "/api/v1/asample"
PROMPT = ModelInput.from_ints([1, 2, 3])
HINT = {"retry-after-ms": "2"}
HTML = {"content-type": "text/html"}


@pytest.fixture
def training(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("m")


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="m")


def step(training: TrainingClient) -> dict[str, float] | None:
    return training.optim_step(AdamParams()).result(20).metrics


@pytest.mark.parametrize("headers", [{}, HINT], ids=["without a hint", "with a hint"])
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_a_short_storm_is_weathered(
    stub: Any, training: TrainingClient, status: int, headers: dict[str, str]
) -> None:
    """Three failures and a success: four requests under one key, one operation at the service."""
    storm = [Answer(status, {"detail": "storm"}, headers) for _ in range(3)]
    stub.on(STEP, *storm, stub._do_optim_step)
    assert step(training) == {"lr": 0.1}
    seen = stub.seen("/optim_step")
    assert len(seen) == 4
    assert len({request.headers["x-idempotency-key"] for request in seen}) == 1
    assert len({request.body for request in seen}) == 1, "one id, however often it is sent"
    assert stub.order == [("optim_step", 1)]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (409, ConflictError),
        (429, RateLimitError),
        (500, InternalServerError),
        (503, APIStatusError),
    ],
)
def test_a_lasting_storm_is_the_callers_after_the_agreed_attempts(
    stub: Any, training: TrainingClient, status: int, error: type[Exception]
) -> None:
    """Five requests (the test's policy allows four repeats); the next operation is not held up."""
    stub.on(STEP, Answer(status, {"detail": "storm"}))
    with pytest.raises(error, match="storm"):
        step(training)
    assert stub.count("/optim_step") == 5
    stub.handlers.pop(STEP)
    assert step(training) == {"lr": 0.1}
    assert stub.order == [("optim_step", 2)]


@pytest.mark.parametrize("headers", [{}, HINT], ids=["without a hint", "with a hint"])
@pytest.mark.parametrize("status", [408, 409, 500, 503])
def test_a_hundred_samples_get_through_a_storm(
    stub: Any, sampler: SamplingClient, status: int, headers: dict[str, str]
) -> None:
    """Every first attempt fails: two requests for each sample, and every one is answered."""
    failed: set[int] = set()

    def storm(request: Any) -> Answer:
        number = request.json()["seq_id"]
        if number in failed:
            answer: Answer = stub._do_asample(request)
            return answer
        failed.add(number)
        return Answer(status, {"detail": "storm"}, headers)

    stub.on(SAMPLE, storm)
    futures = [sampler.sample(PROMPT, 1, SamplingParams()) for _ in range(100)]
    assert all(future.result(20).sequences for future in futures)
    assert stub.count("/asample") == 200
    assert sorted(failed) == list(range(100))


OPERATION_CASES: list[tuple[str, list[Answer], int, type[Exception] | None]] = [
    ("reset", [Answer(fault="reset")], 2, None),
    ("reset in the body", [Answer(200, {"request_id": "x"}, fault="reset_body")], 2, None),
    ("truncated", [Answer(200, {"request_id": "x"}, fault="truncate")], 2, None),
    ("not HTTP", [Answer(fault="garbage")], 2, None),
    ("cut JSON", [Answer(200, b'{"request_id": "r')], 1, APIResponseValidationError),
    ("garbage", [Answer(200, bytes(range(256)))], 1, APIResponseValidationError),
    ("no body", [Answer(200, b"")], 1, APIResponseValidationError),
    ("a page", [Answer(200, b"<html>Welcome</html>", HTML)], 1, APIResponseValidationError),
    ("a list", [Answer(200, [])], 1, APIResponseValidationError),
    ("another message", [Answer(200, {"id": 3})], 1, APIResponseValidationError),
    ("an error page", [Answer(502, b"<html>Bad gateway</html>", HTML)], 2, None),
    ("redirect that keeps the body", [Answer(307, b"", {"location": STEP})], 2, None),
    ("redirect that drops it", [Answer(302, b"", {"location": STEP})], 1, APIStatusError),
]


@pytest.mark.parametrize(
    ("script", "requests", "error"),
    [case[1:] for case in OPERATION_CASES],
    ids=[case[0] for case in OPERATION_CASES],
)
def test_a_broken_answer_to_an_operation(
    stub: Any,
    training: TrainingClient,
    script: list[Answer],
    requests: int,
    error: type[Exception] | None,
) -> None:
    """The first answer is broken; a second one is fine. What may have been done is asked for again
    under the same id, and what breaks the protocol is reported, not repeated."""
    stub.on(STEP, *script, stub._do_optim_step)
    if error is None:
        assert step(training) == {"lr": 0.1}
    else:
        with pytest.raises(error) as caught:
            step(training)
        assert isinstance(caught.value, TinkerError)
    assert stub.count("/optim_step") == requests
    stub.handlers.pop(STEP)
    assert step(training) == {"lr": 0.1}, "the next operation is not held up"


RESULT = {"metrics": {"lr": 0.1}}


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, RESULT, HTML),
        Answer(200, RESULT, {"content-type": "text/plain; charset=utf-8"}),
        Answer(200, RESULT, {"content-type": ""}),
    ],
)
def test_a_result_under_a_wrong_content_type_is_read(
    stub: Any, training: TrainingClient, answer: Answer
) -> None:
    """One poll. JSON is told by its content: proxies change the header, not the body."""
    stub.on("/api/v1/retrieve_future", answer)
    before = stub.count("/retrieve_future")
    assert step(training) == {"lr": 0.1}
    assert stub.count("/retrieve_future") == before + 1


@pytest.mark.parametrize("fault", ["reset", "reset_body", "truncate", "garbage"])
def test_a_poll_that_breaks_is_asked_again(stub: Any, training: TrainingClient, fault: str) -> None:
    """Two polls more than without; the operation itself is sent once."""
    broken = Answer(200, RESULT, fault=fault)
    stub.on("/api/v1/retrieve_future", broken, broken, Answer(200, RESULT))
    before = stub.count("/retrieve_future")
    assert step(training) == {"lr": 0.1}
    assert stub.count("/retrieve_future") == before + 3
    assert stub.count("/optim_step") == 1


def test_a_stalled_connection_holds_up_nothing_else(
    stub: Any, training: TrainingClient, sampler: SamplingClient
) -> None:
    """S37: the step hangs half-way through its answer, while samples and another model go on."""
    stub.on(STEP, Answer(200, {"request_id": "x"}, fault="stall_body"))
    hanging = training.optim_step(AdamParams())
    started = time.monotonic()
    for _ in range(20):
        sampler.sample(PROMPT, 1, SamplingParams()).result(10)
    assert time.monotonic() - started < 5
    assert not hanging.done()
    assert stub.count("/optim_step") == 1
    hanging.cancel()


def test_two_service_clients_mix_nothing_under_failure(
    make_service: Callable[..., ServiceClient],
) -> None:
    """S60, S72, S78: one server is down and its client gives up; the other never notices."""
    from tests.support import tinker_stub

    servers = [tinker_stub.TinkerStub(), tinker_stub.TinkerStub()]
    services = [
        make_service(base_url=server.url, api_key=f"tml-{i}") for i, server in enumerate(servers)
    ]
    trainings = [service.create_lora_training_client("m") for service in services]
    servers[0].on(STEP, Answer(503, {"detail": "down"}, {"retry-after-ms": "50"}))
    broken = trainings[0].optim_step(AdamParams())
    for number in range(1, 11):
        assert trainings[1].optim_step(AdamParams()).result(5).metrics == {"lr": 0.1}
        assert servers[1].order[-1] == ("optim_step", number)
    with pytest.raises(InternalServerError, match="down"):
        broken.result(10)
    services[0].close("errored").result(10)
    assert trainings[1].optim_step(AdamParams()).result(5).metrics == {"lr": 0.1}
    for i, server in enumerate(servers):
        assert {request.headers["x-api-key"] for request in server.requests} == {f"tml-{i}"}
    assert servers[0].count("/optim_step") == 5 and servers[1].count("/optim_step") == 11
    services[1].close("success").result(10)
    for server in servers:
        server.close()


def test_everything_goes_through_a_proxy(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """A client behind a plain HTTP proxy trains and samples; the proxy sees every request."""
    import urllib.request

    from tinsmith.transport.config import ProxyRule

    proxy = ScriptedServer()

    def forward(request: Any) -> Answer:
        sent = urllib.request.Request(
            f"{stub.url}{request.path}",
            data=request.body or None,
            headers={
                k: v for k, v in request.headers.items() if k not in ("host", "content-length")
            },
            method=request.method,
        )
        with urllib.request.urlopen(sent, timeout=10) as answer:
            kind = {"content-type": answer.headers["content-type"] or ""}
            return Answer(answer.status, answer.read(), kind)

    proxy.default = forward
    service = make_service(
        base_url="http://service.invalid", proxies=(ProxyRule(url=proxy.url, scheme="http"),)
    )
    assert step(service.create_lora_training_client("m")) == {"lr": 0.1}
    sampler = service.create_sampling_client(base_model="m")
    assert sampler.sample(PROMPT, 2, SamplingParams()).result(10).sequences[0].tokens == [5, 6]
    service.close("success").result(10)
    assert len(proxy.requests) == len(stub.requests) > 5
    assert {request.headers["host"] for request in proxy.requests} == {"service.invalid"}
    proxy.close()


def test_everything_goes_over_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    """The environment names the certificates; without them nobody is trusted."""
    import ssl

    from tests.support import tinker_stub

    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    secure = tinker_stub.TinkerStub(tls=context)
    environment = {
        "TINKER_BASE_URL": secure.url,
        "TINKER_API_KEY": "tml-tls",
        "TINKER_TELEMETRY": "0",
    }
    trusting = ClientConfig.from_env({**environment, "SSL_CERT_FILE": str(tmp_path / "ca.pem")})
    with ServiceClient(config=trusting) as service:
        assert step(service.create_lora_training_client("m")) == {"lr": 0.1}
    wary = replace(ClientConfig.from_env(environment), retry=NO_RETRY)
    seen = len(secure.requests)
    with pytest.raises(APIConnectionError, match="certificate"):
        ServiceClient(config=wary).get_server_capabilities()
    assert len(secure.requests) == seen, "nothing was said to a server that nobody vouches for"
    secure.close()
