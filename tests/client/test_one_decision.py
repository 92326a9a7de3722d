"""One decision about retries, whichever way a request takes: S46, S50, S51, S53."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import rest_client
from tests.support.scripted_server import Answer
from tinsmith.client.service import ServiceClient
from tinsmith.errors import TinkerError
from tinsmith.transport.retry import RetryPolicy
from tinsmith.types import AdamParams, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints([1, 2, 3])
API = "/api/v1"
URLS = f"{API}/training_runs/r/checkpoints/external_weights/x/external_weights_urls"
FINISH = {"index": 0, "stop_reason": "stop"}
STREAM = Answer(
    200,
    f"event: finish\ndata: {json.dumps(FINISH)}\n\n".encode(),
    {"content-type": "text/event-stream"},
)

Call = Callable[[Any, ServiceClient, Path], Any]


def operation(stub: Any, service: ServiceClient, folder: Path) -> Any:
    return service.create_lora_training_client("m").optim_step(AdamParams()).result(20)


def sample(stub: Any, service: ServiceClient, folder: Path) -> Any:
    sampler = service.create_sampling_client(base_model="m")
    return sampler.sample(PROMPT, 1, SamplingParams()).result(20)


def polled(stub: Any, service: ServiceClient, folder: Path) -> Any:
    stub.flags = {"sample_use_retrieve_futures": True}
    return sample(stub, service, folder)


def stream(stub: Any, service: ServiceClient, folder: Path) -> Any:
    sampler = service.create_sampling_client(base_model="m")
    return list(sampler.stream(PROMPT, SamplingParams()))


def download(stub: Any, service: ServiceClient, folder: Path) -> Any:
    urls = {"urls": {"a": f"{stub.url}/file"}, "expires": "2030-01-01T00:00:00Z"}
    stub.on(URLS, Answer(200, urls))
    rest = rest_client(service)
    return rest.download_checkpoint("tinker://r/external_weights/x", folder / "x").result(20)


def good(name: str) -> Callable[[Any], Any]:
    """What the service answers when nothing is wrong."""
    return lambda stub: getattr(stub, name)


PATHS: dict[str, tuple[Call, str, Callable[[Any], Any]]] = {
    "operation": (operation, f"{API}/optim_step", good("_do_optim_step")),
    "result": (sample, f"{API}/retrieve_future", good("_do_retrieve_future")),
    "poller": (polled, f"{API}/retrieve_futures", good("_do_retrieve_futures")),
    "sampling": (sample, f"{API}/asample", good("_do_asample")),
    "streaming": (stream, f"{API}/sample_stream", lambda stub: STREAM),
    "download": (download, "/file", lambda stub: Answer(200, b"content")),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("forced", [None, "true", "false"])
@pytest.mark.parametrize("status", [401, 403, 404, 409, 422, 429, 500, 503, 529])
def test_every_path_decides_alike(
    stub: Any,
    service: ServiceClient,
    tmp_path: Path,
    status: int,
    forced: str | None,
    path: str,
) -> None:
    """One failure, then a good answer: it is repeated, or it is the caller's, as for every path."""
    call, place, answer = PATHS[path]
    headers = {"retry-after-ms": "2"} | ({"x-should-retry": forced} if forced else {})
    stub.on(place, Answer(status, {"detail": "no"}, headers), answer(stub))
    is_repeated = forced == "true" or (forced is None and (status in (409, 429) or status >= 500))
    if is_repeated:
        assert call(stub, service, tmp_path)
        assert stub.count(place) >= 2
        return
    with pytest.raises(TinkerError, match="no"):
        call(stub, service, tmp_path)
    time.sleep(0.1)
    assert stub.count(place) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", [429, 503])
def test_no_path_hammers_a_server_that_asks_for_it(
    stub: Any, make_service: Callable[..., ServiceClient], tmp_path: Path, status: int, path: str
) -> None:
    """A millisecond is what the server asks for; at most twenty requests a second are made."""
    call, place, answer = PATHS[path]
    service = make_service(retry=RetryPolicy())
    moments: list[float] = []

    def storm(request: Any) -> Any:
        moments.append(time.monotonic())
        if len(moments) <= 4:
            return Answer(status, {"detail": "no"}, {"retry-after-ms": "1"})
        usual = answer(stub)
        return usual(request) if callable(usual) else usual

    stub.on(place, storm)
    assert call(stub, service, tmp_path)
    waits = [after - before for before, after in pairwise(moments[:5])]
    assert len(waits) == 4 and min(waits) >= 0.05
