"""Operations: the entries of a model's log, and how their recorded bodies are read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinsmith.server.store.records import OperationRecord
from tinsmith.types import (
    CreateModelRequest,
    Datum,
    ForwardRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.types.model import Model
from tinsmith.types.training import ForwardBackwardRequest
from tinsmith.types.weights import LoadWeightsRequest
from tinsmith.wire import dialects, json
from tinsmith.wire.limits import Limits

PASSES = ("forward", "forward_backward")
REFUSED = "refused"
"""The kind of an id that was used up by a request we did not accept."""

_MESSAGES: dict[str, type[Model]] = {
    "create_model": CreateModelRequest,
    "optim_step": OptimStepRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights_external": SaveWeightsExternalRequest,
}

PassRequest = ForwardBackwardRequest | ForwardRequest


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A load, and whose right to read the weights it uses; the token that gave it is not kept."""

    request: LoadWeightsRequest
    reader: str


@dataclass(slots=True, eq=False)
class Operation:
    """An operation on its way through the server."""

    record: OperationRecord
    request: Any = None
    """The decoded request; None while it lies in the store only."""
    is_held: bool = False
    """Whether the request counts among those kept in memory."""
    attempts: int = 0
    """How often the engine died while this was under way."""
    disk_troubles: int = 0
    """How often its files could not be written."""

    @property
    def seq_id(self) -> int:
        return self.record.seq_id

    @property
    def is_pass(self) -> bool:
        return self.record.kind in PASSES

    @property
    def num_tokens(self) -> int:
        return self.record.num_tokens


def decode(kind: str, body: bytes, content_type: str, limits: Limits) -> Any:
    """The request in a recorded body."""
    if kind in PASSES:
        return dialects.decode_pass(
            body, content_type, forward_only=kind == "forward", limits=limits
        )
    if kind == "load_weights":
        wrapped = json.parse(body, limits)
        return LoadRequest(LoadWeightsRequest(**wrapped["request"]), wrapped["reader"])
    return dialects.decode(_MESSAGES[kind], body, limits)


def encode_load(load: LoadRequest) -> bytes:
    request = {k: v for k, v in load.request.to_wire().items() if k != "weights_access_token"}
    return json.encode({"request": request, "reader": load.reader})


def pass_data(request: PassRequest) -> tuple[list[Datum], str, dict[str, float | str], bool]:
    """The examples, the loss, its settings, and whether gradients are left alone."""
    if isinstance(request, ForwardRequest):
        inputs, forward_only = request.forward_input, True
    else:
        inputs, forward_only = request.forward_backward_input, False
    return inputs.data, inputs.loss_fn, dict(inputs.loss_fn_config or {}), forward_only
