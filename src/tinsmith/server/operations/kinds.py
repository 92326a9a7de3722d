"""The kinds of operations, one row each.

A row says how a recorded request is read, whether the kind changes the model (and so is replayed),
how it is scheduled (the class of the row), and what carries it out. Everything else that
asks about kinds asks this table: a new kind is a row here and its function in `execution`.
"""

from __future__ import annotations

from tinsmith.server.operations.codecs import JsonCodec, LoadCodec, PassCodec
from tinsmith.server.operations.execution import Executor
from tinsmith.server.operations.operation import Kind, Operation, PassKind, SingleKind, StepKind
from tinsmith.server.store.records import OperationRecord
from tinsmith.types import (
    CreateModelRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

_ROWS = (
    SingleKind(
        name="create_model",
        codec=JsonCodec(CreateModelRequest),
        execute=Executor.create_model,
    ),
    PassKind(
        name="forward",
        codec=PassCodec(forward_only=True),
        prepare=Executor.pass_of,
    ),
    PassKind(
        name="forward_backward",
        codec=PassCodec(forward_only=False),
        changes_model=True,
        prepare=Executor.pass_of,
    ),
    StepKind(
        name="optim_step",
        codec=JsonCodec(OptimStepRequest),
        changes_model=True,
        prepare=Executor.step_of,
    ),
    SingleKind(
        name="load_weights",
        codec=LoadCodec(),
        changes_model=True,
        execute=Executor.load_weights,
        replay=Executor.replay_load,
    ),
    SingleKind(
        name="save_weights",
        codec=JsonCodec(SaveWeightsRequest),
        execute=Executor.save_weights,
    ),
    SingleKind(
        name="save_weights_for_sampler",
        # The official client draws this number again each time it sends the same save.
        codec=JsonCodec(SaveWeightsForSamplerRequest, frozenset({"sampling_session_seq_id"})),
        execute=Executor.save_weights_for_sampler,
    ),
    SingleKind(
        name="save_weights_external",
        codec=JsonCodec(SaveWeightsExternalRequest),
        execute=Executor.save_weights_external,
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ROWS}

REFUSED = "refused"
"""What the log calls a number that was used up by a request we did not accept; it never runs."""


def operation_of(record: OperationRecord, request: object = None) -> Operation:
    return Operation(record, KINDS[record.kind], request)


def changed_model(record: OperationRecord) -> bool:
    """Whether an operation that has ended changed its model, so that it must be replayed."""
    return record.took_effect and KINDS[record.kind].changes_model
