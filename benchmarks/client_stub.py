"""A service that answers at once and knows nothing: what a client is measured against.

Prints its port and serves until its standard input closes. Answers are prepared beforehand, so that
the time measured is the client's. Its argument says how many tokens a sample has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from typing import cast

import numpy as np

from tinsmith.types import ForwardBackwardOutput, SampledSequence, SampleResponse, TensorData
from tinsmith.wire import proto

REQUEST_ID = re.compile(rb'"request_id"\s*:\s*"([a-z]+)"')
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


def answer(body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def as_json(value: object) -> bytes:
    return answer(json.dumps(value).encode())


def pass_result(num_datums: int, num_tokens: int) -> bytes:
    logprobs = np.full(num_tokens, -1.0, dtype=np.float32)
    outputs = [{"logprobs": TensorData.from_numpy(logprobs)} for _ in range(num_datums)]
    output = ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": 1.0})
    return answer(proto.encode_output(output), "application/x-protobuf")


def sample_result(num_tokens: int) -> bytes:
    tokens = np.arange(num_tokens, dtype=np.int32)
    logprobs = np.full(num_tokens, -1.0, dtype=np.float32)
    response = SampleResponse([SampledSequence("length", "", tokens, logprobs)])
    return answer(proto.encode_sample(response), "application/x-protobuf")


BY_PATH = {
    b"config": as_json({}),
    b"dynamic_config": as_json({}),
    b"create_session": as_json({"session_id": "s"}),
    b"session_heartbeat": as_json({}),
    b"telemetry": as_json({"status": "accepted"}),
    b"create_model": as_json({"request_id": "model"}),
    b"forward_backward": as_json({"request_id": "pass"}),
    b"optim_step": as_json({"request_id": "step"}),
    b"create_sampling_session": as_json({"sampling_session_id": "s:sample:0"}),
    b"asample": as_json({"request_id": "sample", "sample_sequence_ids": ["sample:0"]}),
    b"finish": answer(b"{}"),
}
RESULTS = {
    b"model": as_json({"model_id": "s:train:0"}),
    b"pass": pass_result(64, 1024),
    b"step": as_json({"metrics": {}}),
    b"sample": sample_result(int(sys.argv[1]) if sys.argv[1:] else 16),
}


class Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            found = LENGTH.search(head)
            stop = end + 4 + (int(found.group(1)) if found else 0)
            if len(self._buffer) < stop:
                return
            name = head.split(b" ", 2)[1].rpartition(b"/")[2]
            if name == b"retrieve_future":
                match = REQUEST_ID.search(self._buffer, end)
                assert match is not None
                self._transport.write(RESULTS[match.group(1)])
            else:
                self._transport.write(BY_PATH[name])
            del self._buffer[:stop]


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            import uvloop

            uvloop.run(serve())
        except ImportError:
            asyncio.run(serve())
