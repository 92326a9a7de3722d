"""Records what an official release puts on the wire, for `test_dialects.py`.

    python tests/wire/record_dialects.py FOLDER > tests/wire/recorded/VERSION.json

FOLDER holds an unpacked release (`pip install --no-deps --target FOLDER tinker==VERSION`). Its own
types build one set of requests, the same in every release, and its own `model_dump` writes them as
its resources do. Fields that a release did not have are left out. The results that our server
would send it are given to its own readers, and a refusal stops the recording.
"""

from __future__ import annotations

import base64
import json
import sys
from datetime import UTC, datetime
from typing import Any

sys.path.insert(0, sys.argv[1])

import numpy as np
import tinker.types as types
from tinker._compat import model_dump
from tinker._version import __version__

JSON, PROTO = "application/json", "application/x-protobuf"
RELEASE = tuple(int(part) for part in __version__.split("."))


def make(cls: Any, **values: Any) -> Any:
    """An instance from the values whose fields the release has."""
    known = getattr(cls, "model_fields", None)
    if known is None:
        return cls(**values)
    return cls(**{name: value for name, value in values.items() if name in known})


def requests() -> dict[str, Any]:
    """By endpoint. None is passed where the release's clients pass it."""
    adam = make(types.AdamParams, learning_rate=3e-4)
    lora = make(types.LoraConfig, rank=16, seed=None, train_mlp=False)
    text = types.EncodedTextChunk(tokens=[1, 2, 3])
    size = {"tokens": 7, "height": 5, "width": 6, "expected_tokens": 7}
    image = make(types.ImageChunk, data=b"\x89PNG", format="png", **size)
    pointer = make(types.ImageAssetPointerChunk, location="asset://1", format="jpeg", **size)
    prompt = types.ModelInput(chunks=[text, image, pointer])
    event = types.SessionStartEvent(
        event="SESSION_START",
        event_id="e-1",
        event_session_index=0,
        severity="INFO",
        timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    optim = {"optim_params": adam} if RELEASE >= (0, 29, 1) else {"adam_params": adam}
    return {
        "create_session": make(
            types.CreateSessionRequest,
            tags=["a"],
            user_metadata={"k": "v"},
            sdk_version="x",
            project_id=None,
            display_name=None,
        ),
        "session_heartbeat": make(types.SessionHeartbeatRequest, session_id="s"),
        "create_model": make(
            types.CreateModelRequest,
            session_id="s",
            model_seq_id=0,
            base_model="b",
            user_metadata=None,
            lora_config=lora,
        ),
        "get_info": make(types.GetInfoRequest, model_id="m"),
        "unload_model": make(types.UnloadModelRequest, model_id="m"),
        "optim_step": types.OptimStepRequest(**optim, model_id="m", seq_id=2),
        "save_weights": make(
            types.SaveWeightsRequest, model_id="m", path="a", seq_id=3, ttl_seconds=None
        ),
        "load_weights": make(
            types.LoadWeightsRequest,
            model_id="m",
            path="tinker://r/weights/a",
            seq_id=4,
            optimizer=True,
        ),
        "save_weights_for_sampler": make(
            types.SaveWeightsForSamplerRequest,
            model_id="m",
            path=None,
            seq_id=5,
            sampling_session_seq_id=0,
            ttl_seconds=None,
        ),
        "create_sampling_session": make(
            types.CreateSamplingSessionRequest,
            session_id="s",
            sampling_session_seq_id=0,
            base_model="b",
            model_path=None,
        ),
        "asample": make(
            types.SampleRequest,
            sampling_session_id="s:sample:0",
            seq_id=7_000_000_000_000_000_001,
            num_samples=2,
            prompt=prompt,
            sampling_params=make(types.SamplingParams, max_tokens=5, stop=[], seed=None),
            prompt_logprobs=False,
        ),
        "retrieve_future": make(types.FutureRetrieveRequest, request_id="r"),
        "telemetry": make(
            types.TelemetrySendRequest,
            events=[event],
            platform="p",
            sdk_version="x",
            session_id="s",
            process_uuid="",
        ),
    }


def passes() -> dict[str, Any]:
    tensors = {
        "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
        "weights": types.TensorData(data=[0.0, 0.5, 1.0], dtype="float32", shape=[3]),
    }
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2, 3])])
    datum = types.Datum(model_input=prompt, loss_fn_inputs=tensors)
    inputs = types.ForwardBackwardInput(
        data=[datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.75}
    )
    bare = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy", loss_fn_config=None)
    return {
        "forward_backward": types.ForwardBackwardRequest(
            forward_backward_input=inputs, model_id="m", seq_id=1
        ),
        "forward": types.ForwardRequest(forward_input=bare, model_id="m", seq_id=1),
    }


def dumped(request: Any) -> Any:
    """As the release's resources write a body."""
    if RELEASE >= (0, 18, 0):
        return model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
    return model_dump(request, exclude_unset=True, mode="json")


def as_pydantic(request: Any) -> Any:
    try:
        from tinker.lib._pydantic_conv import to_pydantic_request
    except ImportError:
        return request
    return to_pydantic_request(request)


def as_proto(name: str, request: Any) -> str:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    if name == "forward":
        request = types.ForwardBackwardRequest(
            request.forward_input, request.model_id, request.seq_id
        )
    message = forward_backward_request_to_proto(request)
    message.forward_only = name == "forward"
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode()


def check_results() -> None:
    """Our results, in the form this release asks for, must please its own readers."""
    from tinsmith import types as ours
    from tinsmith.wire import dialects, proto

    tensor = ours.TensorData([-0.5, -1.5], "float32", [2])
    output = ours.ForwardBackwardOutput("ArrayRecord", [{"logprobs": tensor}], {"loss:sum": 2.0})
    tokens, numbers = np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
    topk = ours.TopkLogprobs.from_lists([None, [(3, -0.5)]])
    prompt = np.array([np.nan, -0.5], np.float32)
    sample = ours.SampleResponse(
        [ours.SampledSequence("length", "", tokens, numbers)], prompt, topk
    )
    for result, name in ((output, "ForwardBackwardOutput"), (sample, "SampleResponse")):
        cls = getattr(types, name)
        if RELEASE >= (0, 19, 0) or (RELEASE >= (0, 18, 1) and name == "SampleResponse"):
            from tinker.proto.response_conv import deserialize_proto_response

            encode = proto.encode_output if result is output else proto.encode_sample
            body = encode(result)
            read = deserialize_proto_response(body, cls)
            assert read.metrics == {"loss:sum": 2.0} if result is output else read.sequences
        if RELEASE < (0, 25, 0):
            read = read_json(cls, json.loads(dialects.result_as_json(result)))
            if result is output:
                assert read.loss_fn_outputs[0]["logprobs"].data == [-0.5, -1.5]
            else:
                assert read.sequences[0].tokens == [5, 6] and read.sequences[0].logprobs == [-1, -2]
                assert read.prompt_logprobs == [None, -0.5]
                assert [tuple(cell) for cell in read.topk_prompt_logprobs[1]] == [(3, -0.5)]


def read_json(cls: Any, value: Any) -> Any:
    if hasattr(cls, "model_validate"):
        return cls.model_validate(value)
    from tinker.lib._pydantic_conv import deserialize_json_response

    return deserialize_json_response(value, cls)


def main() -> None:
    check_results()
    bodies = [
        {"endpoint": name, "type": JSON, "body": dumped(request)}
        for name, request in requests().items()
    ]
    for name, request in passes().items():
        if RELEASE < (0, 25, 0):
            bodies.append({"endpoint": name, "type": JSON, "body": dumped(as_pydantic(request))})
        if RELEASE >= (0, 19, 0):
            bodies.append({"endpoint": name, "type": PROTO, "body": as_proto(name, request)})
    print(json.dumps({"version": __version__, "bodies": bodies}, indent=1, sort_keys=True))


main()
