"""Carrying out one operation on an engine.

The functions that the table of kinds names. A pass or step becomes the engine's item; anything
else is carried out and gives its `Finish`: the end to be recorded, with everything the operation
brought into being. A mistake of the user is a failed end, not an exception; exceptions mean that
the engine, the store or the disk is in trouble and the operation must be taken again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.engine.base import Engine, Failure, Pass, SavedAdapter, SavedKind, Step
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.server.checkpoints import Checkpoints, checkpoint_name, expiry
from tinsmith.server.edge.workers import LARGE_PASS_BYTES, Workers
from tinsmith.server.encryption import ENCRYPTED, encrypt_folder
from tinsmith.server.metadata import MetadataRoom, size_of
from tinsmith.server.operations.codecs import LoadRequest, pass_data
from tinsmith.server.operations.finishes import done, failed
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.recorded_pass import RecordedPass
from tinsmith.server.operations.uploaded_losses import UploadedLosses
from tinsmith.server.store.errors import OverQuotaError, StoreDamagedError
from tinsmith.server.store.records import (
    AuditRecord,
    CheckpointRecord,
    Finish,
    SamplerRecord,
    WeightsRecord,
)
from tinsmith.server.store.store import Store
from tinsmith.server.weights import WeightsFolders, files_value, weights_record
from tinsmith.types import (
    AdamParams,
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinsmith.types.checkpoints import KIND_SEGMENTS
from tinsmith.types.model import Model
from tinsmith.types.weights import LoadWeightsRequest
from tinsmith.wire.limits import Limits

R = TypeVar("R")


class DiskTroubleError(TinkerError):
    """The engine is well but could not write weights to disk, which may be full for now."""


@dataclass(frozen=True, slots=True)
class Executor:
    store: Store
    weights: WeightsFolders
    checkpoints: Checkpoints
    metadata: MetadataRoom
    losses: UploadedLosses
    limits: Limits
    workers: Workers
    disk: Workers

    async def request_of(self, operation: Operation, kind: type[R]) -> R:
        """The operation's request, read from the store if need be."""
        if operation.request is None:
            body = operation.record.payload
            if body is None:
                body = await self.store.log.read_payload(operation.record.request_id)
            await self.decode(operation, body)
        assert isinstance(operation.request, kind)
        return operation.request

    async def decode(self, operation: Operation, body: bytes) -> None:
        """Give the operation its request; a large one is decoded beside the event loop."""
        decode, content_type = operation.kind.codec.decode, operation.record.content_type
        if len(body) < LARGE_PASS_BYTES:
            operation.request = decode(body, content_type, self.limits)
            return
        owner = operation.record.owner
        operation.request = await self.workers.run(owner, decode, body, content_type, self.limits)

    async def pass_of(self, model: LiveModel, operation: Operation) -> Pass | Failure:
        recorded = await self.request_of(operation, RecordedPass)
        data, loss_fn, config, forward_only = pass_data(recorded.request)
        custom_loss = None
        if loss_fn == "custom":
            loss_id = config.pop("loss_id", None)
            custom_loss = await self.losses.get(str(loss_id), model.owner)
            if custom_loss is None:
                return Failure(
                    f"no custom loss called {str(loss_id)[:80]!r}; one that was not used for long "
                    "is deleted: upload it again",
                    "user",
                )
        return Pass(
            adapter_id=model.model_id,
            data=data,
            loss_fn=loss_fn,
            loss_fn_config=config,
            forward_only=forward_only,
            custom_loss=custom_loss,
            scope=model.owner,
            choices=recorded.choices,
        )

    async def step_of(self, model: LiveModel, operation: Operation) -> Step:
        params = (await self.request_of(operation, OptimStepRequest)).optim_params
        assert isinstance(params, AdamParams)
        return Step(adapter_id=model.model_id, params=params)

    async def create_model(self, engine: Engine, model: LiveModel, operation: Operation) -> Finish:
        failure = await engine.create_adapter(model.model_id, model.record.base_model, model.lora)
        if failure is not None:
            return failed(operation, failure)
        return done(operation, CreateModelResponse(model_id=model.model_id))

    async def load_weights(self, engine: Engine, model: LiveModel, operation: Operation) -> Finish:
        request = (await self.request_of(operation, LoadRequest)).request
        try:
            weights_id = await self._choose_weights(operation)
        except ValidationError as error:
            return failed(operation, Failure(str(error), "user"))
        if operation.seq_id == 0:
            failure = await engine.create_adapter(
                model.model_id, model.record.base_model, model.lora
            )
            if failure is not None:
                return failed(operation, failure)
        info = await self._restore(engine, model, weights_id, _restored(request))
        if isinstance(info, Failure):
            return failed(operation, info)
        response = LoadWeightsResponse(
            path=request.path, model_id=model.model_id, type="load_weights"
        )
        return done(operation, response, used_weights_id=weights_id)

    async def replay_load(
        self, engine: Engine, model: LiveModel, operation: Operation
    ) -> Failure | None:
        request = (await self.request_of(operation, LoadRequest)).request
        assert operation.record.weights_id is not None
        info = await self._restore(engine, model, operation.record.weights_id, _restored(request))
        return info if isinstance(info, Failure) else None

    async def _restore(
        self, engine: Engine, model: LiveModel, weights_id: str, kind: SavedKind
    ) -> SavedAdapter | Failure:
        try:
            async with self.weights.reading(weights_id) as folder:
                return await engine.restore(model.model_id, folder, kind)
        except StoreDamagedError as error:
            return Failure(str(error), "server")

    async def _choose_weights(self, operation: Operation) -> str:
        """What a load takes, chosen once: if the server dies before the end is recorded, the path
        may name something else by the time the load runs again."""
        if operation.record.weights_id is not None:
            return operation.record.weights_id
        load = await self.request_of(operation, LoadRequest)
        path = load.request.path
        weights = await self.checkpoints.loadable(
            await self.checkpoints.readable(path, load.reader)
        )
        if load.request.optimizer and weights.kind == "sampler":
            raise ValidationError(f"{path} holds no optimizer state; load it without")
        # From here on they stay, though the checkpoint be deleted: a replay needs them.
        weights_id = weights.weights_id
        if not await self.store.weights.hold(operation.record.request_id, weights_id):
            raise ValidationError(f"{path} has just been deleted")
        operation.record = dataclasses.replace(operation.record, weights_id=weights_id)
        return weights_id

    async def save_weights(self, engine: Engine, model: LiveModel, operation: Operation) -> Finish:
        request = await self.request_of(operation, SaveWeightsRequest)
        return await self._save_named(
            engine,
            model,
            operation,
            request,
            "weights",
            lambda saved: SaveWeightsResponse(path=saved.tinker_path, type="save_weights"),
        )

    async def save_weights_for_sampler(
        self, engine: Engine, model: LiveModel, operation: Operation
    ) -> Finish:
        """Freeze the weights: under a name, or as an unnamed sampler of the session.

        An unnamed sampler's weights are written to disk too before its id is given out. Rebuilding
        them later from the log would need every payload back to a snapshot older than the
        sampler, for as long as anybody samples; a file of the adapter's weights costs less.
        """
        request = await self.request_of(operation, SaveWeightsForSamplerRequest)
        if request.path is None and request.sampling_session_seq_id is not None:
            return await self._save_ephemeral(
                engine, model, operation, request.sampling_session_seq_id
            )
        return await self._save_named(
            engine,
            model,
            operation,
            request,
            "sampler_weights",
            lambda saved: SaveWeightsForSamplerResponseInternal(
                path=saved.tinker_path, type="save_weights_for_sampler"
            ),
        )

    async def save_weights_external(
        self, engine: Engine, model: LiveModel, operation: Operation
    ) -> Finish:
        request = await self.request_of(operation, SaveWeightsExternalRequest)
        return await self._save_named(
            engine,
            model,
            operation,
            request,
            "external_weights",
            lambda saved: SaveWeightsExternalResponseInternal(
                path=saved.tinker_path, size_bytes=saved.size_bytes, type="save_weights_external"
            ),
        )

    async def _save_named(
        self,
        engine: Engine,
        model: LiveModel,
        operation: Operation,
        request: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
        segment: str,
        respond: Callable[[CheckpointRecord], Model],
    ) -> Finish:
        """A checkpoint under the request's name, which must be free or may be overwritten."""
        kind = KIND_SEGMENTS[segment]
        user_metadata = recipients = None
        if isinstance(request, SaveWeightsExternalRequest):
            recipients = request.age_encryption_recipients
        else:
            user_metadata = request.user_metadata
        checkpoint_id = f"{segment}/{checkpoint_name(request.path, operation.seq_id)}"
        existing = await self.store.checkpoints.get(model.model_id, checkpoint_id)
        overwrites = isinstance(request, SaveWeightsRequest) and request.overwrite
        if existing is not None and not overwrites:
            return failed(operation, _exists(existing))
        try:
            async with self.metadata.taken(model.owner, size_of(user_metadata)):
                saved_kind: SavedKind = "training" if kind == "training" else "sampler"
                weights = await self._save(engine, model, saved_kind)
        except OverQuotaError as error:
            return failed(operation, Failure(str(error), "user"))
        if isinstance(weights, Failure):
            return failed(operation, weights)
        if recipients:
            weights = await self._encrypted(model.owner, weights, recipients)
        checkpoint = CheckpointRecord(
            model_id=model.model_id,
            checkpoint_id=checkpoint_id,
            owner=model.owner,
            checkpoint_type=kind,
            weights_id=weights.weights_id,
            size_bytes=weights.size_bytes,
            created_at=weights.created_at,
            user_metadata=user_metadata,
            expires_at=expiry(request.ttl_seconds, weights.created_at),
        )
        audit = AuditRecord(
            owner=checkpoint.owner,
            at=checkpoint.created_at,
            area="checkpoints",
            event="checkpoint_created",
            details={"type": kind, "size_bytes": checkpoint.size_bytes},
            model_id=checkpoint.model_id,
            tinker_path=checkpoint.tinker_path,
        )
        response = respond(checkpoint)
        return done(operation, response, weights=weights, checkpoint=checkpoint, audit=audit)

    async def _encrypted(
        self, owner: str, plain: WeightsRecord, recipients: list[str]
    ) -> WeightsRecord:
        """Encrypted weights in the place of plain ones."""
        try:
            async with (
                self.weights.reading(plain.weights_id) as source,
                self.weights.new() as (weights_id, folder),
            ):
                files = await self.disk.run(owner, encrypt_folder, source, folder, recipients)
        except OSError as error:
            raise DiskTroubleError(f"the export could not be encrypted: {error}") from error
        finally:
            await self.weights.discard(plain.weights_id)
        return dataclasses.replace(
            plain,
            weights_id=weights_id,
            kind=ENCRYPTED,
            size_bytes=sum(record.size for record in files.values()),
            files=files_value(files),
        )

    async def _save_ephemeral(
        self, engine: Engine, model: LiveModel, operation: Operation, sampling_seq_id: int
    ) -> Finish:
        session_id = model.record.session_id
        assert session_id is not None
        sampler_id = f"{session_id}:sample:{sampling_seq_id}"
        if await self.store.samplers.get(sampler_id) is not None:
            return failed(operation, Failure(f"sampler {sampler_id} exists already", "user"))
        weights = await self._save(engine, model, "sampler")
        if isinstance(weights, Failure):
            return failed(operation, weights)
        if (slot := model.slot) is not None and slot.plan.samples:
            await slot.samplers.freeze(
                engine, model.generation, model.model_id, weights.weights_id, model.owner
            )
        sampler = SamplerRecord(
            sampler_id=sampler_id,
            session_id=session_id,
            sampling_session_seq_id=sampling_seq_id,
            owner=model.record.owner,
            base_model=model.record.base_model,
            weights_id=weights.weights_id,
            created_at=time.time(),
            model_id=model.model_id,
        )
        response = SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )
        return done(operation, response, weights=weights, sampler=sampler)

    async def _save(
        self, engine: Engine, model: LiveModel, kind: SavedKind
    ) -> WeightsRecord | Failure:
        async with self.weights.new() as (weights_id, folder):
            info = await engine.save(model.model_id, folder, kind)
        if isinstance(info, Failure):
            if info.category == "server":
                raise DiskTroubleError(info.message)
            return info
        try:
            await self.store.weights.check_quota(model.owner, info.size_bytes)
        except OverQuotaError as error:
            await self.weights.discard(weights_id)
            return Failure(str(error), "user")
        return weights_record(weights_id, model.record, kind, info, time.time())


def _restored(request: LoadWeightsRequest) -> SavedKind:
    return "training" if request.optimizer else "sampler"


def _exists(checkpoint: CheckpointRecord) -> Failure:
    return Failure(
        f"{checkpoint.tinker_path} exists already; choose another name"
        + (", or save with overwrite" if checkpoint.checkpoint_type == "training" else ""),
        "user",
    )
