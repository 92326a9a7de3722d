"""Random instances of every official message, through both packages and back.

The strategies are made from the official models' own annotations, so a message or a field that a
new release brings is exercised without a line here. Values are plain data, from which both
packages build their instance.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
import typing
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import numpy as np
import orjson
import pydantic
import pytest
import tinker.types as official
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker._models import StrictBase
from tinker.types._pydantic_types.tensor_data import TensorData as JsonTensor
from tinker.types.generic_event import GenericEvent
from tinker.types.try_again_response import TryAgainResponse

from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types.model import Model
from tinsmith.wire import json

quick = settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

MESSAGES = {
    name: cls
    for name, cls in vars(official).items()
    if inspect.isclass(cls) and issubclass(cls, pydantic.BaseModel)
} | {"GenericEvent": GenericEvent, "TryAgainResponse": TryAgainResponse}
REQUESTS = sorted(name for name, cls in MESSAGES.items() if issubclass(cls, StrictBase))
RESPONSES = sorted(MESSAGES.keys() - set(REQUESTS))


# --- Values from annotations ------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
integers = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
loose_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | numbers | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
moments = st.datetimes(
    min_value=datetime(1971, 1, 1),
    max_value=datetime(2100, 1, 1),
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7, minutes=-30))]),
)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: text,
    int: integers,
    float: numbers,
    bool: st.booleans(),
    bytes: st.binary(max_size=12),
    datetime: moments,
    pydantic.AwareDatetime: moments,
    Any: loose_json,
    object: loose_json,
    type(None): st.none(),
}


@st.composite
def json_tensors(draw: Any) -> dict[str, Any]:
    """A tensor's JSON form; eighths, so that float32 holds them exactly."""
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["int64", "float32"]))
    number = integers if dtype == "int64" else st.integers(-800, 800).map(lambda n: n / 8)
    filled = [sorted(draw(st.sets(st.integers(0, columns - 1)))) for _ in range(rows)]
    sparse = draw(st.booleans())
    count = sum(map(len, filled)) if sparse else rows * columns
    tensor = {
        "data": draw(st.lists(number, min_size=count, max_size=count)),
        "dtype": dtype,
        "shape": [rows, columns],
    }
    if sparse:
        tensor["sparse_crow_indices"] = [sum(map(len, filled[:i])) for i in range(rows + 1)]
        tensor["sparse_col_indices"] = [column for row in filled for column in row]
    return tensor


token_lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
open_families = st.fixed_dictionaries(
    {"type": text.filter(lambda t: t not in ("adamw", "dimuon"))},
    optional={"momentum_": numbers, "note": text},
)

# What the annotations alone do not say.
SPECIAL: dict[tuple[Any, str], st.SearchStrategy[Any]] = {
    (official.EncodedTextChunk, "tokens"): token_lists,
    (official.CreateSessionRequest, "user_metadata"): st.dictionaries(text, loose_json, max_size=2),
    (official.SessionStartEvent, "event"): st.just("SESSION_START"),
    (official.SessionEndEvent, "event"): st.just("SESSION_END"),
    (official.UnhandledExceptionEvent, "event"): st.just("UNHANDLED_EXCEPTION"),
    (GenericEvent, "event"): st.just("GENERIC_EVENT"),
}


def values_of(annotation: Any, marks: typing.Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """A strategy of plain values that the annotation accepts, within its bounds."""
    origin, args = get_origin(annotation), get_args(annotation)
    limits = {k: v for mark in marks for k, v in bounds_of(mark).items()}
    if annotation is JsonTensor:
        return json_tensors()
    if inspect.isclass(annotation) and annotation.__name__ in OPEN_CLASSES:
        return open_families
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        return st.deferred(lambda: messages(annotation))
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return st.sampled_from([member.value for member in annotation])
    if limits and annotation in (int, float):
        low, high = limits.get("ge"), limits.get("le", limits.get("lt"))
        if annotation is int:
            return st.integers(low, high)
        return st.floats(
            low, high, exclude_max="lt" in limits, allow_nan=False, allow_infinity=False
        )
    if annotation in SIMPLE:
        return SIMPLE[annotation].filter(
            lambda v: not isinstance(v, str) or len(v) >= limits.get("min_length", 0)
        )
    if origin is typing.Annotated:
        return values_of(args[0], args[1:])
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(member, marks) for member in args])
    if origin in (list, typing.get_origin(typing.Sequence[int])):
        low = limits.get("min_length", 0)
        return st.lists(values_of(args[0]), min_size=low, max_size=max(low, 3))
    if origin is dict:
        return st.dictionaries(text, values_of(args[1]), max_size=2)
    raise TypeError(f"no strategy for {annotation!r}")


OPEN_CLASSES = ("OptimizerConfigBase", "OptimParamsBase")


def bounds_of(mark: Any) -> dict[str, Any]:
    names = ("ge", "le", "lt", "min_length", "max_length")
    return {name: getattr(mark, name) for name in names if getattr(mark, name, None) is not None}


@functools.cache
def messages(cls: type[pydantic.BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Plain values of one message: tags always there, what has a default sometimes."""
    required, optional = {}, {}
    for name, field in cls.model_fields.items():
        special = (cls, name) in SPECIAL
        values = SPECIAL[cls, name] if special else values_of(field.annotation, field.metadata)
        always = field.is_required() or get_origin(field.annotation) is Literal
        (required if always else optional)[name] = values
    return st.fixed_dictionaries(required, optional=optional)


# --- Comparing the two packages' objects ------------------------------------------------------


def same(mine: Any, theirs: Any) -> bool:
    """Field by field, and no type but the tensors' and the open families' may differ."""
    if isinstance(theirs, JsonTensor):
        numbers = np.asarray(theirs.data, dtype=theirs.dtype).tolist()
        return (mine.data, mine.dtype, mine.shape) == (numbers, theirs.dtype, theirs.shape) and (
            mine.sparse_crow_indices,
            mine.sparse_col_indices,
        ) == (theirs.sparse_crow_indices, theirs.sparse_col_indices)
    if type(theirs).__name__ in OPEN_CLASSES:
        return mine.model_dump() == theirs.model_dump()
    if isinstance(theirs, pydantic.BaseModel):
        return type(mine).__name__ == type(theirs).__name__ and all(
            same(getattr(mine, name), getattr(theirs, name)) for name in type(theirs).model_fields
        )
    if isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(same(mine[k], theirs[k]) for k in theirs)
    return bool(mine == theirs) and isinstance(mine, bool) == isinstance(theirs, bool)


def sent(theirs: pydantic.BaseModel) -> bytes:
    """The body the official package sends for a message."""
    return theirs.model_dump_json(exclude_none=True).encode()


def received(name: str, body: bytes) -> Any:
    cls = getattr(ours, name)
    if issubclass(cls, Model):
        return json.decode(cls, body)
    return cls.model_validate(json.parse(body))


# --- Round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS + RESPONSES)
def test_each_package_reads_what_the_other_sends_as_the_same(name):
    """S3, S109: requests as the official server sees them, responses as its client does."""

    @quick
    @given(messages(MESSAGES[name]))
    def check(values: dict[str, Any]) -> None:
        mine = getattr(ours, name).model_validate(values)
        theirs = MESSAGES[name].model_validate(values)
        assert same(mine, theirs)
        body = json.encode(mine)
        assert orjson.loads(body) == orjson.loads(sent(theirs))
        assert same(mine, MESSAGES[name].model_validate_json(body))
        assert received(name, sent(theirs)) == mine

    check()


# --- Unknown fields ---------------------------------------------------------------------------

NEW = {"added_in_a_later_release": {"nested": [1, None]}}


def levels(value: Any) -> int:
    """How many messages there are in a message, itself included."""
    if isinstance(value, pydantic.BaseModel):
        return 1 + sum(levels(getattr(value, name)) for name in type(value).model_fields)
    if isinstance(value, list | tuple):
        return sum(map(levels, value))
    return sum(map(levels, value.values())) if isinstance(value, dict) else 0


def with_new_field(value: Any, wanted: set[int], seen: list[int]) -> Any:
    """Plain data of a message, with a field nobody knows in the messages numbered `wanted`."""
    if isinstance(value, pydantic.BaseModel):
        seen.append(len(seen))
        extra = NEW if seen[-1] in wanted else {}
        plain = orjson.loads(sent(value))
        inner = {
            name: with_new_field(getattr(value, name), wanted, seen)
            for name in type(value).model_fields
            if levels(getattr(value, name))
        }
        renamed = {
            n if n in plain else WIRE_NAMES[inner_kind(value, n)]: v for n, v in inner.items()
        }
        return {**plain, **renamed, **extra}
    if isinstance(value, list | tuple):
        return [with_new_field(item, wanted, seen) for item in value]
    if isinstance(value, dict):
        return {key: with_new_field(item, wanted, seen) for key, item in value.items()}
    return orjson.loads(orjson.dumps(value))


WIRE_NAMES = {True: "adam_params", False: "optimizer_params"}


def inner_kind(value: Any, name: str) -> bool:
    return isinstance(getattr(value, name), official.AdamParams)


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_with_new_fields_at_every_level_still_parses(name):
    """S8"""

    @quick
    @given(messages(MESSAGES[name]))
    def check(values: dict[str, Any]) -> None:
        theirs = MESSAGES[name].model_validate(values)
        newer = orjson.dumps(with_new_field(theirs, set(range(levels(theirs))), []))
        assert same(received(name, newer), MESSAGES[name].model_validate_json(newer))

    check()


def test_unknown_fields_of_a_response_are_dropped():
    """S9: they are not kept anywhere."""
    answer = ours.Cursor.model_validate({"offset": 0, "limit": 1, "total_count": 2, **NEW})
    assert answer.model_dump() == {"offset": 0, "limit": 1, "total_count": 2}
    assert not hasattr(answer, "added_in_a_later_release")


def is_known_family(value: Any, level: int) -> bool:
    """Whether the unknown field went into an optimizer family that we know.

    The official union reads such a config as one of an unknown family; we say what is wrong.
    """
    marked = with_new_field(value, {level}, [])
    config = marked.get("optimizer_config") or marked.get("optimizer_params") or {}
    return config.keys() > NEW.keys() and config["type"] in ("adamw", "dimuon")


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_refuses_an_unknown_field_wherever_the_official_one_does(name):
    """S7"""

    @quick
    @given(messages(MESSAGES[name]), st.data())
    def check(values: dict[str, Any], data: Any) -> None:
        theirs = MESSAGES[name].model_validate(values)
        level = data.draw(st.integers(0, levels(theirs) - 1))
        body = orjson.dumps(with_new_field(theirs, {level}, []))
        try:
            MESSAGES[name].model_validate_json(body)
            tolerated = True
        except pydantic.ValidationError:
            tolerated = False
        if tolerated and not is_known_family(theirs, level):
            received(name, body)
        else:
            with pytest.raises(ValidationError, match="added_in_a_later_release"):
                received(name, body)

    check()


# --- As Python objects ------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS + RESPONSES)
def test_messages_are_immutable_and_pickle_copy_compare_and_print(name):
    """S7"""

    @settings(quick, max_examples=10)
    @given(messages(MESSAGES[name]))
    def check(values: dict[str, Any]) -> None:
        mine = getattr(ours, name).model_validate(values)
        for field in MESSAGES[name].model_fields:
            with pytest.raises(AttributeError):
                setattr(mine, field, None)
            with pytest.raises(AttributeError):
                delattr(mine, field)
        for twin in (
            pickle.loads(pickle.dumps(mine)),
            copy.deepcopy(mine),
            copy.copy(mine),
            mine.model_copy(),
            mine.model_copy(deep=True),
            type(mine).model_validate(mine.model_dump()),
            type(mine).model_validate_json(mine.model_dump_json()),
        ):
            assert twin == mine and type(twin) is type(mine)
        assert mine != "something else"
        assert repr(mine).startswith(type(mine).__name__ + "(")

    check()


def test_long_arrays_print_short():
    tokens = list(range(10_000))
    prompt = ours.ModelInput.from_ints(tokens)
    request = ours.SampleRequest(prompt=prompt, sampling_params=ours.SamplingParams(stop=tokens))
    tensor = ours.TensorData(data=tokens, dtype="int64", shape=[100, 100])
    sequence = ours.SampledSequence("stop", "s", np.arange(10_000, dtype=np.int32))
    datum = ours.Datum(model_input=prompt, loss_fn_inputs={"weights": np.zeros(10_000)})
    output = ours.ForwardBackwardOutput("ArrayRecord", [{"logprobs": tensor}] * 3)
    for value in (prompt, prompt.chunks[0], request, tensor, sequence, datum, output):
        assert len(repr(value)) < 600, type(value)
    assert len(repr(ours.SampleResponse([sequence]))) < 600
