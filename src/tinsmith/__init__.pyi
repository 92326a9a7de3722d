# Made by tools/write_names.py from the table in __init__.py, in the order of the table.
# ruff: noqa: I001

from tinsmith import auth
from tinsmith.client import regularizers
from tinsmith import types
from tinsmith.client.admin import (
    AdminClient,
)
from tinsmith.client.calls.custom_loss import (
    LossHandle,
    PerDatumLossFn,
)
from tinsmith.client.uplink.tags import (
    request_tags,
)
from tinsmith.client.futures import (
    APIFuture,
    AwaitableConcurrentFuture,
    as_completed,
)
from tinsmith.client.options import (
    RequestOptions,
    Timeout,
)
from tinsmith.client.recovery import (
    Recovery,
    RecoveryPolicy,
)
from tinsmith.client.rest import (
    RestClient,
)
from tinsmith.client.results.retries import (
    RetryConfig,
)
from tinsmith.client.run_log import (
    RunLogger,
    log,
)
from tinsmith.client.sampling import (
    SamplingClient,
)
from tinsmith.client.service import (
    ServiceClient,
)
from tinsmith.client.training import (
    TrainingClient,
)
from tinsmith.client.warn import (
    ExperimentalWarning,
)
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
from tinsmith.transport.config import (
    ClientConfig,
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
    SampleRequest,
    SampleResponse,
    SampledProvenanceSpan,
    SampledSequence,
    SamplingParams,
    StopReason,
    TensorData,
    TensorDtype,
    TrainingRun,
)

__title__: str
__version__: str
MODULES: dict[str, str]
NAMES: dict[str, tuple[str, ...]]

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
    "RunLogger",
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
    "log",
    "regularizers",
    "request_tags",
    "types",
]
