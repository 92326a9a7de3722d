"""What docs/differences.md says about the types, entry by entry."""

import pytest
import tinker
import torch

import tinsmith
from tinsmith.errors import ValidationError
from tinsmith.types import RequestErrorCategory, SamplingParams, TensorData


def test_numbers_in_quotes_are_refused() -> None:
    """S115"""
    assert tinker.SamplingParams(max_tokens="5").max_tokens == 5  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="max_tokens: expected an integer, got str"):
        SamplingParams(max_tokens="5")  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [1.0, True])
def test_what_is_almost_a_whole_number_is_refused(token: float) -> None:
    assert tinker.ModelInput.from_ints([token]).to_ints() == [1]  # type: ignore[list-item]
    with pytest.raises(ValidationError, match="tokens"):
        tinsmith.ModelInput.from_ints([token])  # type: ignore[list-item]
    assert tinker.TensorData(data=[1.5], dtype="int64").data == [1]
    with pytest.raises(ValidationError, match="data"):
        TensorData(data=[1.5], dtype="int64")


def test_the_validation_error_is_ours_and_names_the_field() -> None:
    with pytest.raises(ValidationError) as caught:
        tinsmith.LoraConfig(rank="x")  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, tinsmith.TinkerError)
    assert caught.value.path == "rank"


def test_model_copy_checks_its_update() -> None:
    with pytest.raises(ValidationError, match="rank"):
        tinsmith.LoraConfig(rank=8).model_copy(update={"rank": "many"})


@pytest.mark.parametrize("word", ["user", "User", "USER"])
def test_failure_categories_are_read_in_any_case(word: str) -> None:
    """S19"""
    assert RequestErrorCategory(word) is RequestErrorCategory.User


def test_unknown_failure_categories_read_as_unknown() -> None:
    """S19"""
    assert RequestErrorCategory("transient") is RequestErrorCategory.Unknown


def test_category_words_are_the_official_ones() -> None:
    """S20"""
    official = {member.name: member.value for member in tinker.types.RequestErrorCategory}
    assert {member.name: member.value for member in RequestErrorCategory} == official


def test_boolean_tensors_are_refused_by_name() -> None:
    """S5"""
    with pytest.raises(ValidationError, match=r"torch\.bool"):
        TensorData.from_torch(torch.ones(2, dtype=torch.bool))
