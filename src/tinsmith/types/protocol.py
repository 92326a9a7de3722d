"""Facts of the protocol that client, server and engine must agree on, each written once."""

from __future__ import annotations

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
EVENT_STREAM = "text/event-stream"

CLONE_BLOCK = 10**9
"""How many sequence ids each copy of a sampling client has to itself."""

MAX_SAMPLES = 4096
"""Most samples in one request."""

MAX_STOPS, MAX_STOP_CHARACTERS = 1024, 1000
"""Most stop texts or tokens of a sampling request, and the longest such text."""

MAX_LOSS_INPUTS = 16
"""Most inputs of a custom loss; `logprobs` is always the first."""


def model_id(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


def loss_id(session_id: str, custom_loss_seq_id: int) -> str:
    return f"{session_id}:loss:{custom_loss_seq_id}"
