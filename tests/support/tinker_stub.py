"""A service in memory that answers at once: enough of the protocol for any client's program.

Behind it is no model: log-probabilities are -1, samples are the tokens 5 and 6. What matters is
what the client sends, in which order, and what it makes of answers. Every endpoint can be replaced
by a script of the scripted server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import numpy as np

from tests.support.scripted_server import Answer, Recorded, ScriptedServer
from tinsmith.types import (
    ForwardBackwardOutput,
    ForwardRequest,
    SampledSequence,
    SampleResponse,
    TensorData,
)
from tinsmith.wire import proto, zstd

PROTOBUF = {"content-type": "application/x-protobuf"}


class TinkerStub(ScriptedServer):
    def __init__(self, flags: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.flags = flags or {}
        self.switches: dict[str, Any] = {}
        self.results: dict[str, Answer] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.passes: list[Any] = []
        self.order: list[tuple[str, int]] = []
        """Training operations by endpoint and seq_id, in order of arrival."""
        self._ids = itertools.count(1)
        self._sessions = itertools.count(1)
        self.samples: dict[str, dict[str, Any]] = {}
        self.finished: list[str] = []
        self._completed = asyncio.Event()
        self.default = self._route

    def promise(self, result: Answer, **extra: Any) -> Answer:
        request_id = f"r{next(self._ids)}"
        self.results[request_id] = result
        return Answer(200, {"request_id": request_id, **extra})

    def _route(self, request: Recorded) -> Any:
        path = request.path.partition("/api/v1")[2]
        name = path.strip("/").split("/")[0]
        handler = getattr(self, f"_do_{name}", None)
        return Answer(404, {"detail": f"no {path}"}) if handler is None else handler(request)

    def _do_client(self, request: Recorded) -> Answer:
        return Answer(200, self.flags if request.path.endswith("/config") else self.switches)

    def _do_auth(self, request: Recorded) -> Answer:
        return Answer(200, {"jwt": self.flags.get("_jwt", "")})

    def _do_create_session(self, request: Recorded) -> Answer:
        return Answer(200, {"session_id": f"s{next(self._sessions)}"})

    def _do_session_heartbeat(self, request: Recorded) -> Answer:
        return Answer(200, {})

    def _do_telemetry(self, request: Recorded) -> Answer:
        return Answer(200, {"status": "accepted"})

    def _do_sessions(self, request: Recorded) -> Answer:
        if request.path.endswith("/finish"):
            return Answer(204, b"")
        return Answer(404, {"detail": "404"})

    def _do_get_server_capabilities(self, request: Recorded) -> Answer:
        return Answer(200, {"supported_models": [{"model_name": "m"}]})

    def _do_create_model(self, request: Recorded) -> Answer:
        body = request.json()
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        return self.promise(Answer(200, {"model_id": model_id, "type": "create_model"}))

    def _do_get_info(self, request: Recorded) -> Answer:
        return Answer(
            200, {"model_id": request.json()["model_id"], "model_data": {"model_name": "m"}}
        )

    def _do_weights_info(self, request: Recorded) -> Answer:
        return Answer(200, {"base_model": "m", "is_lora": True, "lora_rank": 8})

    def _do_forward_backward(self, request: Recorded) -> Answer:
        body = request.body
        if request.headers.get("content-encoding") == "zstd":
            body = zstd.decompress(body, max_bytes=1 << 30)
        message = proto.decode_pass(body)
        self.passes.append(message)
        self.order.append(("forward_backward", message.seq_id or 0))
        inputs = (
            message.forward_input
            if isinstance(message, ForwardRequest)
            else message.forward_backward_input
        )
        outputs = []
        total = 0.0
        for datum in inputs.data:
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
            weights = datum.loss_fn_inputs.get("weights")
            total += 0.0 if weights is None else float(weights.to_numpy().sum())
            outputs.append({"logprobs": TensorData.from_numpy(np.full(targets.shape, -1.0, "f4"))})
        output = ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": total})
        return self.promise(Answer(200, proto.encode_output(output), PROTOBUF))

    def _operation(self, request: Recorded, result: dict[str, Any]) -> Answer:
        body = request.json()
        name = request.path.rpartition("/")[2]
        self.order.append((name, body.get("seq_id") or 0))
        return self.promise(Answer(200, result))

    def _do_optim_step(self, request: Recorded) -> Answer:
        return self._operation(request, {"metrics": {"lr": 0.1}})

    def _do_save_weights(self, request: Recorded) -> Answer:
        body = request.json()
        return self._operation(
            request, {"path": f"tinker://{body['model_id']}/weights/{body['path']}"}
        )

    def _do_load_weights(self, request: Recorded) -> Answer:
        return self._operation(request, {"path": request.json()["path"]})

    def _do_save_weights_for_sampler(self, request: Recorded) -> Answer:
        body = request.json()
        if body.get("path"):
            path = f"tinker://{body['model_id']}/sampler_weights/{body['path']}"
            return self._operation(request, {"path": path})
        session = body["model_id"].split(":")[0]
        seq = body["sampling_session_seq_id"]
        return self._operation(request, {"sampling_session_id": f"{session}:sample:{seq}"})

    def _do_save_weights_external(self, request: Recorded) -> Answer:
        body = request.json()
        path = f"tinker://{body['model_id']}/external_weights/{body['path']}"
        return self._operation(request, {"path": path})

    def _do_create_custom_loss(self, request: Recorded) -> Answer:
        return self.promise(Answer(200, {"loss_id": "loss-1"}))

    def _do_create_sampling_session(self, request: Recorded) -> Answer:
        body = request.json()
        session_id = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        return Answer(200, {"sampling_session_id": session_id})

    def _do_join_sampling_session(self, request: Recorded) -> Answer:
        return Answer(200, {"client_counter": 7})

    def _do_samplers(self, request: Recorded) -> Answer:
        return Answer(200, {"sampler_id": "x", "base_model": "m"})

    def _do_asample(self, request: Recorded) -> Answer:
        body = request.json()
        count = body["num_samples"]
        prompt = sum(len(chunk.get("tokens", ())) for chunk in body["prompt"]["chunks"])
        sequences = [
            SampledSequence("stop", "", np.array([5, 6], "<i4"), np.array([-1, -2], "<f4"))
            for _ in range(count)
        ]
        logprobs = np.full(prompt, -0.5, "<f4")
        logprobs[
            : 1 if not body.get("prompt_logprobs_last_n") else -body["prompt_logprobs_last_n"]
        ] = np.nan
        response = SampleResponse(
            sequences, prompt_logprobs_np=logprobs if body.get("prompt_logprobs") else None
        )
        answer = self.promise(Answer(200, proto.encode_sample(response), PROTOBUF))
        request_id = json.loads(answer.encoded())["request_id"]
        self.samples[request_id] = body
        self.finished.append(request_id)
        self._completed.set()
        answer.body = {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}:{i}" for i in range(count)],
        }
        return answer

    async def _do_retrieve_futures(self, request: Recorded) -> Answer:
        cursor = request.json()["prev_cursor"]
        while len(self.finished) <= cursor:
            self._completed.clear()
            await self._completed.wait()
        completions = [
            {"state": "finished", "request_id": request_id} for request_id in self.finished[cursor:]
        ]
        return Answer(200, {"completions": completions, "cursor": len(self.finished)})

    async def _do_retrieve_future(self, request: Recorded) -> Answer:
        request_id = request.json()["request_id"]
        if request_id in self.hold:
            await self.hold[request_id].wait()
        return self.results.get(request_id, Answer(410, {"detail": "unknown"}))

    def _do_cancel_future(self, request: Recorded) -> Answer:
        return Answer(204, b"")
