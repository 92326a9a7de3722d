"""Tinsmith: an open training service for language models.

This module is the public surface: the names and nothing else. The clients are loaded when first
used, so that a program that only builds data does not wait for them.
"""

import importlib
from typing import TYPE_CHECKING

from tinsmith import types
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestFailedError,
    TinkerError,
    UnprocessableEntityError,
)
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    Checkpoint,
    CheckpointType,
    Datum,
    DimuonOptimizerConfig,
    DimuonParams,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    LoraConfig,
    ModelID,
    ModelInput,
    ModelInputChunk,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    StopReason,
    TensorData,
    TensorDtype,
    TrainingRun,
)

if TYPE_CHECKING:
    from tinsmith import auth
    from tinsmith.client.admin import AdminClient
    from tinsmith.client.custom_loss import LossHandle, PerDatumLossFn
    from tinsmith.client.futures import APIFuture, as_completed
    from tinsmith.client.options import RequestOptions, Timeout
    from tinsmith.client.rest import RestClient
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient
    from tinsmith.client.warn import ExperimentalWarning

__title__ = "tinsmith"
__version__ = "0.1.0"

_LOADED_ON_USE = {
    "APIFuture": "tinsmith.client.futures",
    "AdminClient": "tinsmith.client.admin",
    "ExperimentalWarning": "tinsmith.client.warn",
    "LossHandle": "tinsmith.client.custom_loss",
    "PerDatumLossFn": "tinsmith.client.custom_loss",
    "RequestOptions": "tinsmith.client.options",
    "RestClient": "tinsmith.client.rest",
    "SamplingClient": "tinsmith.client.sampling",
    "ServiceClient": "tinsmith.client.service",
    "Timeout": "tinsmith.client.options",
    "TrainingClient": "tinsmith.client.training",
    "as_completed": "tinsmith.client.futures",
}


def __getattr__(name: str) -> object:
    if name == "auth":
        return importlib.import_module("tinsmith.auth")
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module 'tinsmith' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "InternalServerError",
    "LoraConfig",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "__title__",
    "__version__",
    "as_completed",
    "auth",
    "types",
]
