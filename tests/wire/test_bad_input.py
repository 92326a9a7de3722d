"""JSON bodies that are wrong or hostile.

Whatever comes in, the answer is a message or a `ValidationError` that says where and what.
"""

from __future__ import annotations

import inspect
import random
import time
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from json import dumps
from typing import Any, Literal, get_args, get_origin

import pytest

from tinsmith import types as ours
from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types.model import Model, Request
from tinsmith.wire import dialects, json
from tinsmith.wire.limits import Limits


def body_of(value: Any) -> bytes:
    """With the standard library, which writes integers of any size."""
    return dumps(value).encode()


# --- Each kind of wrong, and where the complaint points ---------------------------------------

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
SAMPLE = {"prompt": PROMPT, "sampling_params": {"max_tokens": 5}}
TENSOR = {"data": [1.0, 2.0], "dtype": "float32", "shape": [2]}
CSR = {
    "data": [7, 8],
    "dtype": "int64",
    "shape": [2, 3],
    "sparse_crow_indices": [0, 1, 2],
    "sparse_col_indices": [1, 0],
}


def prompt(chunk: Any) -> dict[str, Any]:
    return {**SAMPLE, "prompt": {"chunks": [{"tokens": [1]}, chunk]}}


def scored(**changes: Any) -> dict[str, Any]:
    return {**SAMPLE, "target_prompt_logprobs": {**TENSOR, **changes}}


def sparse(**changes: Any) -> dict[str, Any]:
    return {**SAMPLE, "target_prompt_logprobs": {**CSR, **changes}}


C, S = r"prompt\.chunks\[1\]", r"target_prompt_logprobs\."
WRONG_SAMPLES: dict[str, tuple[Any, str]] = {
    "an unknown field": ({**SAMPLE, "temprature": 1}, "temprature"),
    "an unknown field near a known one": (
        {**SAMPLE, "num_sample": 1},
        "did you mean 'num_samples'",
    ),
    "a missing field": ({"prompt": PROMPT}, "sampling_params"),
    "an unknown tag": (prompt({"type": "video"}), C + r"\.type.*video"),
    "a tag that is no text": (prompt({"type": 5, "tokens": [1]}), C + r"\.type"),
    "no tag and no clue": (prompt({"foo": 1}), C + r"\.type.*encoded_text"),
    "the tag of another message": ({**SAMPLE, "type": "forward"}, "type.*sample"),
    "an unknown field in a chunk": (prompt({"tokens": [1], "weight": 2}), C + r"\.weight"),
    "a fractional token": (prompt({"tokens": [1, 2.5]}), C + r"\.tokens\[1\]"),
    "a token beyond int32": (prompt({"tokens": [0, 2**31]}), C + r"\.tokens\[1\].*int32"),
    "a token that is text": (prompt({"tokens": ["1"]}), C + r"\.tokens\[0\].*str"),
    "a token that is null": (prompt({"tokens": [None]}), C + r"\.tokens\[0\].*null"),
    "tokens that are text": (prompt({"tokens": "123"}), C + r"\.tokens"),
    "tokens that are an object": (prompt({"tokens": {"0": 1}}), C + r"\.tokens"),
    "nested tokens": (prompt({"tokens": [[1]]}), C + r"\.tokens"),
    "broken base64": (
        prompt({"type": "image", "data": "a%b=", "format": "png"}),
        C + r"\.data.*base64",
    ),
    "base64 of odd length": (
        prompt({"type": "image", "data": "abc", "format": "png"}),
        C + r"\.data",
    ),
    "base64 that is not ASCII": (prompt({"type": "dmel", "dmel": "é==="}), C + r"\.dmel"),
    "an unknown format": (
        prompt({"type": "image", "data": "", "format": "gif"}),
        C + r"\.format.*png",
    ),
    "chunks that are an object": ({**SAMPLE, "prompt": {"chunks": {"0": {}}}}, r"prompt\.chunks"),
    "no chunks": ({**SAMPLE, "prompt": {}}, r"prompt\.chunks"),
    "a prompt that is text": ({**SAMPLE, "prompt": "hello"}, "prompt.*str"),
    "an integer beyond int64": ({**SAMPLE, "seq_id": 2**63}, "seq_id.*64-bit"),
    "an integer that is text": ({**SAMPLE, "seq_id": "5"}, "seq_id.*str"),
    "an integer that is true": ({**SAMPLE, "num_samples": True}, "num_samples.*bool"),
    "an integer with a fraction": ({**SAMPLE, "num_samples": 1.5}, "num_samples"),
    "a number that is text": ({**SAMPLE, "sampling_params": {"temperature": "hot"}}, "temperature"),
    "a flag that is a number": ({**SAMPLE, "prompt_logprobs": 1}, "prompt_logprobs"),
    "a stop of mixed kinds": ({**SAMPLE, "sampling_params": {"stop": ["a", 1]}}, "stop"),
    "a tensor of unknown dtype": (scored(dtype="float64"), S + "dtype"),
    "a tensor without a dtype": (scored(dtype=None), S + "dtype"),
    "a tensor whose dtype is a list": (scored(dtype=["int64"]), S + "dtype"),
    "a tensor without data": (scored(data=None), S + "data"),
    "a tensor of text": (scored(data="12"), S + "data"),
    "a tensor with a null": (scored(data=[1.0, None]), S + r"data\[1\]"),
    "a tensor with text": (scored(data=[1.0, "NaN"]), S + r"data\[1\]"),
    "a tensor with an object": (scored(data=[{}, 1.0]), S + r"data"),
    "a tensor that does not fill its shape": (scored(shape=[3]), S + "shape"),
    "a tensor of negative shape": (scored(shape=[-1, -2]), S + "shape"),
    "a tensor whose shape is text": (scored(shape="2"), S + "shape"),
    "a tensor whose shape has text": (scored(shape=["2"]), S + "shape"),
    "a tensor whose shape has a fraction": (scored(shape=[2.5]), S + "shape"),
    "a tensor whose shape has a null": (scored(shape=[None, 2]), S + "shape"),
    "a tensor whose shape is a number": (scored(shape=2), S + "shape"),
    "a tensor of absurd shape": (scored(shape=[2**70]), S + "shape"),
    "a tensor of too many dimensions": (scored(shape=[1] * 80 + [2]), S + "shape"),
    "an unknown field in a tensor": (scored(layout="csr"), S + "layout"),
    "an integer tensor beyond int64": (sparse(data=[7, 2**63]), S + r"data\[1\]"),
    "CSR without a shape": (sparse(shape=None), S + "shape"),
    "CSR without columns": (sparse(sparse_col_indices=None), S + "sparse_col_indices"),
    "CSR with a column outside": (sparse(sparse_col_indices=[1, 3]), S + "sparse_col_indices"),
    "CSR with too few rows": (sparse(sparse_crow_indices=[0, 2]), S + "sparse_crow_indices"),
    "CSR with falling rows": (sparse(sparse_crow_indices=[0, 3, 2]), S + "sparse_crow_indices"),
    "CSR with text in its rows": (
        sparse(sparse_crow_indices=["0", 1, 2]),
        S + "sparse_crow_indices",
    ),
    "CSR with rows beyond int64": (
        sparse(sparse_crow_indices=[0, 1, 2**64]),
        S + "sparse_crow_indices",
    ),
    "CSR of absurd height": (sparse(shape=[2**60, 3]), S + "sparse_crow_indices"),
}


@pytest.mark.parametrize("name", WRONG_SAMPLES)
def test_a_wrong_field_is_refused_and_named(name):
    """S5, S7, S11"""
    body, message = WRONG_SAMPLES[name]
    with pytest.raises(ValidationError, match=message):
        json.decode(ours.SampleRequest, body_of(body))


BODIES = [b"", b"{", b"[1]", b"null", b"5", b'"x"', b"{}x", b"\xff\xfe", b'{"a":NaN}', b"{'a':1}"]


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(ValidationError, match=r"body|JSON"):
        json.decode(ours.SampleRequest, body)
    with pytest.raises(ValidationError):
        ours.AdamParams.model_validate_json(body)
    with pytest.raises(ValidationError):
        ours.ModelInput.model_validate_json(body)


@pytest.mark.parametrize("bomb", [b'{"prompt":' + b"[" * 100_000, b'{"a":' * 100_000])
def test_a_nesting_bomb_is_refused_at_once(bomb):
    start = time.process_time()
    for decode in (
        lambda: json.decode(ours.SampleRequest, bomb),
        lambda: json.decode(ours.CreateSessionRequest, bomb),
        lambda: dialects.decode_pass(bomb, "application/json"),
    ):
        with pytest.raises(ValidationError):
            decode()
    assert time.process_time() - start < 1


@pytest.mark.parametrize("levels", [90, 200, 1000])
def test_metadata_that_is_taken_can_be_sent_on(levels):
    """The encoder allows less nesting than the parser; what it could not write is refused."""
    deep = b'{"a":' * levels + b"0" + b"}" * levels
    body = b'{"tags":[],"user_metadata":' + deep + b',"sdk_version":"1"}'
    if levels > 100:
        with pytest.raises(ValidationError, match=r"user_metadata.*100 levels"):
            json.decode(ours.CreateSessionRequest, body)
    else:
        decoded = json.decode(ours.CreateSessionRequest, body)
        assert deep in json.encode(decoded)
        assert len(repr(decoded)) < 2000


def test_a_body_above_the_limit_is_refused_with_both_numbers():
    limits = Limits(max_body_bytes=10)
    for decode in (
        lambda: json.parse(b"{" + b" " * 20 + b"}", limits),
        lambda: dialects.decode_pass(b"{" + b" " * 20 + b"}", "application/json", limits=limits),
        lambda: dialects.decode_pass(b"\0" * 22, "application/x-protobuf", limits=limits),
    ):
        with pytest.raises(TooLargeError, match=r"22.*limit is 10"):
            decode()


def test_a_flood_of_datums_in_json_is_refused_as_too_large():
    datum = b'{"model_input":{"chunks":[]},"loss_fn_inputs":{}},'
    data = (datum * 20_000)[:-1]
    body = b'{"model_id":"m","forward_input":{"loss_fn":"ppo","data":[' + data + b"]}}"
    with pytest.raises(TooLargeError, match=r"forward_input\.data.*16384"):
        dialects.decode_pass(body, "application/json", forward_only=True)


MANY = 1_000_000
FLOODS = {
    "chunks": b'{"sampling_params":{},"prompt":{"chunks":[' + b'{"tokens":[]},' * MANY + b"0]}}",
    "lists": b'{"tags":[],"sdk_version":"1","user_metadata":{"a":[' + b"[]," * MANY + b"0]}}",
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_tiny_parts_is_refused_before_any_is_made(name):
    start = time.process_time()
    for cls in (ours.SampleRequest, ours.CreateSessionRequest):
        with pytest.raises(TooLargeError, match="131072"):
            json.decode(cls, FLOODS[name])
    with pytest.raises(TooLargeError, match="131072"):
        dialects.decode_pass(FLOODS[name], "application/json")
    assert time.process_time() - start < 0.5


def test_the_largest_pass_an_official_release_sends_is_within_the_limits():
    """1,024 datums, each of several chunks, with every loss input there is."""
    names = ["target_tokens", "weights", "advantages", "logprobs", "mask", "clip_low_threshold"]
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2]}] * 8},
        "loss_fn_inputs": dict.fromkeys(names, TENSOR),
    }
    inputs = {"loss_fn": "ppo", "data": [datum] * 1024}
    body = body_of({"model_id": "m", "forward_backward_input": inputs})
    decoded = dialects.decode_pass(body, "application/json")
    assert len(decoded.forward_backward_input.data) == 1024


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "multipart/form-data", "application/xml"]
)
def test_another_content_type_is_named(content_type):
    with pytest.raises(ValidationError, match="application/x-protobuf"):
        dialects.decode_pass(b"{}", content_type)


# --- Every request, every field, every odd value ----------------------------------------------

MOMENT = "2026-11-15T10:00:00Z"
EXAMPLES: dict[Any, Any] = {
    str: "x",
    int: 1,
    float: 0.5,
    bool: True,
    bytes: "eA==",
    datetime: MOMENT,
    Any: {"k": [1, None]},
    object: {"k": [1, None]},
}


def example(annotation: Any) -> Any:
    """Some plain value that the annotation accepts."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in EXAMPLES:
        return EXAMPLES[annotation]
    if annotation is ours.TensorData:
        return CSR
    if annotation is ours.ModelInput:
        return PROMPT
    if origin is typing.Annotated:
        return example(args[0])
    if origin is Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return example(next(member for member in args if member is not type(None)))
    if origin in (list, Sequence):
        return [example(args[0])]
    if origin in (dict, Mapping):
        return {"k": example(args[1])}
    if issubclass(annotation, Enum):
        return next(iter(annotation)).value
    return {name: example(field.annotation) for name, field in annotation.model_fields.items()}


ODD = [
    None, True, 0, -1, 1.5, 2**63, -(2**64), 1e308, "", "x", "\ud7ff", "eA=", [], [[]], [None],
    {}, {"type": "x"}, {"k": {}}, [1, "a"], "2026-13-45T99:99:99Z", [[[[1]]]], [{"a": 1}],
]  # fmt: skip


def variants(value: Any) -> Iterator[Any]:
    """Copies of plain data, each with one part replaced, left out or added."""
    yield from ODD
    if isinstance(value, dict):
        yield {**value, "unheard_of": 1}
        for key, item in value.items():
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: odd} for odd in variants(item))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            for odd in variants(item):
                yield [*value[:index], odd, *value[index + 1 :]]


def tries(decode: Any, body: bytes) -> None:
    """Anything but a message or `ValidationError` fails the test."""
    try:
        message = decode(body)
    except ValidationError:
        return
    repr(message)


REQUESTS = sorted(
    name
    for name, cls in vars(ours).items()
    if inspect.isclass(cls) and issubclass(cls, Request) and cls is not Request
)
RESPONSES = sorted(
    name
    for name, cls in vars(ours).items()
    if inspect.isclass(cls) and issubclass(cls, Model) and name not in REQUESTS
)


@pytest.mark.parametrize("name", REQUESTS + RESPONSES)
def test_any_odd_value_in_any_field_gives_a_message_or_a_validation_error(name):
    cls = getattr(ours, name)
    right = example(cls)
    if name == "OptimStepRequest":
        right["adam_params"] = right.pop("optim_params")
    if name not in ("TelemetrySendRequest", "TelemetryBatch"):
        json.decode(cls, body_of(right))
    for odd in variants(right):
        tries(lambda body: dialects.decode(cls, body), body_of(odd))


PASS = {
    "model_id": "m",
    "seq_id": 1,
    "forward_backward_input": {
        "loss_fn": "ppo",
        "loss_fn_config": {"a": 1.5, "b": "x"},
        "data": [{"model_input": PROMPT, "loss_fn_inputs": {"weights": TENSOR, "targets": CSR}}],
    },
}
OUTPUT = {
    "loss_fn_output_type": "ArrayRecord",
    "loss_fn_outputs": [{"logprobs": TENSOR}],
    "metrics": {"loss:sum": 1.5},
}
RESULT = {
    "sequences": [{"stop_reason": "stop", "tokens": [1, 2], "logprobs": [-0.5, -1.0]}],
    "prompt_logprobs": [None, -0.5],
    "topk_prompt_logprobs": [None, [[1, -0.5], [2, -1.0]]],
    "type": "sample",
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "a pass": (PASS, lambda body: dialects.decode_pass(body, "application/json")),
    "an output": (OUTPUT, lambda b: ours.ForwardBackwardOutput.model_validate(json.parse(b))),
    "a sample": (RESULT, lambda b: ours.SampleResponse.model_validate(json.parse(b))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_odd_value_in_the_old_json_forms_gives_a_message_or_a_validation_error(name):
    right, decode = OTHERS[name]
    decode(body_of(right))
    for odd in variants(right):
        tries(decode, body_of(odd))


def test_random_damage_to_json_gives_a_message_or_a_validation_error():
    rng = random.Random(0)
    starts = [(getattr(ours, name), body_of(example(getattr(ours, name)))) for name in REQUESTS]
    for _ in range(6_000):
        cls, start = rng.choice(starts)
        body = bytearray(start)
        for _ in range(rng.randint(1, 4)):
            where = rng.randrange(len(body))
            body[where] = rng.choice(b'0123456789{}[]",:.eE-xtrufalsn\\\xff\x00')
        tries(lambda body, cls=cls: json.decode(cls, body), bytes(body))
