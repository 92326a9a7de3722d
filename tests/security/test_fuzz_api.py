"""Random requests to every route: whatever comes in, nothing is a 5xx, and nothing takes long.

Bounded here; `make fuzz` tries many more (`--hypothesis-profile=long`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.server.config_sources import build_config
from tinsmith.server.edge.app import build_app
from tinsmith.server.edge.auth import create_key
from tinsmith.server.edge.openapi import description
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.metrics import Metrics
from tinsmith.server.service import Service
from tinsmith.server.serving import claim_store
from tinsmith.wire.endpoints import ENDPOINTS

MODEL = "tinsmith/fake"
MAX_CPU_SECONDS = 1.0
SCHEMA = schemathesis.openapi.from_dict(description("0"))
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]
SKIPPED = {"delete_own_key", "revoke_key"}
"""After it there is nobody left to ask."""


class FuzzedServer:
    """A server in a loop of its own, so that plain tests can send it one request after another."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.ids: dict[str, str] = {}
        self.run(self._start(folder))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def _start(self, folder: Path) -> None:
        config = build_config(
            {
                "data_dir": folder,
                "hold_seconds": 0.01,
                "max_body_bytes": 2**24,
                "event_stream_seconds": 0.0,
            }
        )
        store = await claim_store(config)
        key, _ = await create_key(store, "owner", "fuzz")

        async def factory(plan: SlotPlan) -> FakeEngine:
            return FakeEngine(FakeEngineConfig(models=(FakeModel(name=MODEL),)))

        self.service = Service(
            config, store, await store.keys.secret("signing"), factory, Metrics()
        )
        await self.service.start()
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=build_app(self.service)),
            base_url="http://server",
            headers={"x-api-key": key},
            timeout=60,
        )
        await self._make_one_of_everything()

    async def _make_one_of_everything(self) -> None:
        async def post(path: str, body: Any) -> Any:
            return (await self.http.post(f"/api/v1{path}", json=body)).json()

        async def result(promise: Any) -> Any:
            while True:
                body = {"request_id": promise["request_id"]}
                response = await self.http.post("/api/v1/retrieve_future", json=body)
                if response.status_code != 408:
                    return response.json()

        fields = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        session = (await post("/create_session", fields))["session_id"]
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
        }
        created = await post("/create_model", body)
        model = (await result(created))["model_id"]
        saved = await post("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        path = (await result(saved))["path"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        sampler = (await post("/create_sampling_session", body))["sampling_session_id"]
        self.ids = {
            "session_id": session,
            "model_id": model,
            "run_id": model,
            "base_model": MODEL,
            "model": path,
            "path": path,
            "tinker_path": path,
            "source_path": path,
            "model_path": path,
            "sampling_session_id": sampler,
            "sampler_id": sampler,
            "request_id": created["request_id"],
            "kind": "weights",
            "name": "a",
        }

    async def send(self, method: str, url: str, body: bytes | None, headers: Any) -> httpx.Response:
        return await self.http.request(method, url, content=body, headers=headers)

    def try_request(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str] | None = None
    ) -> None:
        began = time.process_time()
        response = self.run(self.send(method, url, body, headers or {}))
        spent = time.process_time() - began
        assert response.status_code < 500, f"{method} {url} {body!r}: {response.text}"
        assert spent < MAX_CPU_SECONDS, f"{method} {url} took {spent:.2f} s of processor time"

    async def _stop(self) -> None:
        await self.service.stop()
        await self.http.aclose()

    def close(self) -> None:
        self.run(self._stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedServer]:
    server = FuzzedServer(tmp_path_factory.mktemp("fuzz") / "data")
    yield server
    server.close()


def _with_real_ids(value: Any, ids: dict[str, str], take: Any) -> Any:
    """Some ids made true, so that what lies behind the first check is reached."""
    if isinstance(value, dict):
        return {
            name: ids[name] if name in ids and take() else _with_real_ids(item, ids, take)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_with_real_ids(item, ids, take) for item in value]
    return value


IS_LONG = settings.get_current_profile_name() == "long"
quick = settings(
    max_examples=settings().max_examples if IS_LONG else 15,
    derandomize=not IS_LONG,
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)


@pytest.mark.parametrize(
    "operation",
    [o for o in OPERATIONS if o.definition.raw["operationId"] not in SKIPPED],
    ids=lambda o: f"{o.method.upper()} {o.path}",
)
@quick
@given(data=st.data())
def test_a_request_by_the_schema_is_answered(
    fuzzed: FuzzedServer, operation: Any, data: st.DataObject
) -> None:
    case = data.draw(operation.as_strategy())
    take = lambda: data.draw(st.booleans())  # noqa: E731
    path = _with_real_ids(copy.deepcopy(dict(case.path_parameters or {})), fuzzed.ids, take)
    url = re.sub(
        r"{(\w+)}", lambda found: quote(str(path.get(found[1], "x")), safe=""), operation.path
    )
    body = case.body
    has_body = isinstance(body, dict | list | str | int | float) and not isinstance(body, bytes)
    content = None
    if has_body:
        content = _json(_with_real_ids(copy.deepcopy(body), fuzzed.ids, take))
    fuzzed.try_request(operation.method.upper(), url, content, {"content-type": "application/json"})


def _json(value: Any) -> bytes:
    """With the standard library, which writes what orjson would not: infinities, huge numbers."""
    return json.dumps(value).encode()


FIELD_NAMES = sorted(
    {
        name
        for definition in SCHEMA.raw_schema["components"]["schemas"].values()
        for name in definition.get("properties", {})
    }
    | {
        "model",
        "messages",
        "prompt",
        "role",
        "content",
        "type",
        "text",
        "n",
        "stop",
        "logprobs",
        "stream",
        "max_tokens",
    }
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-5, max_value=5)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["encoded_text", "text", "adamw", "cross_entropy", "int64", "float32", "a"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELD_NAMES) | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=25,
)
WITH_BODY = [r for r in ENDPOINTS.values() if r.method in ("POST", "PUT")]


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda r: r.full_path)
@quick
@given(data=st.data())
def test_a_request_of_anything_is_answered(
    fuzzed: FuzzedServer, route: Any, data: st.DataObject
) -> None:
    """Objects with the names of real fields and any values in them."""
    fields = st.dictionaries(st.sampled_from(FIELD_NAMES), ANYTHING, max_size=8)
    take = lambda: data.draw(st.integers(0, 4)) > 0  # noqa: E731
    body = _with_real_ids(data.draw(fields), fuzzed.ids, take)
    if data.draw(st.booleans()):
        body |= {
            name: fuzzed.ids[name]
            for name in ("model", "model_id", "session_id", "sampling_session_id")
        }
    url = route.full_path
    for name, value in fuzzed.ids.items():
        url = url.replace("{" + name + "}", value)
    fuzzed.try_request(route.method, url, _json(body), {"content-type": "application/json"})


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda r: r.full_path)
@quick
@given(
    body=st.binary(max_size=200),
    content_type=st.sampled_from(["application/json", "application/x-protobuf", "text/plain", ""]),
    encoding=st.sampled_from(["identity", "zstd", "gzip", "\u00b2"]),
)
def test_a_request_of_bytes_is_answered(
    fuzzed: FuzzedServer, route: Any, body: bytes, content_type: str, encoding: str
) -> None:
    url = route.full_path
    for name, value in fuzzed.ids.items():
        url = url.replace("{" + name + "}", value)
    headers = {"content-type": content_type, "content-encoding": encoding.encode()}
    fuzzed.try_request(route.method, url, body, headers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "route", [r for r in ENDPOINTS.values() if r.method == "GET"], ids=lambda r: r.full_path
)
@quick
@given(
    query=st.dictionaries(
        st.sampled_from(
            [
                "limit",
                "offset",
                "event_type",
                "day",
                "starting_on",
                "ending_before",
                "project_id",
                "access_scope",
                "expires",
                "signature",
                "keys",
                "points",
                "after",
                "before",
                "status",
                "step",
                "by",
                "run",
                "token",
            ]
        ),
        st.text(max_size=30)
        | st.integers().map(str)
        | st.sampled_from(
            [
                "2026-01-01",
                "2026-01-01T00:00:00Z",
                "9999-12-31",
                "0001-01-01",
                "accessible",
                "9999-12-31T23:00:00-23:00",
                "0001-01-01T00:00:00+23:00",
                "9" * 5000,
            ]
        ),
        max_size=4,
    )
)
def test_a_query_of_anything_is_answered(
    fuzzed: FuzzedServer, route: Any, query: dict[str, str]
) -> None:
    url = route.full_path
    for name, value in {**fuzzed.ids, "weights_id": "a" * 32}.items():
        url = url.replace("{" + name + "}", value)
    url = url.replace("{name:path}", "x")
    fuzzed.try_request("GET", str(httpx.URL(url, params=query)), None)
