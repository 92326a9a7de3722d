"""Tinsmith: an open training service for language models.

This module is the public surface: one table of names and nothing else. What is behind a name is
loaded when it is first used, so that a program waits only for what it needs. Type checkers read
`__init__.pyi`, which `tools/write_names.py` makes from the table.
"""

import importlib

__title__ = "tinsmith"
__version__ = "0.1.0"

MODULES = {
    "auth": "tinsmith.auth",
    "regularizers": "tinsmith.client.regularizers",
    "types": "tinsmith.types",
}
"""Modules that are public under a name of their own."""

NAMES = {
    "tinsmith.client.admin": ("AdminClient",),
    "tinsmith.client.calls.custom_loss": (
        "LossHandle",
        "PerDatumLossFn",
    ),
    "tinsmith.client.uplink.tags": ("request_tags",),
    "tinsmith.client.futures": (
        "APIFuture",
        "AwaitableConcurrentFuture",
        "as_completed",
    ),
    "tinsmith.client.options": (
        "RequestOptions",
        "Timeout",
    ),
    "tinsmith.client.recovery": (
        "Recovery",
        "RecoveryPolicy",
    ),
    "tinsmith.client.rest": ("RestClient",),
    "tinsmith.client.results.retries": ("RetryConfig",),
    "tinsmith.client.run_log": (
        "RunLogger",
        "log",
    ),
    "tinsmith.client.sampling": ("SamplingClient",),
    "tinsmith.client.service": ("ServiceClient",),
    "tinsmith.client.training": ("TrainingClient",),
    "tinsmith.client.warn": ("ExperimentalWarning",),
    "tinsmith.errors": (
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "BillingError",
        "ClosedError",
        "ConflictError",
        "InternalServerError",
        "NotFoundError",
        "PermissionDeniedError",
        "RateLimitError",
        "RequestFailedError",
        "TinkerError",
        "UnprocessableEntityError",
    ),
    "tinsmith.transport.config": ("ClientConfig",),
    "tinsmith.types": (
        "AdamOptimizerConfig",
        "AdamParams",
        "Checkpoint",
        "CheckpointType",
        "Datum",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "DmelChunk",
        "EncodedTextChunk",
        "ForwardBackwardOutput",
        "LoraConfig",
        "ModelID",
        "ModelInput",
        "ModelInputChunk",
        "OptimParams",
        "OptimStepRequest",
        "OptimStepResponse",
        "ParsedCheckpointTinkerPath",
        "PromptProvenanceSpan",
        "SampleRequest",
        "SampleResponse",
        "SampledProvenanceSpan",
        "SampledSequence",
        "SamplingParams",
        "StopReason",
        "TensorData",
        "TensorDtype",
        "TrainingRun",
    ),
}
"""Public names, by the module that defines them."""

_MODULE_OF = {name: module for module, names in NAMES.items() for name in names}

__all__ = sorted(["__title__", "__version__", *MODULES, *_MODULE_OF])


def __getattr__(name: str) -> object:
    if name in MODULES:
        return importlib.import_module(MODULES[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tinsmith' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
