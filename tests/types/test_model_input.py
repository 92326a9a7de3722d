"""`ModelInput` and its chunks beside the official ones."""

from __future__ import annotations

import base64
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
import tinker.types as official

from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput
from tinsmith.wire import json

AUDIO = bytes([254, 3, 2, 0x96, 0x01, 0x05]) + b"payload"  # constant, dtype 3, shape (150, 5)


def text(types: Any) -> Any:
    return types.EncodedTextChunk(tokens=[1, 2, 3])


def image(types: Any) -> Any:
    return types.ImageChunk(data=b"\x89PNG\xff\x00", format="png", expected_tokens=7)


def pointer(types: Any) -> Any:
    return types.ImageAssetPointerChunk(format="jpeg", location="asset://1", expected_tokens=4)


def audio(types: Any) -> Any:
    return types.DmelChunk(dmel=AUDIO)


CASES: dict[str, Callable[[Any], Any]] = {
    "from_ints": lambda t: t.ModelInput.from_ints([1, 2, 3]),
    "from_ints of nothing": lambda t: t.ModelInput.from_ints([]),
    "keyword from_ints": lambda t: t.ModelInput.from_ints(tokens=[5]),
    "empty": lambda t: t.ModelInput.empty(),
    "append_int": lambda t: t.ModelInput.from_ints([1]).append_int(2).append_int(3),
    "append": lambda t: t.ModelInput.empty().append(text(t)).append(image(t)),
    "from chunks": lambda t: t.ModelInput(chunks=[text(t), image(t), pointer(t), audio(t)]),
    "an image of unknown length": lambda t: t.ModelInput(
        chunks=[t.ImageChunk(data=b"x", format="png")]
    ),
    "audio cut short": lambda t: t.ModelInput(chunks=[t.DmelChunk(dmel=AUDIO[:3])]),
    "audio without dimensions": lambda t: t.ModelInput(chunks=[t.DmelChunk(dmel=b"\x01\x00")]),
    "empty audio": lambda t: t.ModelInput(chunks=[t.DmelChunk(dmel=b"")]),
    "audio of an unknown dtype": lambda t: t.ModelInput(chunks=[t.DmelChunk(dmel=b"\x09\x01")]),
    "audio with an endless number": lambda t: t.ModelInput(
        chunks=[t.DmelChunk(dmel=b"\x01" + b"\xff" * 12)]
    ),
    # Errors of construction.
    "text in place of tokens": lambda t: t.ModelInput.from_ints("abc"),
    "fractions as tokens": lambda t: t.ModelInput.from_ints([1.5]),
    "null as a token": lambda t: t.ModelInput.from_ints([1, None]),
    "an unknown image format": lambda t: t.ImageChunk(data=b"x", format="gif"),
    "another chunk's type": lambda t: t.EncodedTextChunk(tokens=[], type="image"),
    "an unknown field": lambda t: t.EncodedTextChunk(tokens=[], colour="red"),
    "positional chunks": lambda t: t.ModelInput([]),
}


def seen(function: Callable[[], Any]) -> Any:
    """A value, or the kind of error a user would catch."""
    try:
        return function()
    except TypeError:
        return TypeError
    except ValueError:
        return ValueError


def outcome(case: Callable[[Any], Any], types: Any) -> Any:
    value = seen(lambda: case(types))
    if not isinstance(value, types.ModelInput):
        return value if value in (TypeError, ValueError) else type(value).__name__
    return {
        "chunks": [type(chunk).__name__ for chunk in value.chunks],
        "lengths": [seen(lambda chunk=chunk: chunk.length) for chunk in value.chunks],
        "length": seen(lambda: value.length),
        "ints": seen(value.to_ints),
        "json": orjson.loads(value.model_dump_json()),
        "dump": value.model_dump(mode="json"),
    }


@pytest.mark.parametrize("name", CASES)
def test_the_same_input_gives_the_same_prompt_or_kind_of_error(name):
    """S10, S94"""
    expected, actual = outcome(CASES[name], official), outcome(CASES[name], ours)
    # An unknown or misplaced argument is a ValueError to pydantic and may be a TypeError to us.
    errors = (TypeError, ValueError)
    assert actual == expected or (actual in errors and expected in errors)


def test_chunk_tags_are_written_verbatim():
    """S10"""
    prompt = ModelInput(chunks=[text(ours), image(ours), pointer(ours), audio(ours)])
    tags = [chunk["type"] for chunk in orjson.loads(json.encode(prompt))["chunks"]]
    assert tags == ["encoded_text", "image", "image_asset_pointer", "dmel"]


def test_a_mixed_prompt_comes_back_with_its_classes():
    """S11, S25, S94: image bytes travel as base64 in JSON."""
    prompt = ModelInput(chunks=[text(ours), image(ours), pointer(ours), audio(ours)])
    body = json.encode(prompt)
    assert base64.b64encode(b"\x89PNG\xff\x00") in body
    back = ModelInput.model_validate(json.parse(body))
    assert back == prompt
    assert [type(a) for a in back.chunks] == [type(b) for b in prompt.chunks]
    assert official.ModelInput.model_validate_json(body).length == prompt.length == 164


def test_an_unknown_chunk_tag_is_an_error_that_names_it():
    """S11"""
    with pytest.raises(ValidationError, match=r"chunks\[1\]\.type.*'video'.*encoded_text"):
        ModelInput.model_validate({"chunks": [{"tokens": [1]}, {"type": "video", "data": ""}]})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"tokens": [1]}, "encoded_text"),
        ({"data": "aGk=", "format": "png"}, "image"),
        ({"location": "a", "format": "png"}, "image_asset_pointer"),
        ({"dmel": "AQA="}, "dmel"),
    ],
)
def test_a_chunk_without_a_tag_is_known_by_its_fields(fields, kind):
    """S11: clients before 0.18.0 sent no tags."""
    [chunk] = ModelInput.model_validate({"chunks": [fields]}).chunks
    assert chunk.type == kind
    with pytest.raises(ValidationError, match=r"chunks\[0\]\.type"):
        ModelInput.model_validate({"chunks": [{}]})


def test_tokens_may_be_any_integer_array():
    for dtype in (np.int64, np.int32, np.uint16):
        tokens = np.array([1, 2, 3], dtype=dtype)
        assert ModelInput.from_ints(tokens).to_ints() == [1, 2, 3]
    assert ModelInput.from_ints((1, 2)).to_ints() == [1, 2]
    assert ModelInput.from_ints(range(3)).to_ints() == [0, 1, 2]
    with pytest.raises(ValidationError, match="float64"):
        ModelInput.from_ints(np.array([1.0]))
    with pytest.raises(ValidationError, match="flat"):
        ModelInput.from_ints(np.array([[1], [2]]))


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**70])
def test_a_token_that_does_not_fit_is_named(token):
    """S5"""
    with pytest.raises(ValidationError, match=rf"tokens\[1\]: {token} does not fit int32"):
        EncodedTextChunk(tokens=[0, token])
    with pytest.raises(ValidationError, match="int32"):
        EncodedTextChunk(tokens=np.array([0, token]) if abs(token) < 2**63 else [0, token])


def test_prompts_are_immutable_and_pickle_copy_and_compare():
    """S7"""
    prompt = ModelInput(chunks=[text(ours), image(ours), pointer(ours), audio(ours)])
    for twin in (
        pickle.loads(pickle.dumps(prompt)),
        copy.deepcopy(prompt),
        copy.copy(prompt),
        prompt.model_copy(),
        prompt.model_copy(deep=True),
        ModelInput.model_validate(prompt.model_dump()),
        ModelInput.model_validate_json(prompt.model_dump_json()),
    ):
        assert twin == prompt
    for thing, name in [(prompt, "chunks"), *((chunk, "type") for chunk in prompt.chunks)]:
        with pytest.raises(AttributeError):
            setattr(thing, name, None)
    assert prompt != ModelInput.from_ints([1, 2, 3])
    assert prompt.model_copy(update={"chunks": []}) == ModelInput.empty()


def test_appending_leaves_the_original_alone():
    prompt = ModelInput.from_ints([1])
    prompt.append_int(2)
    assert prompt.to_ints() == [1]


def test_image_bytes_round_trip_through_both_packages():
    """S25"""
    data = bytes(range(256))
    mine = ImageChunk(data=data, format="jpeg", expected_tokens=None)
    theirs = official.ImageChunk.model_validate_json(json.encode(mine))
    assert theirs.data == data
    assert json.decode(ImageChunk, theirs.model_dump_json().encode()) == mine
