"""What exchanges mean: operations that were submitted, and answers to questions for results."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from history.listening import Exchange
from tinsmith.server.operations.codecs import PassCodec
from tinsmith.server.operations.recorded_pass import PassRequest, RecordedPass
from tinsmith.types import (
    ForwardBackwardRequest,
    ForwardRequest,
    SampleResponse,
)
from tinsmith.types.protocol import PROTOBUF
from tinsmith.wire import dialects, endpoints, json, proto

PASSES = ("forward", "forward_backward")
CREATIONS = ("create_model", "create_from")
_LOADS = ("load_weights", "create_from")
_KINDS = {
    endpoint.full_path: endpoint.path.strip("/")
    for endpoint in vars(endpoints).values()
    if isinstance(endpoint, endpoints.Promised)
}
_RETRIEVE = endpoints.RETRIEVE_FUTURE.full_path
_OF_ONE_CLIENT = {
    *("model_id", "seq_id", "session_id", "model_seq_id", "sampling_session_id"),
    *("sampling_session_seq_id", "user_metadata", "type", "model_path"),
}
_OF_ONE_ATTEMPT = {"sampling_session_seq_id", "weights_access_token"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request that was taken, from its first byte to the last byte of its promise."""

    started: float
    ended: float
    kind: str
    whose: str
    """The model of an operation, the session of a creation, the sampler of a sample."""
    seq_id: int | None
    body: str
    """The same for two that are one sent twice."""
    asks: str
    """The same for two that ask the same of whatever they ask it of."""
    request_id: str
    path: str | None = None
    """The checkpoint that it takes."""
    is_repeatable: bool = True
    """Whether its result is determined by the state it meets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a question for a result was told."""

    started: float
    ended: float
    request_id: str
    outcome: str | None
    """What was said, as a checksum or an error's category; None for "not yet"."""
    value: str | None = None
    """Of a pass or a sample: its numbers, whichever form they came in."""
    made: str | None = None
    """The model, checkpoint or sampler that came into being."""
    is_failed: bool = False


Call = Submission | Answer


class Recorder:
    """Turns exchanges into a history. What is neither of the two is left out."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._kinds: dict[str, str] = {}

    def hear(self, exchange: Exchange) -> None:
        path = exchange.request.path.partition("?")[0]
        if path == _RETRIEVE:
            self._hear_answer(exchange)
        elif (kind := _KINDS.get(path)) is not None and exchange.answer.status == 200:
            self._hear_submission(kind, exchange)

    def _hear_submission(self, kind: str, exchange: Exchange) -> None:
        body, media = exchange.request.body, exchange.request.headers.get("content-type", "")
        request_id = str(orjson.loads(exchange.answer.body)["request_id"])
        times = {"started": exchange.request.at, "ended": exchange.answer.at}
        self._kinds[request_id] = kind
        if kind in PASSES:
            request = dialects.decode_pass(body, media, forward_only=kind == "forward")
            if isinstance(request, ForwardRequest):
                # Some clients send these, marked as such, to the other path.
                kind, inputs = "forward", request.forward_input
                same: PassRequest = ForwardRequest(inputs, "", 0)
            else:
                inputs = request.forward_backward_input
                same = ForwardBackwardRequest(inputs, "", 0)
            codec = PassCodec(kind == "forward")
            self.calls.append(
                Submission(
                    **times,
                    kind=kind,
                    whose=str(request.model_id),
                    seq_id=request.seq_id,
                    body=codec.digest(RecordedPass(request)),
                    asks=codec.digest(RecordedPass(same)),
                    request_id=request_id,
                    is_repeatable=inputs.loss_fn != "custom",
                )
            )
            return
        fields = orjson.loads(body)
        if kind == "load_weights" and fields.get("model_id") is None:
            kind = self._kinds[request_id] = "create_from"
        sampler = fields.get("sampling_session_id")
        params = fields.get("sampling_params") or {}
        self.calls.append(
            Submission(
                **times,
                kind=kind,
                whose=str(fields.get("model_id") or sampler or fields.get("session_id")),
                seq_id=fields.get("model_seq_id" if kind in CREATIONS else "seq_id"),
                body=_digest(_without(fields, _OF_ONE_ATTEMPT)),
                asks=_digest(_without(fields, _OF_ONE_CLIENT | _OF_ONE_ATTEMPT | _paths(kind))),
                request_id=request_id,
                path=fields.get("path") if kind in _LOADS else fields.get("model_path"),
                is_repeatable=kind != "asample"
                or params.get("seed") is not None
                or params.get("temperature") == 0,
            )
        )

    def _hear_answer(self, exchange: Exchange) -> None:
        request_id = str(orjson.loads(exchange.request.body)["request_id"])
        kind = self._kinds.get(request_id)
        body, media = exchange.answer.body, exchange.answer.headers.get("content-type", "")
        if kind is None or exchange.answer.status not in (200, 408):
            return  # refused, for now or because the result has expired
        is_binary = dialects.media_type(media) == PROTOBUF
        found: dict[str, Any] = {} if is_binary else orjson.loads(body)
        if found.get("type") == "metadata_only" or "response_payload_size" in found:
            return  # asked again at once
        outcome: str | None = hashlib.sha256(media.encode() + body).hexdigest()
        if found.get("type") == "try_again":
            outcome = None
        is_failed = "error" in found
        if is_failed:
            outcome = f"failed: {found.get('category')}"
        self.calls.append(
            Answer(
                started=exchange.request.at,
                ended=exchange.answer.at,
                request_id=request_id,
                outcome=outcome,
                value=None if outcome is None or is_failed else _value(kind, body, is_binary),
                made=_made(kind, found),
                is_failed=is_failed,
            )
        )


def _value(kind: str, body: bytes, is_binary: bool) -> str | None:
    """The numbers of a pass or a sample."""
    digest = hashlib.sha256()
    if kind in PASSES:
        if is_binary:
            output = proto.decode_output(body)
            tensors = [{k: v.to_numpy() for k, v in o.items()} for o in output.loss_fn_outputs]
            loss = output.metrics["loss:sum"]
        else:
            found = orjson.loads(body)
            tensors = [{k: v["data"] for k, v in o.items()} for o in found["loss_fn_outputs"]]
            loss = found["metrics"]["loss:sum"]
        for each in tensors:
            for name in sorted(each):
                digest.update(np.asarray(each[name], np.float32).tobytes())
        return f"{float(loss).hex()} {digest.hexdigest()[:16]}"
    if kind == "asample":
        reply = proto.decode_sample(body) if is_binary else json.decode(SampleResponse, body)
        for sequence in reply.sequences:
            digest.update(repr([list(sequence.tokens), list(sequence.logprobs or [])]).encode())
        digest.update(repr(reply.prompt_logprobs).encode())
        return digest.hexdigest()[:16]
    return None


def _made(kind: str, found: dict[str, Any]) -> str | None:
    names = ("model_id",) if kind in CREATIONS else ("path", "sampling_session_id")
    return next((found[name] for name in names if found.get(name) is not None), None)


def _paths(kind: str) -> set[str]:
    return {"path"} if kind in _LOADS else set()


def _without(fields: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if k not in left_out and v is not None}


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()
