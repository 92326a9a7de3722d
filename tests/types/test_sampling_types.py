"""What sampling takes and gives, beside the official types."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import tinker.types as official
from tinker.types.topk_logprobs import TopkLogprobs as OfficialTopk
from tinker.types.topk_logprobs import topk_to_lists

from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types import AdamParams, SampledSequence, SampleResponse, SamplingParams, TopkLogprobs

EMPTY = (0, -99999.0)
TOPK_ROWS: dict[str, list[list[tuple[int, float]]]] = {
    "full": [[(1, -0.5), (2, -1.5)], [(3, -0.25), (0, -2.0)]],
    "trailing empty cells": [[(1, -0.5), EMPTY], [(0, -0.5), EMPTY]],
    "an empty row": [[EMPTY, EMPTY], [(1, -0.5), (2, -1.0)]],
    "an empty first cell": [[EMPTY, (4, -1.0)]],
    "a hole": [[(1, -0.5), EMPTY, (2, -1.0)], [(1, -1.0), (2, -2.0), EMPTY]],
    "token zero": [[(0, -0.5), (0, -99998.0)]],
    "only empty": [[EMPTY], [EMPTY]],
    "k of one": [[(7, -0.5)], [EMPTY], [(8, -1.0)]],
}


def matrices(rows: list[list[tuple[int, float]]]) -> dict[str, np.ndarray]:
    return {
        "token_ids": np.array([[token for token, _ in row] for row in rows], dtype=np.int32),
        "logprobs": np.array([[value for _, value in row] for row in rows], dtype=np.float32),
    }


@pytest.mark.parametrize("name", TOPK_ROWS)
def test_topk_lists_are_the_official_ones(name):
    arrays = matrices(TOPK_ROWS[name])
    mine, theirs = TopkLogprobs(**arrays), OfficialTopk(**arrays)
    assert mine.to_lists() == topk_to_lists(theirs)
    assert ours.SampledSequence("stop", "s", topk_logprobs_np=mine).topk_logprobs == (
        official.SampledSequence("stop", "s", topk_logprobs_np=theirs).topk_logprobs
    )


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_topk_without_cells_is_an_empty_list(shape):
    arrays = {"token_ids": np.zeros(shape, np.int32), "logprobs": np.zeros(shape, np.float32)}
    assert TopkLogprobs(**arrays).to_lists() == topk_to_lists(OfficialTopk(**arrays)) == []


def test_topk_lists_become_the_matrices_they_came_from():
    rows = [None, [(1, -0.5), (2, -1.0)], [(3, -0.25)]]
    topk = TopkLogprobs.from_lists(rows)
    assert topk.to_lists() == rows
    assert topk.token_ids.dtype == np.int32 and topk.logprobs.dtype == np.float32


NAN = float("nan")
RESPONSES: dict[str, dict[str, Any]] = {
    "nothing but a sequence": {},
    "prompt logprobs": {"prompt_logprobs_np": np.array([NAN, -0.5, -1.25], np.float32)},
    "no number at the end either": {"prompt_logprobs_np": np.array([NAN, -0.5, NAN], np.float32)},
    "an empty prompt": {"prompt_logprobs_np": np.array([], np.float32)},
    "infinitely unlikely": {"prompt_logprobs_np": np.array([NAN, -np.inf], np.float32)},
    "prompt logprobs as a list": {"_prompt_logprobs_list": [None, -0.5]},
    "top-k as a list": {"_topk_prompt_logprobs_list": [None, [(1, -0.5)]]},
    "cache hits": {"prompt_cache_hit_tokens": 12},
}
SEQUENCES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "arrays": {"tokens_np": np.array([1, 2], np.int32), "logprobs_np": np.array([-1, -2], "f4")},
    "lists": {"_tokens_list": [1, 2], "_logprobs_list": [-0.5, -1.5]},
    "tokens only": {"tokens_np": np.array([3], np.int32)},
    "top-k as a list": {"_topk_logprobs_list": [[(1, -0.5)], None]},
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_shows_what_the_official_one_shows(name):
    """S6"""
    mine = SampledSequence("length", "id-1", **SEQUENCES[name])
    theirs = official.SampledSequence("length", "id-1", **SEQUENCES[name])
    for view in ("stop_reason", "sequence_id", "tokens", "logprobs", "topk_logprobs"):
        assert getattr(mine, view) == getattr(theirs, view), view
        assert getattr(mine, view) is getattr(mine, view), "converted once"


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_shows_what_the_official_one_shows(name):
    mine = SampleResponse([SampledSequence("stop", "s")], **RESPONSES[name])
    theirs = official.SampleResponse([official.SampledSequence("stop", "s")], **RESPONSES[name])
    for view in (
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "prompt_cache_hit_tokens",
        "target_prompt_logprobs",
        "prompt_alt_tokens",
    ):
        assert getattr(mine, view) == getattr(theirs, view), view


def full_response() -> SampleResponse:
    topk = TopkLogprobs(**matrices(TOPK_ROWS["full"]))
    tokens = ours.TensorData([1, 2], "int64", [2, 1])
    logprobs = ours.TensorData([-1.0, -2.0], "float32", [2, 1])
    return SampleResponse(
        sequences=[
            SampledSequence(
                "stop", "s:0", np.array([1, 2], np.int32), np.array([-1, -2], np.float32), topk
            )
        ],
        prompt_logprobs_np=np.array([NAN, -0.5, -1.0], np.float32),
        topk_prompt_logprobs_np=topk,
        target_prompt_logprobs=logprobs,
        prompt_cache_hit_tokens=3,
        prompt_alt_tokens=ours.PromptAltTokens(tokens, logprobs),
    )


def test_results_are_immutable_and_pickle_copy_compare_and_print():
    """S7"""
    response = full_response()
    for twin in (
        pickle.loads(pickle.dumps(response)),
        copy.deepcopy(response),
        copy.copy(response),
        full_response(),
    ):
        assert twin == response
        assert twin.topk_prompt_logprobs == response.topk_prompt_logprobs
    for thing, name in (
        (response, "sequences"),
        (response.sequences[0], "stop_reason"),
        (response.topk_prompt_logprobs_np, "token_ids"),
        (response.prompt_alt_tokens, "tokens"),
    ):
        with pytest.raises(AttributeError):
            setattr(thing, name, None)
    assert response != SampleResponse([])
    assert len(repr(response)) < 600


@pytest.mark.parametrize("view", ["logprobs_np", "_logprobs_list"])
def test_sequences_that_differ_in_one_number_are_not_equal(view):
    first = SampledSequence("stop", "s", **{view: np.array([-0.5], np.float32)[:1]})
    second = SampledSequence("stop", "s", **{view: np.array([-0.75], np.float32)[:1]})
    assert first != second and first == copy.deepcopy(first)


def test_a_list_built_result_equals_the_array_built_one():
    """Both forms show the same numbers to a user, so they are the same result."""
    arrays = SampledSequence("stop", "s", np.array([1], np.int32), np.array([-0.5], np.float32))
    assert arrays == SampledSequence("stop", "s", _tokens_list=[1], _logprobs_list=[-0.5])


@pytest.mark.parametrize("reason", ["eos", "STOP", None, 1, ""])
def test_only_two_stop_reasons_are_read_from_json(reason):
    """S6"""
    with pytest.raises(ValidationError, match=r"sequences\[0\].*stop"):
        SampleResponse.model_validate({"sequences": [{"stop_reason": reason, "tokens": [1]}]})


def test_the_empty_stop_list_is_not_the_absent_one():
    """Absent: the model's own end of sequence; empty: nothing stops but max_tokens."""
    assert SamplingParams(stop=[]).stop == official.SamplingParams(stop=[]).stop == []
    assert SamplingParams().stop is official.SamplingParams().stop is None
    assert SamplingParams(stop=[]).to_wire()["stop"] == []
    assert "stop" not in SamplingParams().to_wire()


@pytest.mark.parametrize("stop", ["\n", ["a", "b"], [1, 2], (3, 4), np.array([5, 6])])
def test_stop_takes_text_texts_or_token_ids(stop):
    mine = SamplingParams(stop=stop).model_dump(mode="json")["stop"]
    plain = stop.tolist() if isinstance(stop, np.ndarray) else stop
    assert mine == official.SamplingParams(stop=plain).model_dump(mode="json")["stop"]


@pytest.mark.parametrize("stop", [5, [1.5], [None], ["a", 1], {"a": 1}, True])
def test_stop_refuses_anything_else(stop):
    with pytest.raises(ValidationError, match="stop"):
        SamplingParams(stop=stop)


def test_adam_has_the_service_defaults_and_no_epsilon():
    """S4"""
    params = AdamParams()
    assert (params.learning_rate, params.beta1, params.beta2, params.eps) == (
        1e-4,
        0.9,
        0.95,
        1e-12,
    )
    assert (params.weight_decay, params.grad_clip_norm) == (0.0, 0.0)
    with pytest.raises(ValidationError, match=r"epsilon.*did you mean 'eps'"):
        AdamParams(epsilon=1e-8)


def test_an_unknown_loss_is_refused_before_anything_is_sent():
    """S17"""
    with pytest.raises(ValidationError, match=r"loss_fn.*cross_entropy.*'tinker.losses.dpo'"):
        ours.ForwardBackwardInput([], "tinker.losses.dpo")
