"""The methods users know from pydantic, beside the official messages' own."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
import tinker.types as official

from tinsmith import types as ours
from tinsmith.errors import ValidationError

VALUES: dict[str, dict[str, Any]] = {
    "AdamParams": {"learning_rate": 0.5},
    "LoraConfig": {"rank": 8, "seed": None, "train_mlp": False},
    "CreateModelRequest": {
        "session_id": "s",
        "model_seq_id": 1,
        "base_model": "b",
        "lora_config": {"rank": 8},
        "user_metadata": {"a": None},
    },
    "SampleRequest": {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"stop": ["x"]},
        "target_prompt_logprobs": {"data": [1], "dtype": "int64"},
    },
    "OptimStepRequest": {"adam_params": {"beta1": 0.5}, "model_id": "m"},
    "SessionSearchRequest": {"owner": {"type": "user", "owner_urns": ["u"]}},
    "TrainingRunsResponse": {
        "training_runs": [
            {
                "training_run_id": "r",
                "base_model": "b",
                "model_owner": "o",
                "is_lora": True,
                "last_request_time": datetime(2026, 1, 1, tzinfo=UTC),
            }
        ],
        "cursor": {"offset": 0, "limit": 1, "total_count": 1},
    },
    "RequestFailedResponse": {"error": "no", "category": "user"},
    "WeightsInfoResponse": {"base_model": "b", "is_lora": False},
    "EncodedTextChunk": {"tokens": [1, 2]},
    "ModelInput": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "json"},
    {"exclude_none": True},
    {"mode": "json", "exclude_none": True},
    {"exclude_defaults": True},
    {"include": {"base_model", "rank", "error", "cursor", "prompt", "tokens"}},
    {"exclude": {"type", "prompt", "error", "chunks"}},
]


def both(name: str) -> tuple[Any, Any]:
    values = VALUES[name]
    return getattr(ours, name).model_validate(values), getattr(official, name).model_validate(
        values
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("name", VALUES)
def test_model_dump_gives_what_the_official_message_gives(name, options):
    mine, theirs = both(name)
    assert mine.model_dump(**options) == theirs.model_dump(**options)


@pytest.mark.parametrize("options", [{}, {"exclude_none": True}, {"indent": 2}], ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_model_dump_json_gives_what_the_official_message_gives(name, options):
    mine, theirs = both(name)
    text = mine.model_dump_json(**options)
    assert orjson.loads(text) == orjson.loads(theirs.model_dump_json(**options))
    assert ("\n" in text) == ("indent" in options)


@pytest.mark.parametrize("name", VALUES)
def test_model_validate_takes_mappings_instances_and_json(name):
    mine, theirs = both(name)
    cls = type(mine)
    assert cls.model_validate(mine) is mine
    assert cls.model_validate_json(theirs.model_dump_json()) == mine
    assert cls.model_validate_json(theirs.model_dump_json().encode()) == mine
    with pytest.raises(ValidationError):
        cls.model_validate([1])


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"EncodedTextChunk", "ModelInput"}))
def test_model_fields_are_the_official_ones(name):
    mine, theirs = both(name)
    assert set(type(mine).model_fields) == set(type(theirs).model_fields)


def test_model_copy_replaces_and_checks():
    lora = ours.LoraConfig(rank=8)
    assert lora.model_copy(update={"rank": 16}) == ours.LoraConfig(rank=16)
    assert lora.rank == 8
    with pytest.raises(ValidationError, match="rang"):
        lora.model_copy(update={"rang": 16})


def test_a_deep_copy_shares_nothing_that_can_change():
    session = ours.CreateSessionRequest(tags=["a"], user_metadata={"k": []}, sdk_version="1")
    deep = session.model_copy(deep=True)
    deep.user_metadata["k"].append(1)
    deep.tags.append("b")
    assert session.user_metadata == {"k": []} and session.tags == ["a"]
    other = copy.deepcopy(session)
    other.tags.append("c")
    assert session.tags == ["a"]


def test_a_mutable_default_is_not_shared_between_messages():
    first = ours.FuturesRetrieveRequest(target={"sampling_session_id": "s"})
    first.retrieved_request_ids.append("r")
    second = ours.FuturesRetrieveRequest(target={"sampling_session_id": "s"})
    assert second.retrieved_request_ids == []


def test_equal_messages_have_equal_hashes_where_their_contents_do():
    assert hash(ours.LoraConfig(rank=8)) == hash(ours.LoraConfig(rank=8))
    assert len({ours.AdamParams(), ours.AdamParams(), ours.AdamParams(eps=1)}) == 2


def test_messages_of_different_classes_are_not_equal():
    assert ours.OwnSearchOwner() != ours.AccessibleSearchOwner()
    assert ours.CopyWeightsResponse(tinker_path="a") != ours.WeightsInfoRequest(tinker_path="a")


def test_arguments_are_by_keyword_only():
    for types in (ours, official):
        with pytest.raises(TypeError):
            types.LoraConfig(8)


def test_paths_of_checkpoints_are_parsed_like_the_official_ones():
    for path in (
        "tinker://run/weights/a",
        "tinker://s:train:0/sampler_weights/a-b",
        "tinker://r/external_weights/x",
        "tinker://run/weights/a/b",
        "tinker://run/weights",
        "tinker://run/other/a",
        "http://run/weights/a",
        "",
    ):
        try:
            expected: Any = official.ParsedCheckpointTinkerPath.from_tinker_path(path).model_dump()
        except ValueError:
            with pytest.raises(ValueError, match="tinker"):
                ours.ParsedCheckpointTinkerPath.from_tinker_path(path)
        else:
            mine = ours.ParsedCheckpointTinkerPath.from_tinker_path(path)
            assert mine.model_dump() == expected


def test_links_to_the_console_are_the_official_ones():
    for name in ("SaveWeightsResponse", "SaveWeightsForSamplerResponse"):
        path = "tinker://s:train:0/weights/step 1"
        mine, theirs = (getattr(types, name)(path=path) for types in (ours, official))
        assert mine.get_console_url() == theirs.get_console_url()
        if hasattr(theirs, "get_playground_url"):
            assert mine.get_playground_url() == theirs.get_playground_url()


# --- Complaints -------------------------------------------------------------------------------


def test_a_complaint_says_where_what_and_what_to_do():
    with pytest.raises(ValidationError) as caught:
        ours.CreateModelRequest(
            session_id="s", model_seq_id=0, base_model="b", lora_config={"rank": "8"}
        )
    assert caught.value.path == "lora_config.rank"
    assert caught.value.problem == "expected an integer, got str"
    assert str(caught.value) == "lora_config.rank: expected an integer, got str"


def test_a_complaint_keeps_its_parts_through_pickle():
    error = ValidationError("too long", "a[0]").under("b")
    assert error.path == "b.a[0]"
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.problem, twin.path, str(twin)) == (error.problem, error.path, str(error))


def test_a_complaint_does_not_repeat_a_huge_value():
    with pytest.raises(ValidationError) as caught:
        ours.CreateModelRequest.model_validate({"x" * 10_000: 1, "y" * 10_000: 2})
    assert len(str(caught.value)) < 300
    with pytest.raises(ValidationError) as caught:
        ours.TryAgainResponse(request_id="r", queue_state="z" * 10_000)
    assert len(str(caught.value)) < 300
    with pytest.raises(ValidationError) as caught:
        ours.TensorData([1], "int64", [1] * 10_000)
    assert len(str(caught.value)) < 300
