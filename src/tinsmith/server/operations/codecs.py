"""How a recorded request is read, and what two requests share that are one sent twice.

A client that tries again may write the same request in other bytes: keys in another order, a token
that has been renewed, a number drawn for each attempt. So what is compared is a digest of the
decoded request, without the fields that change from one attempt to the next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from tinsmith.server.operations import recorded_pass
from tinsmith.server.operations.recorded_pass import WITH_EXPERTS, PassRequest, RecordedPass
from tinsmith.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    LossFnType,
)
from tinsmith.types.model import Model
from tinsmith.types.weights import LoadWeightsRequest
from tinsmith.wire import dialects, json, proto
from tinsmith.wire.limits import Limits


class Codec(Protocol):
    def decode(self, body: bytes, content_type: str, limits: Limits) -> Any:
        """The request in a recorded body."""
        ...

    def digest(self, request: Any) -> str:
        """The same for two requests if, and only if, they ask for the same."""
        ...


@dataclass(frozen=True, slots=True)
class JsonCodec:
    request: type[Model]
    per_attempt: frozenset[str] = frozenset()
    """Fields that a client chooses anew each time it sends the same request."""

    def decode(self, body: bytes, content_type: str, limits: Limits) -> Model:
        return dialects.decode(self.request, body, limits)

    def digest(self, request: Model) -> str:
        return _digest_fields(request.to_wire(), self.per_attempt)


@dataclass(frozen=True, slots=True)
class PassCodec:
    forward_only: bool

    def decode(self, body: bytes, content_type: str, limits: Limits) -> RecordedPass:
        def decode_request(body: bytes, content_type: str) -> PassRequest:
            return dialects.decode_pass(
                body, content_type, forward_only=self.forward_only, limits=limits
            )

        if content_type == WITH_EXPERTS:
            return recorded_pass.decode(body, decode_request)
        return RecordedPass(decode_request(body, content_type))

    def digest(self, recorded: RecordedPass) -> str:
        """Of the request: the same one, sent again later, may find other experts or none."""
        request = recorded.request
        data, loss_fn, config, forward_only = pass_data(request)
        inputs = ForwardBackwardInput(
            [_in_order(datum) for datum in data], loss_fn, dict(sorted(config.items()))
        )
        kind = ForwardRequest if forward_only else ForwardBackwardRequest
        # Tensors are written as they are, so this costs little more than copying them.
        return _digest(proto.encode_pass(kind(inputs, request.model_id, request.seq_id)))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A load, and whose right to read the weights it uses; the token that gave it is not kept."""

    request: LoadWeightsRequest
    reader: str


@dataclass(frozen=True, slots=True)
class LoadCodec:
    _PER_ATTEMPT = frozenset({"weights_access_token"})

    def decode(self, body: bytes, content_type: str, limits: Limits) -> LoadRequest:
        wrapped = json.parse(body, limits)
        return LoadRequest(LoadWeightsRequest(**wrapped["request"]), wrapped["reader"])

    def encode(self, load: LoadRequest) -> bytes:
        request = {k: v for k, v in load.request.to_wire().items() if k not in self._PER_ATTEMPT}
        return json.encode({"request": request, "reader": load.reader})

    def digest(self, load: LoadRequest) -> str:
        return _digest_fields(load.request.to_wire(), self._PER_ATTEMPT)


def pass_data(request: PassRequest) -> tuple[list[Datum], LossFnType, dict[str, float | str], bool]:
    """The examples, the loss, its settings, and whether gradients are left alone."""
    if isinstance(request, ForwardRequest):
        inputs, forward_only = request.forward_input, True
    else:
        inputs, forward_only = request.forward_backward_input, False
    return inputs.data, inputs.loss_fn, dict(inputs.loss_fn_config or {}), forward_only


def _in_order(datum: Datum) -> Datum:
    """The datum with its inputs by name; protobuf promises no order for them."""
    names = list(datum.loss_fn_inputs)
    if names == sorted(names):
        return datum
    return Datum(
        model_input=datum.model_input,
        loss_fn_inputs={name: datum.loss_fn_inputs[name] for name in sorted(names)},
        model_input_spans=datum.model_input_spans,
        loss_fn_input_spans=datum.loss_fn_input_spans,
    )


def _digest_fields(fields: dict[str, Any], left_out: frozenset[str]) -> str:
    kept = {name: value for name, value in fields.items() if name not in left_out}
    option = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY
    return _digest(orjson.dumps(kept, option=option))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
