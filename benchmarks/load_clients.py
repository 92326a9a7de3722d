"""Clients of a server under load: who trains, samples and looks around, and who means harm.

They speak through plain sockets, so that they cost little on the cores that the server shares.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson

from tinsmith.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput
from tinsmith.wire import proto

MODEL = "tinsmith/fake"
PROTO = "application/x-protobuf"

SAMPLE_TOKENS = 3
HEARTBEAT_SECONDS = 10.0
CONSOLE = (
    "/training_runs/{run}/metrics?points=100",
    "/training_runs/{run}/operations?limit=50",
    "/training_runs/{run}/queue",
    "/training_runs/{run}/samplers",
    "/training_runs/{run}/examples",
    "/console/usage",
    "/console/server",
    "/cluster",
)
"""What open pages ask for."""

DATUM = Datum(
    model_input=ModelInput.from_ints(list(range(1, 65))),
    loss_fn_inputs={"target_tokens": list(range(2, 66)), "weights": [1.0] * 64},
)


@dataclass
class Measured:
    """What was seen since the measuring began."""

    is_on: bool = False
    answers: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    held_polls: int = 0
    memory_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    outstanding: list[int] = field(default_factory=list)
    lag_seconds: list[float] = field(default_factory=list)
    harm: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, kind: str, status: int, seconds: float) -> None:
        if not self.is_on:
            return
        self.answers[f"{kind} {status}"] += 1
        self.seconds[kind].append(seconds)
        if status not in (200, 204) and not (kind == "poll" and status == 408):
            self.errors[f"{kind} {status}"] += 1


class Connection(asyncio.Protocol):
    """One keep-alive connection: a request out, its answer back, nothing else."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = b""

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        start = self._buffer.find(b"content-length: ") + 16
        size = int(self._buffer[start : self._buffer.index(b"\r\n", start)])
        if len(self._buffer) < head_end + 4 + size:
            return
        status, body = int(self._buffer[9:12]), self._buffer[head_end + 4 :]
        self._buffer = b""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the server closed the connection"))

    def send(self, request: bytes) -> None:
        """Without waiting for an answer."""
        assert self._transport is not None
        self._transport.write(request)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionResetError("the server has closed the connection")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer


class Client:
    """One user of the service, with a key of its own."""

    def __init__(self, address: tuple[str, int], key: str, measured: Measured) -> None:
        self._address = address
        self._key = key
        self._measured = measured
        self._session_id = ""
        self._model_id = ""
        self._sampler_id = ""
        self._sample_number = 0

    async def start(self) -> None:
        control = await self._connection()
        session = await self._post(
            control,
            "start",
            "/create_session",
            {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"},
        )
        self._session_id = session["session_id"]
        promise = await self._post(
            control,
            "start",
            "/create_model",
            {
                "session_id": self._session_id,
                "model_seq_id": 0,
                "base_model": MODEL,
                "lora_config": {"rank": 4, "seed": 1},
            },
        )
        await self._result(control, promise["request_id"])
        self._model_id = promise["model_id"]
        sampler = await self._post(
            control,
            "start",
            "/create_sampling_session",
            {"session_id": self._session_id, "sampling_session_seq_id": 0, "base_model": MODEL},
        )
        self._sampler_id = sampler["sampling_session_id"]

    async def train(self, pause_seconds: float) -> None:
        """Passes and steps, a new pair every so often whether or not the last one is done."""
        await asyncio.sleep(random.uniform(0, pause_seconds))
        sending, polling = await self._connection(), await self._connection()
        seq_id, due = 0, time.perf_counter()
        while True:
            passed = await self._submit(sending, seq_id + 1, is_pass=True)
            stepped = await self._submit(sending, seq_id + 2, is_pass=False)
            await self._result(polling, passed)
            await self._result(polling, stepped)
            seq_id += 2
            due += pause_seconds
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def roll_out(self, seconds: float) -> None:
        """Samples one after another, always with a poll open for the one under way."""
        await asyncio.sleep(random.uniform(0, seconds))
        connection = await self._connection()
        while True:
            self._sample_number += 1
            promise = await self._post(
                connection,
                "asample",
                "/asample",
                {
                    "sampling_session_id": self._sampler_id,
                    "seq_id": self._sample_number,
                    "num_samples": 1,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                    "sampling_params": {"max_tokens": SAMPLE_TOKENS, "seed": 5, "stop": []},
                },
            )
            await self._result(connection, promise["request_id"])

    async def look_around(self) -> None:
        """Signs of life, and a look at the run now and then, as programs and the console do it."""
        await asyncio.sleep(random.uniform(0, HEARTBEAT_SECONDS))
        connection = await self._connection()
        for number in itertools.count(random.randrange(len(CONSOLE))):
            heartbeat = {"session_id": self._session_id}
            await self._post(connection, "heartbeat", "/session_heartbeat", heartbeat)
            await asyncio.sleep(HEARTBEAT_SECONDS / 3)
            await self._post(connection, "get_info", "/get_info", {"model_id": self._model_id})
            await asyncio.sleep(HEARTBEAT_SECONDS / 3)
            path = CONSOLE[number % len(CONSOLE)].format(run=self._model_id)
            await self._ask(connection, "console", self._request(path, method="GET"))
            await asyncio.sleep(HEARTBEAT_SECONDS / 3)

    async def _submit(self, connection: Connection, seq_id: int, *, is_pass: bool) -> str:
        """A small pass or a step; the id of its promise."""
        kind = "forward_backward" if is_pass else "optim_step"
        promise = await self._ask(connection, kind, self._operation(seq_id, is_pass=is_pass))
        return str(promise["request_id"])

    def _operation(self, seq_id: int, *, is_pass: bool) -> bytes:
        if is_pass:
            inputs = ForwardBackwardInput([DATUM], "cross_entropy")
            body = proto.encode_pass(ForwardBackwardRequest(inputs, self._model_id, seq_id))
            return self._request("/forward_backward", body, PROTO)
        adam = {"learning_rate": 1e-3}
        step = {"model_id": self._model_id, "seq_id": seq_id, "adam_params": adam}
        return self._request("/optim_step", orjson.dumps(step))

    async def _result(self, connection: Connection, request_id: str) -> None:
        body = orjson.dumps({"request_id": request_id})
        request = self._request("/retrieve_future", body, "application/json", accept=PROTO)
        while True:
            started = time.perf_counter()
            self._measured.held_polls += 1
            try:
                status, _ = await connection.ask(request)
            finally:
                self._measured.held_polls -= 1
            self._measured.note("poll", status, time.perf_counter() - started)
            if status != 408:
                return

    async def _post(self, connection: Connection, kind: str, path: str, body: Any) -> Any:
        return await self._send(connection, kind, path, orjson.dumps(body))

    async def _send(self, connection: Connection, kind: str, path: str, body: bytes) -> Any:
        """Send until it is accepted; what was refused for lack of room is sent again."""
        content_type = PROTO if kind == "forward_backward" else "application/json"
        return await self._ask(connection, kind, self._request(path, body, content_type))

    async def _ask(self, connection: Connection, kind: str, request: bytes) -> Any:
        while True:
            started = time.perf_counter()
            status, answer = await connection.ask(request)
            self._measured.note(kind, status, time.perf_counter() - started)
            if status == 200:
                return orjson.loads(answer)
            if status != 429:
                raise RuntimeError(f"{kind} was answered {status}: {answer[:300]!r}")
            await asyncio.sleep(1.0)

    def _request(
        self,
        path: str,
        body: bytes = b"",
        content_type: str = "application/json",
        accept: str = "*/*",
        method: str = "POST",
    ) -> bytes:
        head = (
            f"{method} /api/v1{path} HTTP/1.1\r\nhost: load\r\nx-api-key: {self._key}\r\n"
            f"content-type: {content_type}\r\naccept: {accept}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _connection(self) -> Connection:
        return await Connection.open(*self._address)


class Harm(Client):
    """Somebody who means harm, in one of several ways."""

    LARGE_BYTES = 100 * 1000 * 1000
    MAX_RECORDED = 10
    """Large bodies that are accepted, and so written to disk; those after them are refused."""

    def __init__(self, address: tuple[str, int], key: str, measured: Measured) -> None:
        super().__init__(address, key, measured)
        self._large = np.ones(self.LARGE_BYTES // 4, np.int32)
        self._result_id = ""

    async def start(self) -> None:
        await super().start()
        control = await self._connection()
        promise = await self._send(
            control, "forward_backward", "/forward_backward", self._pass([DATUM] * 1024, 1)
        )
        self._result_id = promise["request_id"]
        await self._result(control, self._result_id)

    def ways(self) -> dict[str, list[Coroutine[Any, Any, None]]]:
        return {
            "large": [self.send_large(is_recorded=number == 0) for number in range(2)],
            "silent": [self.never_read() for _ in range(50)],
            "flood": [self.flood() for _ in range(3000)],
        }

    def _pass(self, data: list[Datum], seq_id: int) -> bytes:
        inputs = ForwardBackwardInput(data, "cross_entropy")
        return proto.encode_pass(ForwardBackwardRequest(inputs, self._model_id, seq_id))

    async def send_large(self, *, is_recorded: bool) -> None:
        connection = await self._connection()
        data = [Datum(model_input=ModelInput.from_ints(self._large), loss_fn_inputs={})]
        refused = self._request("/forward_backward", self._pass(data, 0), PROTO)
        for number in itertools.count(1):
            request = refused
            if is_recorded and number <= self.MAX_RECORDED:
                # Far ahead of the others, so that it waits and its body stays where it is.
                request = self._request("/forward_backward", self._pass(data, 99 + number), PROTO)
            started = time.perf_counter()
            status, _ = await connection.ask(request)
            self._measured.harm["large", status].append(time.perf_counter() - started)

    async def never_read(self) -> None:
        asked = orjson.dumps({"request_id": self._result_id})
        request = self._request("/retrieve_future", asked, "application/json", accept=PROTO)
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(silent, self._address)
            await loop.sock_sendall(silent, request * 20)
            self._measured.harm["silent", 0].append(0.0)
            await asyncio.Event().wait()

    async def flood(self) -> None:
        connection = await self._connection()
        body = orjson.dumps({"model_id": self._model_id})
        request = self._request("/get_info", body, "application/json")
        while True:
            started = time.perf_counter()
            status, _ = await connection.ask(request)
            self._measured.harm["flood", status].append(time.perf_counter() - started)
