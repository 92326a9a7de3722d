"""A server in this process: the real application over the fake engine, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import orjson

from tests.support.databases import database_url, postgres_url  # noqa: F401  # fixtures
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.edge.app import build_app
from tinsmith.server.edge.auth import create_key
from tinsmith.server.service import Service
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    LossFnType,
    ModelInput,
    SampleResponse,
)
from tinsmith.wire import proto

MODEL = "tinsmith/fake"
PROTO = "application/x-protobuf"


def datum(*tokens: int) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)},
    )


PROBE = [datum(1, 2, 3, 4, 5)]


class Api:
    """Speaks the protocol as a client does, one plain call per request."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self.http = http
        self.key = key
        self.headers = {"x-api-key": key}

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return await self.http.post(
            f"/api/v1{path}",
            content=body if isinstance(body, bytes) else orjson.dumps(body),
            headers={"content-type": "application/json", **self.headers, **headers},
        )

    async def get(self, path: str, **params: Any) -> httpx.Response:
        return await self.http.get(f"/api/v1{path}", headers=self.headers, params=params)

    async def ok(self, path: str, body: object, **headers: str) -> Any:
        response = await self.post(path, body, **headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def session(self, **fields: Any) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", **fields}
        return str((await self.ok("/create_session", body))["session_id"])

    async def create_model(self, session_id: str, number: int = 0, **lora: Any) -> str:
        promise = await self.ok(
            "/create_model",
            {
                "session_id": session_id,
                "model_seq_id": number,
                "base_model": MODEL,
                "lora_config": {"rank": 4, "seed": 1, **lora},
            },
        )
        return str((await self.result(promise["request_id"]))["model_id"])

    async def model(self, **lora: Any) -> str:
        return await self.create_model(await self.session(), **lora)

    async def post_pass(
        self,
        model_id: str,
        seq_id: int,
        data: list[Datum],
        *,
        forward_only: bool = False,
        loss_fn: LossFnType = "cross_entropy",
        loss_fn_config: dict[str, float | str] | None = None,
    ) -> httpx.Response:
        inputs = ForwardBackwardInput(data, loss_fn, loss_fn_config)
        cls = ForwardRequest if forward_only else ForwardBackwardRequest
        body = proto.encode_pass(cls(inputs, model_id, seq_id))
        return await self.post("/forward_backward", body, **{"content-type": PROTO})

    async def send_pass(self, model_id: str, seq_id: int, *data: Datum, **options: Any) -> str:
        response = await self.post_pass(model_id, seq_id, list(data) or PROBE, **options)
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    async def send_step(self, model_id: str, seq_id: int, **params: float) -> str:
        adam = AdamParams(**{"learning_rate": 0.1, **params}).to_wire()
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": adam}
        return str((await self.ok("/optim_step", body))["request_id"])

    async def retrieve(self, request_id: str, **options: Any) -> httpx.Response:
        headers = options.pop("headers", {"accept": PROTO})
        body = {"request_id": request_id, **options}
        while True:
            response = await self.post("/retrieve_future", body, **headers)
            if response.status_code != 408:
                return response

    async def result(self, request_id: str) -> Any:
        """The result of a request, whichever form it has; a failed one fails the test."""
        response = await self.retrieve(request_id)
        assert response.status_code == 200, response.text
        if response.headers["content-type"] == PROTO:
            return response.content
        assert "error" not in response.json(), response.text
        return response.json()

    async def output(self, request_id: str) -> ForwardBackwardOutput:
        return proto.decode_output(await self.result(request_id))

    async def failure(self, request_id: str) -> tuple[str, str]:
        response = await self.retrieve(request_id)
        assert response.status_code == 200, response.text
        body = response.json()
        return body["error"], body["category"]

    async def loss(self, model_id: str, seq_id: int) -> float:
        """The model's loss on the probe: one number that tells states apart."""
        request_id = await self.send_pass(model_id, seq_id, forward_only=True)
        return (await self.output(request_id)).metrics["loss:sum"]

    async def sample(self, sampler_id: str, seq_id: int = 0, **fields: Any) -> SampleResponse:
        promise = await self.ok("/asample", self.sample_body(sampler_id, seq_id, **fields))
        content = await self.result(promise["request_id"])
        return proto.decode_sample(content, promise["sample_sequence_ids"])

    def sample_body(self, sampler_id: str, seq_id: int = 0, **fields: Any) -> dict[str, Any]:
        return {
            "sampling_session_id": sampler_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4, "seed": 5, "stop": []},
            **fields,
        }


class TestServer:
    """A service with its engines (a new one after each death) and clients for it."""

    __test__ = False

    def __init__(self, service: Service, key: str, engines: list[FakeEngine]) -> None:
        self.service = service
        self.engines = engines
        self.app = build_app(service)
        self._clients: list[httpx.AsyncClient] = []
        self.api = self.client(key)

    def client(self, key: str) -> Api:
        transport = httpx.ASGITransport(app=self.app)
        http = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60)
        self._clients.append(http)
        return Api(http, key)

    async def other_user(self) -> Api:
        key, _ = await create_key(self.service.store, "somebody-else", "other")
        return self.client(key)

    async def until(self, is_so: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait for something that nobody announces."""
        async with asyncio.timeout(seconds):
            while not is_so():  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(0.02)

    def kill_engine(self) -> None:
        self.engines[-1].die("killed by a test")

    async def stop(self) -> None:
        await self.service.stop()
        for client in self._clients:
            await client.aclose()


StartServer = Callable[..., Coroutine[Any, Any, TestServer]]
