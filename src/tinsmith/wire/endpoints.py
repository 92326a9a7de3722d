"""The endpoints: one row each. Client, routes, OpenAPI and the reference page are made from them.

A new endpoint is a row here and a handler in `server/routes`; the client calls it with
`api.call(endpoints.THE_ROW, message)`, and both sides are checked against the row's types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, Literal, Self, TypeVar

from tinsmith import types as t
from tinsmith.types import imports as i
from tinsmith.types import observing as o
from tinsmith.types.protocol import EVENT_STREAM, JSON, PROTOBUF
from tinsmith.types.runs import TrainingRunDetails
from tinsmith.types.sampling import SamplerInfo
from tinsmith.types.tokenizers import TokenizerFilesResponse

API = "/api/v1"
OPENAI_API = "/oai/api/v1"
GENERATE_API = "/oai/api/inference/v1"
"""Where vLLM's clients look: beside the base URL that they are given, not below it."""
ANTHROPIC_API = "/anthropic/v1"
OUTSIDE = ""
"""The endpoints for those who run the server are not below a prefix."""

Req = TypeVar("Req")
Resp = TypeVar("Resp")
Result = TypeVar("Result")
Method = Literal["GET", "POST", "PUT", "DELETE"]

NOTHING = type(None)
"""No body: of a request, or of an answer (which then is 204)."""


class ConnectionClass(Enum):
    """What a request is for. Each class has its own connections, so that none starves another."""

    SESSION = "session"
    TRAIN = "train"
    SAMPLE = "sample"
    RETRIEVE = "retrieve"
    RETRIEVE_FUTURES = "retrieve_futures"
    TELEMETRY = "telemetry"
    REDIRECT = "redirect"
    AUTH = "auth"


class Repeat(Enum):
    """What the same request does when it comes again, as it does after a lost answer."""

    SAME = "changes nothing more"
    NUMBERED = "finds the first by its sequence id"
    KEYED = "finds the first by its X-Idempotency-Key"
    ANEW = "is carried out again"


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Req, Resp]):
    method: Method
    path: str
    """Below `prefix`. `{name}` is one segment, `{name:path}` may be several."""
    request: type[Req]
    response: type[Resp]
    """What a successful answer holds; `object` where that is not one message of ours."""
    summary: str
    connection: ConnectionClass = ConnectionClass.TRAIN
    repeat: Repeat = Repeat.SAME
    query: tuple[str, ...] = ()
    takes: tuple[str, ...] = (JSON,)
    """Media types of the request; our client sends the first."""
    gives: tuple[str, ...] = (JSON,)
    access: Literal["key", "anyone", "signed"] = "key"
    """Who may ask: a key's owner, anyone, or whoever has a signed URL."""
    is_counted: bool = True
    """Refused while too many requests are under way. Questions for results are not: they mostly
    wait, and old clients do not survive a refusal."""
    has_data: bool = False
    """The request holds tokens, tensors or texts. Others end at `Limits.max_control_bytes`."""
    is_long: bool = False
    """The answer can be long, so it is encoded in a thread."""
    is_for_browsers: bool = False
    """Whether a signed-in browser may do this, too; it may always GET."""
    prefix: str = API

    @property
    def full_path(self) -> str:
        return self.prefix + self.path

    def at(self, **ids: str) -> Self:
        """This endpoint with the parameters of its path filled in, as they are."""
        names = parameters(self.path)
        if set(names) != ids.keys():
            raise TypeError(f"{self.path} needs {', '.join(names)}; got {', '.join(ids)}")
        return replace(self, path=_PARAMETER.sub(lambda found: ids[found[1]], self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised(Endpoint[Req, t.UntypedAPIFuture], Generic[Req, Result]):
    """Answered at once with a request id; the result is fetched with `RETRIEVE_FUTURE`."""

    repeat: Repeat = Repeat.NUMBERED
    result: type[Result]


_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


def parameters(path: str) -> list[str]:
    return _PARAMETER.findall(path)


def plain_path(path: str) -> str:
    """`/files/{name}` of `/files/{name:path}`."""
    return _PARAMETER.sub(r"{\1}", path)


C = ConnectionClass
_PROMISE = t.UntypedAPIFuture
_PAGE = ("limit", "offset")
_RUN = "/training_runs/{run_id}"
_CHECKPOINT = _RUN + "/checkpoints/{kind}/{name}"
_EITHER = (PROTOBUF, JSON)
BYTES = "application/octet-stream"

# fmt: off
# Method, path, request, response; a sentence for the reference; what is out of the ordinary.

# --- the service itself ---------------------------------------------------------------------------

CLIENT_CONFIG = Endpoint("POST", "/client/config", t.ClientConfigRequest, t.ClientConfigResponse,
    "How clients should talk to this server.", C.SESSION)
CLIENT_DYNAMIC_CONFIG = Endpoint("POST", "/client/dynamic_config",
    t.ClientConfigRequest, t.ClientDynamicConfigResponse,
    "Settings that clients ask for again and again.", C.SESSION)
AUTH_TOKEN = Endpoint("POST", "/auth/token", NOTHING, t.AuthTokenResponse,
    "A short-lived token for a key.", C.AUTH, Repeat.ANEW)
GET_SERVER_CAPABILITIES = Endpoint("GET", "/get_server_capabilities",
    NOTHING, t.GetServerCapabilitiesResponse,
    "The models that can be trained and sampled.")
LIST_TOKENIZER_FILES = Endpoint("GET", "/tokenizers", NOTHING, TokenizerFilesResponse,
    "The files of a base model's tokenizer.", query=("base_model",))
GET_TOKENIZER_FILE = Endpoint("GET", "/tokenizers/{sha256}", NOTHING, object,
    "One file of a tokenizer, by its hash.", gives=(BYTES,))
TELEMETRY = Endpoint("POST", "/telemetry", t.TelemetrySendRequest, t.TelemetryResponse,
    "Events that clients report; they are counted and dropped.", C.TELEMETRY, Repeat.ANEW,
    has_data=True)

# --- sessions -------------------------------------------------------------------------------------

CREATE_SESSION = Endpoint("POST", "/create_session",
    t.CreateSessionRequest, t.CreateSessionResponse,
    "Begin a session.", C.SESSION, Repeat.ANEW)
SESSION_HEARTBEAT = Endpoint("POST", "/session_heartbeat",
    t.SessionHeartbeatRequest, t.SessionHeartbeatResponse,
    "Say that a session is alive; 410 when it has ended.", C.SESSION)
SEARCH_SESSIONS = Endpoint("POST", "/sessions/search",
    t.SessionSearchRequest, t.SessionSearchResponse,
    "Sessions that fit, newest first.", is_long=True, is_for_browsers=True)
LIST_SESSIONS = Endpoint("GET", "/sessions", NOTHING, t.ListSessionsResponse,
    "The ids of the caller's sessions, newest first.", query=(*_PAGE, "access_scope"), is_long=True)
FINISH_SESSION = Endpoint("POST", "/sessions/{session_id}/finish", t.FinishSessionRequest, NOTHING,
    "End a session.")
ASSIGN_PROJECT = Endpoint("PUT", "/sessions/{session_id}/project",
    t.AssignSessionProjectRequest, NOTHING,
    "Move a session and its runs to a project.")
TRACE_EXPORT = Endpoint("GET", "/sessions/{session_id}/trace_export",
    NOTHING, t.TraceExportResponse,
    "Where a session's operations can be fetched as a trace for a browser's viewer.")
GET_SESSION = Endpoint("GET", "/sessions/{session_id}", NOTHING, t.GetSessionResponse,
    "A session's runs and samplers.", query=("access_scope",), is_long=True)
GET_TRACE = Endpoint("GET", "/traces/{session_id}.json", NOTHING, object,
    "A session's trace in Chrome's event format.", C.REDIRECT, access="signed")

# --- models and training --------------------------------------------------------------------------

CREATE_MODEL = Promised("POST", "/create_model", t.CreateModelRequest, _PROMISE,
    "Create a model to train.", result=t.CreateModelResponse)
GET_INFO = Endpoint("POST", "/get_info", t.GetInfoRequest, t.GetInfoResponse,
    "Base model and rank of a model.")
FORWARD_BACKWARD = Promised("POST", "/forward_backward", t.ForwardBackwardRequest, _PROMISE,
    "Compute a loss and add its gradients to the model's. Protobuf may ask for the loss alone.",
    result=t.ForwardBackwardOutput, takes=_EITHER, has_data=True)
FORWARD = Promised("POST", "/forward", t.ForwardRequest, _PROMISE,
    "Compute a loss and leave the gradients alone.", result=t.ForwardBackwardOutput, takes=_EITHER,
    has_data=True)
OPTIM_STEP = Promised("POST", "/optim_step", t.OptimStepRequest, _PROMISE,
    "Update the weights with the gradients gathered so far.", result=t.OptimStepResponse)
UNLOAD_MODEL = Promised("POST", "/unload_model", t.UnloadModelRequest, _PROMISE,
    "Say that a model is not needed for now; it goes to disk.", repeat=Repeat.SAME,
    result=t.UnloadModelResponse)
CREATE_CUSTOM_LOSS = Promised("POST", "/create_custom_loss", t.CreateCustomLossRequest, _PROMISE,
    "Upload a loss as a graph of operations.", result=t.CreateCustomLossResponse, has_data=True)

# --- weights --------------------------------------------------------------------------------------

SAVE_WEIGHTS = Promised("POST", "/save_weights", t.SaveWeightsRequest, _PROMISE,
    "Save weights and optimizer, to train on from.", result=t.SaveWeightsResponse)
SAVE_WEIGHTS_FOR_SAMPLER = Promised("POST", "/save_weights_for_sampler",
    t.SaveWeightsForSamplerRequest, _PROMISE,
    "Save weights to sample from, or make a sampler of them without a checkpoint.",
    result=t.SaveWeightsForSamplerResponseInternal)
SAVE_WEIGHTS_EXTERNAL = Promised("POST", "/save_weights_external",
    t.SaveWeightsExternalRequest, _PROMISE,
    "Save weights as files to fetch.", result=t.SaveWeightsExternalResponseInternal)
LOAD_WEIGHTS = Promised("POST", "/load_weights", t.LoadWeightsRequest, _PROMISE,
    "Load a checkpoint into a model, or create a model from one.", result=t.LoadWeightsResponse)
WEIGHTS_INFO = Endpoint("POST", "/weights_info", t.WeightsInfoRequest, t.WeightsInfoResponse,
    "Base model and rank of a checkpoint.")
COPY_WEIGHTS = Endpoint("POST", "/copy_weights", t.CopyWeightsRequest, t.CopyWeightsResponse,
    "Copy a checkpoint to the caller's project.", repeat=Repeat.KEYED)
UPLOAD_PIECE = Endpoint("PUT", "/uploads/{upload_id}/{name}/{number}", object, NOTHING,
    "A piece of an adapter's file; the client chooses the upload's id.", takes=(BYTES,),
    has_data=True)
IMPORT_WEIGHTS = Endpoint("POST", "/import_weights",
    i.ImportWeightsRequest, i.ImportWeightsResponse,
    "Make a checkpoint of an uploaded PEFT adapter.")

# --- runs and checkpoints -------------------------------------------------------------------------

LIST_TRAINING_RUNS = Endpoint("GET", "/training_runs", NOTHING, t.TrainingRunsResponse,
    "The caller's training runs, newest first.", query=(*_PAGE, "access_scope", "project_id"),
    is_long=True)
GET_TRAINING_RUN: Endpoint[None, t.TrainingRun] = Endpoint("GET", _RUN, NOTHING, TrainingRunDetails,
    "A training run.", query=("access_scope",))
LIST_CHECKPOINTS = Endpoint("GET", "/checkpoints", NOTHING, t.CheckpointsListResponse,
    "The caller's checkpoints, newest first.", query=_PAGE, is_long=True)
LIST_RUN_CHECKPOINTS = Endpoint("GET", _RUN + "/checkpoints", NOTHING, t.CheckpointsListResponse,
    "A run's checkpoints, newest first.", query=_PAGE, is_long=True)
LIST_MODEL_CHECKPOINTS = Endpoint("GET", "/models/{run_id}/checkpoints",
    NOTHING, t.CheckpointsListResponse,
    "A run's checkpoints, at the path that old clients use.", query=_PAGE, is_long=True)
PUBLISH = Endpoint("POST", _CHECKPOINT + "/publish", NOTHING, NOTHING,
    "Let everybody read a checkpoint.", is_for_browsers=True)
UNPUBLISH = Endpoint("DELETE", _CHECKPOINT + "/publish", NOTHING, NOTHING,
    "Let only the owner read a checkpoint.", is_for_browsers=True)
SET_TTL = Endpoint("PUT", _CHECKPOINT + "/ttl", t.SetCheckpointTtlRequest, NOTHING,
    "When a checkpoint expires, from now.", is_for_browsers=True)
EXTERNAL_WEIGHTS_URLS = Endpoint("GET", _CHECKPOINT + "/external_weights_urls",
    NOTHING, t.ExternalWeightsUrlsResponse,
    "Where each file of a checkpoint can be fetched, and until when.")
ARCHIVE = Endpoint("GET", _CHECKPOINT + "/archive", NOTHING, t.CheckpointArchiveUrlResponse,
    "Where a checkpoint can be fetched as a tar file; a redirect for clients that accept gzip.")
DELETE_CHECKPOINT = Endpoint("DELETE", _CHECKPOINT, NOTHING, NOTHING,
    "Delete a checkpoint.", is_for_browsers=True)
GET_FILE = Endpoint("GET", "/files/{weights_id}/{name:path}", NOTHING, object,
    "One file of some weights.", C.REDIRECT, gives=(BYTES,), access="signed")
GET_ARCHIVE = Endpoint("GET", "/archives/{weights_id}.tar", NOTHING, object,
    "All files of some weights as a tar.", C.REDIRECT, gives=("application/x-tar",),
    access="signed")

# --- the account ----------------------------------------------------------------------------------

GET_OWN_KEY = Endpoint("GET", "/auth/apikey/me", NOTHING, t.SelfApiKeyResponse,
    "The caller's key and its owner.")
DELETE_OWN_KEY = Endpoint("DELETE", "/auth/apikey/me", NOTHING, NOTHING,
    "Revoke the key this is asked with.")
AUDIT = Endpoint("GET", "/audit", NOTHING, t.AuditLogResponse,
    "What was done with the account on a day.", C.REDIRECT,
    query=("event_type", "day", *_PAGE), is_long=True)
USAGE_EVENTS = Endpoint("GET", "/billing/usage/events", NOTHING, t.BillingUsageResponse,
    "Tokens used, by the hour.", query=("starting_on", "ending_before", *_PAGE), is_long=True)
CURRENT_STORAGE = Endpoint("GET", "/billing/usage/checkpoints/current",
    NOTHING, t.CurrentCheckpointStorageUsageResponse,
    "Bytes that checkpoints take up now.", query=("project_id",))

# --- looking at runs ------------------------------------------------------------------------------

GET_RUN_METRICS = Endpoint("GET", _RUN + "/metrics", NOTHING, o.RunMetricsResponse,
    "A run's curves: all of its metrics or those in `keys`, in at most `points` points each.",
    query=("keys", "points", "after"))
POST_RUN_METRICS = Endpoint("POST", _RUN + "/metrics", o.PostMetricsRequest, NOTHING,
    "Add metrics of the client's own to a run, under a step.", C.TELEMETRY)
LIST_RUN_OPERATIONS = Endpoint("GET", _RUN + "/operations", NOTHING, o.RunOperationsResponse,
    "A run's operations, the last ones first: all, or those with a `status`.",
    query=("limit", "before", "status"), is_long=True)
GET_RUN_QUEUE = Endpoint("GET", _RUN + "/queue", NOTHING, o.RunQueueResponse,
    "Which of a run's operations wait, behind what, and why.")
LIST_RUN_EXAMPLES = Endpoint("GET", _RUN + "/examples", NOTHING, o.RunExamplesResponse,
    "Sequences that were trained on, where the server keeps any.", query=("step", "limit"),
    is_long=True)
LIST_RUN_SAMPLERS = Endpoint("GET", _RUN + "/samplers", NOTHING, o.RunSamplersResponse,
    "What was sampled from a run's weights: how much, how long, how likely.", is_long=True)
CONSOLE_USAGE = Endpoint("GET", "/console/usage", NOTHING, o.ConsoleUsageResponse,
    "What the caller has used, `by` run, model or day.", query=("by",), is_long=True)
CONSOLE_SERVER = Endpoint("GET", "/console/server", NOTHING, o.ConsoleServerResponse,
    "The state of the server and its engine, and which of the caller's runs have work.")
GET_CLUSTER = Endpoint("GET", "/cluster", NOTHING, o.ClusterResponse,
    "The slots of the server: the state of each, what it holds and what it has to do.")
MOVE_MODEL = Endpoint("POST", _RUN + "/move", o.MoveModelRequest, o.MoveModelResponse,
    "Have a model train in another slot, from its next operation on.")
CONSOLE_KEYS = Endpoint("GET", "/console/keys", NOTHING, o.ConsoleKeysResponse,
    "The keys of the caller's account.")
REVOKE_KEY = Endpoint("DELETE", "/console/keys/{key_id}", NOTHING, NOTHING,
    "Revoke a key of the caller's account.", is_for_browsers=True)
CONSOLE_AUDIT = Endpoint("GET", "/console/audit", NOTHING, t.AuditLogResponse,
    "What was done with the account on a day.", query=("event_type", "day", *_PAGE), is_long=True)
CONSOLE_EVENTS = Endpoint("GET", "/console/events", NOTHING, object,
    "What happens in the caller's runs, or in one `run`, as server-sent events: step, operation, "
    "checkpoint, run, session, key, queue, sample and server. `Last-Event-ID` goes on where a "
    "stream ended.",
    query=("run",), gives=(EVENT_STREAM,))
CONSOLE_LOGIN = Endpoint("POST", "/console/login", NOTHING, NOTHING,
    "Sign a browser in with a key: `{\"key\": …}` gives it a cookie.", repeat=Repeat.ANEW,
    access="anyone", prefix=OUTSIDE)
CONSOLE_LOGIN_LINK = Endpoint("GET", "/console/login", NOTHING, object,
    "Sign a browser in with the link that `tinsmith serve` prints, once.", query=("token",),
    access="anyone", prefix=OUTSIDE)
CONSOLE_LOGOUT = Endpoint("POST", "/console/logout", NOTHING, NOTHING,
    "Sign a browser out.", access="anyone", prefix=OUTSIDE)

# --- sampling -------------------------------------------------------------------------------------

CREATE_SAMPLING_SESSION = Endpoint("POST", "/create_sampling_session",
    t.CreateSamplingSessionRequest, t.CreateSamplingSessionResponse,
    "A sampler of a base model or a checkpoint.", C.SESSION, Repeat.NUMBERED)
JOIN_SAMPLING_SESSION = Endpoint("POST", "/join_sampling_session",
    t.JoinSamplingSessionRequest, t.JoinSamplingSessionResponse,
    "A number for another copy of a sampling client.", C.SESSION, Repeat.ANEW)
GET_SAMPLER = Endpoint("GET", "/samplers/{sampler_id}", NOTHING, SamplerInfo,
    "Base model and weights of a sampler.")
RELEASE_SAMPLER = Endpoint("DELETE", "/samplers/{sampler_id}", NOTHING, NOTHING,
    "Say that the only client of an unnamed sampler is gone.")
SAMPLE = Promised("POST", "/asample", t.SampleRequest, _PROMISE,
    "Sample a prompt.", result=t.SampleResponse, connection=C.SAMPLE, has_data=True)
SAMPLE_STREAM = Endpoint("POST", "/sample_stream", t.SampleRequest, object,
    "Sample a prompt token by token, as server-sent events: tokens, finish and error.", C.SAMPLE,
    Repeat.ANEW, gives=(EVENT_STREAM,), has_data=True)

# --- results --------------------------------------------------------------------------------------

RETRIEVE_FUTURE = Endpoint("POST", "/retrieve_future", t.FutureRetrieveRequest, object,
    "The result of a request; 408 when it is not there yet.", C.RETRIEVE, gives=_EITHER,
    is_counted=False)
RETRIEVE_FUTURES = Endpoint("POST", "/retrieve_futures",
    t.FuturesRetrieveRequest, t.FuturesRetrieveResponse,
    "Which of a sampler's requests have finished.", C.RETRIEVE_FUTURES, is_counted=False)
CANCEL_FUTURE = Endpoint("POST", "/cancel_future", t.CancelFutureRequest, NOTHING,
    "Cancel a sample.", C.RETRIEVE)

# --- for OpenAI clients ---------------------------------------------------------------------------

OPENAI_MODELS = Endpoint("GET", "/models", NOTHING, object,
    "Base models and the caller's sampler checkpoints.", prefix=OPENAI_API, is_long=True)
OPENAI_MODEL = Endpoint("GET", "/models/{model:path}", NOTHING, object,
    "One of them, by its name or path.", prefix=OPENAI_API)
OPENAI_COMPLETIONS = Endpoint("POST", "/completions", dict, object,
    "Complete prompts.", repeat=Repeat.ANEW, gives=(JSON, EVENT_STREAM), prefix=OPENAI_API,
    has_data=True, is_for_browsers=True)
OPENAI_CHAT_COMPLETIONS = Endpoint("POST", "/chat/completions", dict, object,
    "Answer a conversation.", repeat=Repeat.ANEW, gives=(JSON, EVENT_STREAM), prefix=OPENAI_API,
    has_data=True, is_for_browsers=True)
OPENAI_GENERATE = Endpoint("POST", "/generate", dict, object,
    "Continue tokens with tokens, as vLLM's endpoint of that name does.", repeat=Repeat.ANEW,
    prefix=GENERATE_API, has_data=True)
OPENAI_RESPONSES = Endpoint("POST", "/responses", dict, object,
    "Answer a conversation, as OpenAI's Responses API does.", repeat=Repeat.ANEW,
    gives=(JSON, EVENT_STREAM), prefix=OPENAI_API, has_data=True, is_for_browsers=True)

# --- for Anthropic clients ------------------------------------------------------------------------

ANTHROPIC_MESSAGES = Endpoint("POST", "/messages", dict, object,
    "Answer a conversation.", repeat=Repeat.ANEW, gives=(JSON, EVENT_STREAM), prefix=ANTHROPIC_API,
    has_data=True)
ANTHROPIC_COUNT_TOKENS = Endpoint("POST", "/messages/count_tokens", dict, object,
    "How many tokens a conversation has.", prefix=ANTHROPIC_API, has_data=True)

# --- for those who run the server -----------------------------------------------------------------

API_HEALTHZ = Endpoint("GET", "/healthz", NOTHING, t.HealthResponse,
    "The server is alive.", access="anyone")
HEALTHZ = replace(API_HEALTHZ, prefix=OUTSIDE)
READYZ = Endpoint("GET", "/readyz", NOTHING, object,
    "Whether the server can serve; 503 with the reason when not.", access="anyone", prefix=OUTSIDE)
METRICS = Endpoint("GET", "/metrics", NOTHING, object,
    "Metrics in Prometheus' form.", gives=("text/plain",), access="anyone", prefix=OUTSIDE)
OPENAPI = Endpoint("GET", "/openapi.json", NOTHING, object,
    "This description.", access="anyone", prefix=OUTSIDE)
# fmt: on

ENDPOINTS: Mapping[str, Endpoint[Any, Any]] = {
    name.lower(): row for name, row in list(globals().items()) if isinstance(row, Endpoint)
}
"""Every row by its name in small letters."""
