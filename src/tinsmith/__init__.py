"""Tinsmith: an open training service for language models.

This module is the public surface: the names and nothing else. What is behind a name is loaded when
it is first used, so that a program waits only for what it needs.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinsmith import auth, types
    from tinsmith.client import regularizers
    from tinsmith.client.admin import AdminClient
    from tinsmith.client.calls.custom_loss import LossHandle, PerDatumLossFn
    from tinsmith.client.connection.tags import request_tags
    from tinsmith.client.futures import APIFuture, AwaitableConcurrentFuture, as_completed
    from tinsmith.client.options import RequestOptions, Timeout
    from tinsmith.client.recovery import Recovery, RecoveryPolicy
    from tinsmith.client.rest import RestClient
    from tinsmith.client.results.retries import RetryConfig
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient
    from tinsmith.client.warn import ExperimentalWarning
    from tinsmith.errors import (
        APIConnectionError,
        APIError,
        APIResponseValidationError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BillingError,
        ClosedError,
        ConflictError,
        InternalServerError,
        NotFoundError,
        PermissionDeniedError,
        RateLimitError,
        RequestFailedError,
        TinkerError,
        UnprocessableEntityError,
    )
    from tinsmith.transport.config import ClientConfig
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

__title__ = "tinsmith"
__version__ = "0.1.0"

_MODULES = {
    "auth": "tinsmith.auth",
    "regularizers": "tinsmith.client.regularizers",
    "types": "tinsmith.types",
}
_LOADED_ON_USE = {
    "APIConnectionError": "tinsmith.errors",
    "APIError": "tinsmith.errors",
    "APIFuture": "tinsmith.client.futures",
    "APIResponseValidationError": "tinsmith.errors",
    "APIStatusError": "tinsmith.errors",
    "APITimeoutError": "tinsmith.errors",
    "AdamOptimizerConfig": "tinsmith.types",
    "AdamParams": "tinsmith.types",
    "AdminClient": "tinsmith.client.admin",
    "AuthenticationError": "tinsmith.errors",
    "AwaitableConcurrentFuture": "tinsmith.client.futures",
    "BadRequestError": "tinsmith.errors",
    "BillingError": "tinsmith.errors",
    "Checkpoint": "tinsmith.types",
    "CheckpointType": "tinsmith.types",
    "ClientConfig": "tinsmith.transport.config",
    "ClosedError": "tinsmith.errors",
    "ConflictError": "tinsmith.errors",
    "Datum": "tinsmith.types",
    "DimuonOptimizerConfig": "tinsmith.types",
    "DimuonParams": "tinsmith.types",
    "DmelChunk": "tinsmith.types",
    "EncodedTextChunk": "tinsmith.types",
    "ExperimentalWarning": "tinsmith.client.warn",
    "ForwardBackwardOutput": "tinsmith.types",
    "InternalServerError": "tinsmith.errors",
    "LoraConfig": "tinsmith.types",
    "LossHandle": "tinsmith.client.calls.custom_loss",
    "ModelID": "tinsmith.types",
    "ModelInput": "tinsmith.types",
    "ModelInputChunk": "tinsmith.types",
    "NotFoundError": "tinsmith.errors",
    "OptimParams": "tinsmith.types",
    "OptimStepRequest": "tinsmith.types",
    "OptimStepResponse": "tinsmith.types",
    "ParsedCheckpointTinkerPath": "tinsmith.types",
    "PerDatumLossFn": "tinsmith.client.calls.custom_loss",
    "PermissionDeniedError": "tinsmith.errors",
    "PromptProvenanceSpan": "tinsmith.types",
    "RateLimitError": "tinsmith.errors",
    "Recovery": "tinsmith.client.recovery",
    "RecoveryPolicy": "tinsmith.client.recovery",
    "RequestFailedError": "tinsmith.errors",
    "RequestOptions": "tinsmith.client.options",
    "RestClient": "tinsmith.client.rest",
    "RetryConfig": "tinsmith.client.results.retries",
    "SampleRequest": "tinsmith.types",
    "SampleResponse": "tinsmith.types",
    "SampledProvenanceSpan": "tinsmith.types",
    "SampledSequence": "tinsmith.types",
    "SamplingClient": "tinsmith.client.sampling",
    "SamplingParams": "tinsmith.types",
    "ServiceClient": "tinsmith.client.service",
    "StopReason": "tinsmith.types",
    "TensorData": "tinsmith.types",
    "TensorDtype": "tinsmith.types",
    "Timeout": "tinsmith.client.options",
    "TinkerError": "tinsmith.errors",
    "TrainingClient": "tinsmith.client.training",
    "TrainingRun": "tinsmith.types",
    "UnprocessableEntityError": "tinsmith.errors",
    "as_completed": "tinsmith.client.futures",
    "request_tags": "tinsmith.client.connection.tags",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
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
    "AwaitableConcurrentFuture",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "ClientConfig",
    "ClosedError",
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
    "Recovery",
    "RecoveryPolicy",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "RetryConfig",
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
    "regularizers",
    "request_tags",
    "types",
]
