"""Making a model at the service: a fresh adapter, or one from a checkpoint."""

from __future__ import annotations

import logging

from tinsmith.client.calls.operation import operate
from tinsmith.client.results.queue_state import QueueStateLogger
from tinsmith.client.training import TrainingClient, load_weights
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.errors import TinkerError
from tinsmith.types import (
    AdamOptimizerConfig,
    CreateModelRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimizerConfig,
    WeightsInfoRequest,
    WeightsInfoResponse,
    protocol,
)
from tinsmith.wire import endpoints

logger = logging.getLogger(__name__)


async def create(
    uplink: Uplink,
    model_seq_id: int,
    base_model: str,
    lora: LoraConfig,
    user_metadata: dict[str, str] | None,
    optimizer: OptimizerConfig | None,
) -> TrainingClient:
    """A new adapter on a base model."""
    created = await operate(
        uplink,
        endpoints.CREATE_MODEL,
        CreateModelRequest(
            session_id=uplink.get_session_id(),
            model_seq_id=model_seq_id,
            base_model=base_model,
            user_metadata=user_metadata,
            lora_config=lora,
            optimizer_config=optimizer or AdamOptimizerConfig(),
        ),
        observer=_observer(base_model),
    )
    logger.info("Model %s is ready to be trained.", created.model_id)
    return TrainingClient(uplink, model_seq_id=model_seq_id, model_id=created.model_id)


async def resume(
    uplink: Uplink,
    path: str,
    base_model: str | None,
    user_metadata: dict[str, str] | None,
    token: str | None,
    optimizer: OptimizerConfig | None,
    with_optimizer: bool,
) -> TrainingClient:
    """A new run from a checkpoint, in the way that the service supports."""
    if uplink.get_client_config().create_model_via_load_weights:
        return await _load_as_new(
            uplink, path, base_model, user_metadata, token, optimizer, with_optimizer
        )
    info = await _weights_info(uplink, path, token)
    if not info.is_lora or info.lora_rank is None:
        raise TinkerError(f"{path} is not a LoRA checkpoint; only those can be trained")
    lora = LoraConfig(
        rank=info.lora_rank,
        train_unembed=info.train_unembed is not False,
        train_mlp=info.train_mlp is not False,
        train_attn=info.train_attn is not False,
    )
    training = await create(
        uplink,
        uplink.next_model_seq_id(),
        base_model or info.base_model,
        lora,
        user_metadata,
        info.optimizer_config if with_optimizer else optimizer,
    )
    await load_weights(training, path, with_optimizer, token)
    return training


async def _load_as_new(
    uplink: Uplink,
    path: str,
    base_model: str | None,
    user_metadata: dict[str, str] | None,
    token: str | None,
    optimizer: OptimizerConfig | None,
    with_optimizer: bool,
) -> TrainingClient:
    """Create and load in one request; the id is the one that the service derives, too."""
    model_seq_id = uplink.next_model_seq_id()
    model_id = protocol.model_id(uplink.get_session_id(), model_seq_id)
    await operate(
        uplink,
        endpoints.LOAD_WEIGHTS,
        LoadWeightsRequest(
            session_id=uplink.get_session_id(),
            model_seq_id=model_seq_id,
            base_model=base_model,
            user_metadata=user_metadata,
            path=path,
            optimizer=with_optimizer,
            optimizer_config=optimizer,
            weights_access_token=token,
        ),
        observer=_observer(model_id),
    )
    return TrainingClient(uplink, model_seq_id=model_seq_id, model_id=model_id)


async def _weights_info(uplink: Uplink, path: str, token: str | None) -> WeightsInfoResponse:
    """Asked with the other account's token, if there is one."""
    asker = uplink
    if token is not None:
        asker = Uplink(uplink.config.with_credential(token))
        await asker.ready()
    try:
        return await asker.api.call(
            endpoints.WEIGHTS_INFO,
            WeightsInfoRequest(tinker_path=path),
            sdk_method="get_weights_info_by_tinker_path",
        )
    finally:
        if asker is not uplink:
            await asker.aclose()


def _observer(what: str) -> QueueStateLogger:
    return QueueStateLogger(
        f"Creation of a model for {what}", "limit of concurrent training clients reached"
    )
