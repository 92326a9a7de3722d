"""A client that goes through a program, and does not give up: what got no answer it sends again, to
whichever server comes next. All that it is told is compared, and written down for the checker."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import dataclass
from typing import Any

import orjson

from history.calls import Answer as Told
from history.calls import Call as Entry
from history.calls import Submission
from tests.simulation.network import Answer, Network, Request
from tests.simulation.programs import LORA, Planned, Sample, value_of
from tests.support.sequential import MODEL, Outcome
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import proto

_PATIENCE_SECONDS = 30.0
"""How long an answer is waited for on one connection."""

_LATER = (429, 503)


@dataclass(frozen=True, slots=True)
class Done:
    planned: Planned
    request_id: str


class Client:
    def __init__(
        self,
        random: random.Random,
        network: Network,
        key: str,
        history: list[Entry],
        program: tuple[Planned, ...],
    ) -> None:
        self._random = random
        self._network = network
        self._key = key
        self._history = history
        self.program = program
        self._done: list[Done] = []
        self._num_samplers = 0
        self.num_operations = 0
        """That were carried out, and whose end was what it had to be."""

    async def live(self) -> None:
        await self._create()
        place = 0
        while place < len(self.program):
            burst = self.program[place : place + self._random.randrange(1, 17)]
            place += len(burst)
            async with asyncio.TaskGroup() as group:
                for planned in burst:
                    group.create_task(self._carry_out(planned))
            if self._random.random() < 0.2:
                await self._ask_again(self._random.choice(self._done))
            if self._random.random() < 0.1:
                await asyncio.sleep(self._random.choice((0.1, 1.0, 5.0)))

    async def check_all(self) -> None:
        """What was answered once is answered so for ever."""
        for done in self._random.sample(self._done, min(5, len(self._done))):
            await self._ask_again(done)

    async def _create(self) -> None:
        fields = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        session = await self._post("/api/v1/create_session", orjson.dumps(fields))
        assert session.status == 200, session
        self._session_id = str(orjson.loads(session.body)["session_id"])
        body = {
            "session_id": self._session_id,
            "model_seq_id": 0,
            "base_model": MODEL.name,
            "lora_config": {"rank": LORA.rank, "seed": LORA.seed},
        }
        request_id = await self._submit(
            "/api/v1/create_model",
            orjson.dumps(body),
            kind="create_model",
            whose=self._session_id,
            seq_id=0,
            asks="create",
        )
        created = await self._result(request_id, "create_model")
        assert isinstance(created, dict), created
        self._model_id = str(created["model_id"])
        self.num_operations += 1

    # Operations

    async def _carry_out(self, planned: Planned) -> None:
        request_id = await self._send(planned)
        await self._compare(planned, request_id)
        self._done.append(Done(planned, request_id))
        self.num_operations += 1
        if planned.samples and isinstance(planned.outcome, dict):
            await self._sample(planned)

    async def _send(self, planned: Planned) -> str:
        return await self._submit(
            planned.path,
            planned.body_for(self._model_id),
            content_type=planned.content_type,
            kind=planned.kind,
            whose=self._model_id,
            seq_id=planned.seq_id,
            asks=planned.asks,
            path=planned.loads_for(self._model_id),
        )

    async def _compare(self, planned: Planned, request_id: str) -> None:
        outcome = await self._result(request_id, planned.kind)
        if isinstance(outcome, dict):
            outcome = {name: value for name, value in outcome.items() if value is not None}
        expected = planned.outcome_for(self._model_id)
        assert outcome == expected, (
            f"{planned.kind} {planned.seq_id} of {self._model_id} ended with {outcome!r} and not "
            f"with {expected!r}"
        )

    async def _ask_again(self, done: Done) -> None:
        if self._random.random() < 0.5:
            request_id = await self._send(done.planned)
            assert request_id == done.request_id, (
                f"{done.planned.kind} {done.planned.seq_id} of {self._model_id}, sent again, is "
                f"{request_id} and not {done.request_id}"
            )
        await self._compare(done.planned, done.request_id)

    # Samples

    async def _sample(self, planned: Planned) -> None:
        assert isinstance(planned.outcome, dict)
        path = str(planned.outcome_for(self._model_id)["path"])  # type: ignore[call-overload]
        self._num_samplers += 1
        fields = {
            "session_id": self._session_id,
            "sampling_session_seq_id": self._num_samplers,
            "model_path": path,
        }
        made = await self._post("/api/v1/create_sampling_session", orjson.dumps(fields))
        assert made.status == 200, made
        sampler_id = str(orjson.loads(made.body)["sampling_session_id"])
        for number, sample in enumerate(planned.samples, start=1):
            await self._sample_once(path, sampler_id, number, sample)

    async def _sample_once(self, path: str, sampler_id: str, number: int, sample: Sample) -> None:
        chunks = [{"type": "encoded_text", "tokens": sample.prompt}]
        body = orjson.dumps(
            {
                "sampling_session_id": sampler_id,
                "seq_id": number,
                "num_samples": 1,
                "prompt": {"chunks": chunks},
                "sampling_params": sample.params,
            }
        )
        outcome: Outcome | None = None
        while outcome is None:
            request_id = await self._submit(
                "/api/v1/asample",
                body,
                kind="asample",
                whose=sampler_id,
                seq_id=number,
                asks=repr(sample),
                path=path,
            )
            outcome = await self._result_or_gone(request_id, "asample")
        assert isinstance(outcome, bytes), outcome
        value = value_of(proto.decode_sample(outcome))
        assert value == sample.value, f"sample {number} of {sampler_id} is another than it was"
        self.num_operations += 1

    # Requests

    async def _submit(
        self,
        url: str,
        request_body: bytes,
        content_type: str = JSON,
        *,
        kind: str,
        whose: str,
        seq_id: int,
        asks: str,
        path: str | None = None,
    ) -> str:
        answer = await self._post(url, request_body, content_type)
        assert answer.status == 200, answer
        request_id = str(orjson.loads(answer.body)["request_id"])
        self._history.append(
            Submission(
                started=self._sent_at,
                ended=_now(),
                kind=kind,
                whose=whose,
                seq_id=seq_id,
                body=asks,
                asks=asks,
                request_id=request_id,
                path=path,
            )
        )
        return request_id

    async def _result(self, request_id: str, kind: str) -> Outcome:
        outcome = await self._result_or_gone(request_id, kind)
        assert outcome is not None, f"the result of {request_id} is gone"
        return outcome

    async def _result_or_gone(self, request_id: str, kind: str) -> Outcome | None:
        body = orjson.dumps({"request_id": request_id})
        while True:
            answer = await self._post("/api/v1/retrieve_future", body)
            if answer.status == 410:
                return None
            assert answer.status in (200, 408), answer
            told = _told(answer)
            self._note(request_id, kind, self._sent_at, answer, told)
            if told is not None:
                return told

    def _note(
        self, request_id: str, kind: str, started: float, answer: Answer, told: Outcome | None
    ) -> None:
        is_failed = isinstance(told, str)
        made: str | None = None
        if isinstance(told, dict):
            names = ("model_id",) if kind == "create_model" else ("path",)
            made = next((told[name] for name in names if told.get(name) is not None), None)
        outcome = None if told is None else hashlib.sha256(answer.body).hexdigest()
        value = outcome if isinstance(told, bytes) else None
        if kind == "asample" and isinstance(told, bytes):
            value = value_of(proto.decode_sample(told))
        self._history.append(
            Told(
                started=started,
                ended=_now(),
                request_id=request_id,
                outcome=outcome,
                value=value,
                made=made,
                is_failed=is_failed,
            )
        )

    async def _post(self, path: str, body: bytes, content_type: str = JSON) -> Answer:
        """The first answer that is more than a request to come back later."""
        headers = [
            (b"x-api-key", self._key.encode()),
            (b"content-type", content_type.encode()),
            (b"accept", PROTOBUF.encode()),
        ]
        while True:
            sent_at = _now()
            request = Request("POST", path, headers, body)
            server = self._network.balanced()
            answer = await self._network.call("client", server, request, _PATIENCE_SECONDS).answered
            if answer is not None and answer.status not in _LATER:
                self._sent_at = sent_at
                return answer
            await asyncio.sleep(self._random.random())


def _told(answer: Answer) -> Outcome | None:
    """What was said of a request; None for "not yet"."""
    if answer.status == 408:
        return None
    if answer.header(b"content-type").startswith(PROTOBUF.encode()):
        return answer.body
    message: dict[str, Any] = orjson.loads(answer.body)
    return str(message["error"]) if "error" in message else message


def _now() -> float:
    return asyncio.get_running_loop().time()
