"""Results as the server answers them, for tests of the forms that clients read."""

from __future__ import annotations

from tinsmith.types import ForwardBackwardOutput, SampleResponse
from tinsmith.types.model import Model
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import dialects, json, proto


def encode_result(result: Model, accept: str) -> tuple[str, bytes]:
    """(content type, body) for a client with this Accept header."""
    if not isinstance(result, ForwardBackwardOutput | SampleResponse):
        return JSON, json.encode(result)
    if not dialects.accepts_protobuf(accept):
        return JSON, dialects.result_as_json(result)
    if isinstance(result, SampleResponse):
        return PROTOBUF, proto.encode_sample(result)
    return PROTOBUF, proto.encode_output(result)
