"""Carrying out one operation on an engine.

Every function takes an operation whose turn it is and gives back its `Finish`: the end to be
recorded, with everything the operation brought into being. A mistake of the user is a failed
end, not an exception; exceptions mean that the engine, the store or the disk is in trouble and the
operation must be taken again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tinsmith.engine.base import CustomLoss, Engine, Failure, Pass, SnapshotKind, Step
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.server.checkpoints import Checkpoints, checkpoint_name, expiry
from tinsmith.server.futures import Outcome
from tinsmith.server.operations.kinds import LoadRequest, Operation, PassRequest, decode, pass_data
from tinsmith.server.operations.live_models import LiveModel
from tinsmith.server.sampling.loaded import LoadedSamplers
from tinsmith.server.store.records import (
    AuditRecord,
    CheckpointRecord,
    Finish,
    SamplerRecord,
    WeightsRecord,
)
from tinsmith.server.store.store import Store
from tinsmith.server.weights import WeightsFolders, weights_record
from tinsmith.types import (
    AdamParams,
    CreateModelResponse,
    CustomLossGraph,
    CustomLossInput,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinsmith.types.model import Model
from tinsmith.wire import json, proto
from tinsmith.wire.limits import Limits


class DiskTroubleError(TinkerError):
    """The engine is well but could not write weights to disk, which may be full for now."""


@dataclass(frozen=True, slots=True)
class Executor:
    store: Store
    weights: WeightsFolders
    checkpoints: Checkpoints
    loaded_samplers: LoadedSamplers
    limits: Limits

    async def request_of(self, operation: Operation) -> object:
        """The operation's request, read from the store if need be."""
        if operation.request is None:
            body = await self.store.log.read_payload(operation.record.request_id)
            record = operation.record
            operation.request = decode(record.kind, body, record.content_type, self.limits)
        return operation.request

    async def pass_of(self, model: LiveModel, operation: Operation) -> Pass | Failure:
        request = await self.request_of(operation)
        assert isinstance(request, PassRequest)
        data, loss_fn, config, forward_only = pass_data(request)
        custom_loss = None
        if loss_fn == "custom":
            loss_id = config.pop("loss_id", None)
            found = await self.store.losses.get(str(loss_id))
            if found is None or found.owner != model.record.owner:
                return Failure(f"no custom loss called {str(loss_id)[:80]!r}", "user")
            custom_loss = CustomLoss(
                inputs=tuple(CustomLossInput(**i) for i in found.definition["inputs"]),
                graph=CustomLossGraph(**found.definition["graph"]),
            )
        return Pass(
            adapter_id=model.model_id,
            data=data,
            loss_fn=loss_fn,
            loss_fn_config=config,
            forward_only=forward_only,
            custom_loss=custom_loss,
        )

    async def step_of(self, model: LiveModel, operation: Operation) -> Step:
        request = await self.request_of(operation)
        params = request.optim_params  # type: ignore[attr-defined]  # an OptimStepRequest
        assert isinstance(params, AdamParams)
        return Step(adapter_id=model.model_id, params=params)

    async def run(self, engine: Engine, model: LiveModel, operation: Operation) -> Finish:
        """Carry out anything but a pass or a step."""
        request = await self.request_of(operation)
        if isinstance(request, LoadRequest):
            return await self._load(engine, model, operation, request)
        if isinstance(request, SaveWeightsRequest):
            return await self._save(engine, model, operation, request)
        if isinstance(request, SaveWeightsForSamplerRequest):
            return await self._save_for_sampler(engine, model, operation, request)
        if isinstance(request, SaveWeightsExternalRequest):
            return await self._save_external(engine, model, operation, request)
        assert operation.record.kind == "create_model"
        failure = await engine.create_adapter(model.model_id, model.record.base_model, model.lora)
        if failure is not None:
            return failed(operation, failure)
        return done(operation, CreateModelResponse(model_id=model.model_id))

    async def _load(
        self, engine: Engine, model: LiveModel, operation: Operation, load: LoadRequest
    ) -> Finish:
        path = load.request.path
        kind: SnapshotKind = "training" if load.request.optimizer else "sampler"
        try:
            found = await self.checkpoints.readable(path, load.reader)
            weights = await self.checkpoints.weights_of(found)
            if kind == "training" and weights.kind == "sampler":
                raise ValidationError(f"{path} holds no optimizer state; load it without")
            # From here on they stay, though the checkpoint be deleted: a replay needs them.
            request_id, weights_id = operation.record.request_id, weights.weights_id
            if not await self.store.weights.hold(request_id, weights_id):
                raise ValidationError(f"{path} has just been deleted")
        except ValidationError as error:
            return failed(operation, Failure(str(error), "user"))
        if operation.seq_id == 0:
            failure = await engine.create_adapter(
                model.model_id, model.record.base_model, model.lora
            )
            if failure is not None:
                return failed(operation, failure)
        info = await engine.restore(model.model_id, self.weights.folder(weights.weights_id), kind)
        if isinstance(info, Failure):
            return failed(operation, info)
        response = LoadWeightsResponse(path=path, model_id=model.model_id, type="load_weights")
        return done(operation, response, used_weights_id=weights.weights_id)

    async def _save(
        self, engine: Engine, model: LiveModel, operation: Operation, request: SaveWeightsRequest
    ) -> Finish:
        checkpoint_id = f"weights/{checkpoint_name(request.path, operation.seq_id)}"
        existing = await self.store.checkpoints.get(model.model_id, checkpoint_id)
        if existing is not None and not request.overwrite:
            return failed(operation, _exists(existing))
        weights = await self._snapshot(engine, model, "training")
        if isinstance(weights, Failure):
            return failed(operation, weights)
        checkpoint = _checkpoint(
            model, checkpoint_id, "training", weights, request.ttl_seconds, request.user_metadata
        )
        response = SaveWeightsResponse(path=checkpoint.tinker_path, type="save_weights")
        return _saved(operation, response, weights, checkpoint)

    async def _save_for_sampler(
        self,
        engine: Engine,
        model: LiveModel,
        operation: Operation,
        request: SaveWeightsForSamplerRequest,
    ) -> Finish:
        """Freeze the weights: under a name, or as an unnamed sampler of the session.

        An unnamed sampler's weights are written to disk too before its id is given out. Rebuilding
        them later from the log would need every payload back to a snapshot older than the
        sampler, for as long as anybody samples; a file of the adapter's weights costs less.
        """
        if request.path is None and request.sampling_session_seq_id is not None:
            return await self._save_ephemeral(
                engine, model, operation, request.sampling_session_seq_id
            )
        checkpoint_id = f"sampler_weights/{checkpoint_name(request.path, operation.seq_id)}"
        existing = await self.store.checkpoints.get(model.model_id, checkpoint_id)
        if existing is not None:
            return failed(operation, _exists(existing))
        weights = await self._snapshot(engine, model, "sampler")
        if isinstance(weights, Failure):
            return failed(operation, weights)
        checkpoint = _checkpoint(
            model, checkpoint_id, "sampler", weights, request.ttl_seconds, request.user_metadata
        )
        response = SaveWeightsForSamplerResponseInternal(
            path=checkpoint.tinker_path, type="save_weights_for_sampler"
        )
        return _saved(operation, response, weights, checkpoint)

    async def _save_ephemeral(
        self, engine: Engine, model: LiveModel, operation: Operation, sampling_seq_id: int
    ) -> Finish:
        session_id = model.record.session_id
        assert session_id is not None
        sampler_id = f"{session_id}:sample:{sampling_seq_id}"
        if await self.store.samplers.get(sampler_id) is not None:
            return failed(operation, Failure(f"sampler {sampler_id} exists already", "user"))
        weights = await self._snapshot(engine, model, "sampler")
        if isinstance(weights, Failure):
            return failed(operation, weights)
        await self.loaded_samplers.freeze(
            engine, model.generation, model.model_id, weights.weights_id, model.record.owner
        )
        sampler = SamplerRecord(
            sampler_id=sampler_id,
            session_id=session_id,
            sampling_session_seq_id=sampling_seq_id,
            owner=model.record.owner,
            base_model=model.record.base_model,
            weights_id=weights.weights_id,
            created_at=time.time(),
        )
        response = SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )
        return done(operation, response, weights=weights, sampler=sampler)

    async def _save_external(
        self,
        engine: Engine,
        model: LiveModel,
        operation: Operation,
        request: SaveWeightsExternalRequest,
    ) -> Finish:
        checkpoint_id = f"external_weights/{checkpoint_name(request.path, operation.seq_id)}"
        existing = await self.store.checkpoints.get(model.model_id, checkpoint_id)
        if existing is not None:
            return failed(operation, _exists(existing))
        weights = await self._snapshot(engine, model, "sampler")
        if isinstance(weights, Failure):
            return failed(operation, weights)
        checkpoint = _checkpoint(model, checkpoint_id, "external", weights, request.ttl_seconds)
        response = SaveWeightsExternalResponseInternal(
            path=checkpoint.tinker_path,
            size_bytes=weights.size_bytes,
            type="save_weights_external",
        )
        return _saved(operation, response, weights, checkpoint)

    async def _snapshot(
        self, engine: Engine, model: LiveModel, kind: SnapshotKind
    ) -> WeightsRecord | Failure:
        weights_id, folder = self.weights.new()
        info = await engine.snapshot(model.model_id, folder, kind)
        if isinstance(info, Failure):
            if info.category == "server":
                raise DiskTroubleError(info.message)
            return info
        return weights_record(weights_id, model.record, kind, info, time.time())


def done(
    operation: Operation,
    response: Model,
    *,
    weights: WeightsRecord | None = None,
    checkpoint: CheckpointRecord | None = None,
    sampler: SamplerRecord | None = None,
    audit: AuditRecord | None = None,
    used_weights_id: str | None = None,
) -> Finish:
    return Finish(
        request_id=operation.record.request_id,
        status="done",
        finished_at=time.time(),
        result_type="json",
        result=json.encode(response),
        weights=weights,
        checkpoint=checkpoint,
        sampler=sampler,
        audit=audit,
        used_weights_id=used_weights_id,
    )


def pass_done(operation: Operation, output: ForwardBackwardOutput) -> Finish:
    return Finish(
        request_id=operation.record.request_id,
        status="done",
        finished_at=time.time(),
        result_type="output",
        result=proto.encode_output(output),
    )


def step_done(operation: Operation, metrics: dict[str, float]) -> Finish:
    return done(operation, OptimStepResponse(metrics=metrics))


def failed(operation: Operation, failure: Failure) -> Finish:
    return Finish(
        request_id=operation.record.request_id,
        status="failed",
        finished_at=time.time(),
        error=failure.message,
        category=failure.category,
    )


def outcome_of(finish: Finish) -> Outcome:
    if finish.status == "failed":
        return Outcome(error=finish.error, category=finish.category or "unknown")
    result_type = "output" if finish.result_type == "output" else "json"
    return Outcome(result_type=result_type, body=finish.result or b"")  # type: ignore[arg-type]  # one of two literals


def _saved(
    operation: Operation, response: Model, weights: WeightsRecord, checkpoint: CheckpointRecord
) -> Finish:
    audit = AuditRecord(
        owner=checkpoint.owner,
        at=checkpoint.created_at,
        area="checkpoints",
        event="checkpoint_created",
        details={"type": checkpoint.checkpoint_type, "size_bytes": checkpoint.size_bytes},
        model_id=checkpoint.model_id,
        tinker_path=checkpoint.tinker_path,
    )
    return done(operation, response, weights=weights, checkpoint=checkpoint, audit=audit)


def _checkpoint(
    model: LiveModel,
    checkpoint_id: str,
    checkpoint_type: str,
    weights: WeightsRecord,
    ttl_seconds: int | None,
    user_metadata: dict[str, str] | None = None,
) -> CheckpointRecord:
    return CheckpointRecord(
        model_id=model.model_id,
        checkpoint_id=checkpoint_id,
        owner=model.record.owner,
        checkpoint_type=checkpoint_type,
        weights_id=weights.weights_id,
        size_bytes=weights.size_bytes,
        created_at=weights.created_at,
        user_metadata=user_metadata,
        expires_at=expiry(ttl_seconds, weights.created_at),
    )


def _exists(checkpoint: CheckpointRecord) -> Failure:
    return Failure(
        f"{checkpoint.tinker_path} exists already; choose another name"
        + (", or save with overwrite" if checkpoint.checkpoint_type == "training" else ""),
        "user",
    )
