"""Saving, loading and copying weights."""

from __future__ import annotations

from typing import Any, Literal

from tinsmith.types.checkpoints import ParsedCheckpointTinkerPath
from tinsmith.types.console import checkpoint_console_url, checkpoint_playground_url
from tinsmith.types.model import Request, Response
from tinsmith.types.optimizer import (
    AdamOptimizerConfig,
    OptimizerConfig,
    ReportedOptimizerConfig,
)


class SaveWeightsRequest(Request):
    """Save the full training state under the name `path`."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Response):
    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        return _console_url(self.path)


class LoadWeightsRequest(Request):
    """Load a checkpoint into a model.

    An existing model is named by `model_id` and `seq_id`; `session_id` and `model_seq_id` instead
    create a new one from the checkpoint.
    """

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Response):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class SaveWeightsForSamplerRequest(Request):
    """Freeze the weights for sampling: under the name `path`, or for this session only."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponseInternal(Response):
    """What the service answers: a path, or the sampling session of an unnamed save."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponse(Response):
    """What the user gets."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        return checkpoint_playground_url(self.path)


class SaveWeightsExternalRequest(Request):
    """Export the weights as plain files for use elsewhere."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(Response):
    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponse(Response):
    path: str
    type: Literal["save_weights_external"] | None = None


class WeightsInfoRequest(Request):
    tinker_path: str


class WeightsInfoResponse(Response):
    base_model: str
    optimizer_config: ReportedOptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CopyWeightsRequest(Request):
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Response):
    tinker_path: str


def _console_url(path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    return checkpoint_console_url(parsed.training_run_id, parsed.checkpoint_id)
