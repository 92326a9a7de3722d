"""`Datum` beside the official class: what becomes of the loss inputs, and provenance."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import tinker.types as official
import torch
from tinker.types.datum import _KEY_TO_TYPE as OFFICIAL_LIST_DTYPES

from tinsmith import types as ours
from tinsmith.errors import ValidationError
from tinsmith.types import Datum, ModelInput, PromptProvenanceSpan, SampledProvenanceSpan
from tinsmith.types.datum import LIST_DTYPES

SPARSE = torch.zeros(6, 8, dtype=torch.int64)
SPARSE[1, 2] = 5

# (key, value): what a user may give, and what both packages make of it.
VALUES: dict[str, tuple[str, Any]] = {
    "integers for an integer key": ("target_tokens", [1, 2, 3]),
    "floats for an integer key": ("target_tokens", [1.0, 2.0]),
    "integers for a float key": ("weights", [0, 1]),
    "floats for a float key": ("advantages", [0.1, -2.5]),
    "a matrix of integers": ("target_tokens", [[1, 2], [3, 4]]),
    "a matrix of floats": ("weights", [[0.5, 1.0]]),
    "an empty list": ("weights", []),
    "an empty list of integers": ("target_tokens", []),
    "a numpy vector of floats": ("target_tokens", np.array([1.5, 2.5])),
    "a numpy vector of integers": ("weights", np.array([1, 2])),
    "numpy under an unknown key": ("anything", np.array([1, 2], dtype=np.int16)),
    "a torch vector": ("logprobs", torch.tensor([0.5, 1.5])),
    "torch bfloat16": ("advantages", torch.tensor([0.5, 1.5], dtype=torch.bfloat16)),
    "torch int32": ("target_tokens", torch.tensor([1, 2], dtype=torch.int32)),
    "torch under an unknown key": ("anything", torch.tensor([1, 2])),
    "a sparse torch matrix": ("target_tokens", SPARSE),
    "sparse torch weights": ("weights", SPARSE.float()),
    "a sparse torch matrix that stays dense": ("logprobs", SPARSE.float()),
    "a full torch matrix": ("weights", torch.ones(3, 2)),
    "a list under an unknown key": ("anything", [1, 2]),
    "a ragged list": ("target_tokens", [[1], [2, 3]]),
    "a ragged list of lists": ("weights", [[1.0], 2.0]),
    "text": ("target_tokens", "abc"),
    "text in a list": ("target_tokens", ["a"]),
    "null": ("weights", None),
    "a number": ("weights", 1.0),
    "numpy booleans": ("weights", np.array([True])),
}


def outcome(types: Any, key: str, value: Any) -> Any:
    try:
        datum = types.Datum(types.ModelInput.from_ints([1]), {key: value})
    except Exception as error:
        return error
    tensor = datum.loss_fn_inputs[key]
    return (
        tensor.dtype,
        tensor.shape,
        tensor.data,
        tensor.sparse_crow_indices,
        tensor.sparse_col_indices,
    )


@pytest.mark.parametrize("name", VALUES)
def test_a_loss_input_becomes_what_the_official_class_makes_of_it(name):
    """S16"""
    expected, actual = outcome(official, *VALUES[name]), outcome(ours, *VALUES[name])
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), actual
    else:
        assert actual == expected


def test_the_dtype_of_a_list_goes_by_its_key():
    """S16"""
    assert LIST_DTYPES == OFFICIAL_LIST_DTYPES
    for key, dtype in LIST_DTYPES.items():
        datum = Datum(model_input=ModelInput.empty(), loss_fn_inputs={key: [1, 2]})
        assert datum.loss_fn_inputs[key].dtype == dtype


def test_a_list_under_an_unknown_key_says_which_keys_are_known():
    """S16"""
    with pytest.raises(KeyError, match=r"'targets'.*target_tokens.*sequence_ratio_mask"):
        Datum(model_input=ModelInput.empty(), loss_fn_inputs={"targets": [1]})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("target_tokens", [1, 2.5], r"loss_fn_inputs\['target_tokens'\].*data\[1\]"),
        ("target_tokens", [2**63], r"does not fit int64"),
        ("weights", [[1.0], [2.0, 3.0]], r"loss_fn_inputs\['weights'\].*rectangular"),
        ("weights", [1.0, None], r"loss_fn_inputs\['weights'\].*data\[1\].*null"),
    ],
)
def test_a_bad_loss_input_is_named(key, value, message):
    """S5, S16"""
    with pytest.raises(ValidationError, match=message):
        Datum(model_input=ModelInput.empty(), loss_fn_inputs={key: value})


def test_a_tensor_is_kept_as_it_is():
    tensor = ours.TensorData([1], "int64", [1])
    datum = Datum(model_input=ModelInput.empty(), loss_fn_inputs={"anything": tensor})
    assert datum.loss_fn_inputs["anything"] is tensor


# --- Provenance -------------------------------------------------------------------------------


def spans(types: Any) -> tuple[list[Any], list[Any]]:
    prompt = types.PromptProvenanceSpan(sequence_id="s", length=1)
    sampled = types.SampledProvenanceSpan(sequence_id="s", offset=1, length=2)
    return [prompt, sampled], [sampled, prompt]


def datum_of(types: Any, targets: Any = (2, 3, 4)) -> Any:
    inputs = {} if targets is None else {"target_tokens": np.array(targets)}
    return types.Datum(types.ModelInput.from_ints([1, 2, 3]), inputs)


SPAN_CASES: dict[str, Any] = {
    "a cover of both": lambda t: datum_of(t).with_provenance(*spans(t)),
    "keywords": lambda t: datum_of(t).with_provenance(
        model_input=spans(t)[0], loss_fn_inputs=spans(t)[1]
    ),
    "no targets to cover": lambda t: datum_of(t, None).with_provenance(spans(t)[0], []),
    "targets of two dimensions": lambda t: datum_of(t, [[1, 2]]).with_provenance(spans(t)[0], []),
    "too short for the input": lambda t: datum_of(t).with_provenance(spans(t)[0][:1], spans(t)[1]),
    "too short for the targets": lambda t: datum_of(t).with_provenance(spans(t)[0], []),
    "something else in the list": lambda t: t.Datum(t.ModelInput.empty(), {}, [1], [2]),
    "a negative length": lambda t: t.PromptProvenanceSpan(sequence_id="s", length=-1),
    "a negative offset": lambda t: t.SampledProvenanceSpan(sequence_id="s", offset=-1, length=1),
    "no sequence": lambda t: t.SampledProvenanceSpan(sequence_id="", length=1),
    "positional arguments": lambda t: t.PromptProvenanceSpan("s", 0, 1),
    "no length": lambda t: t.PromptProvenanceSpan(sequence_id="s"),
}


@pytest.mark.parametrize("name", SPAN_CASES)
def test_provenance_is_checked_like_the_official_class_does(name):
    def run(types: Any) -> Any:
        try:
            datum = SPAN_CASES[name](types)
        except Exception as error:
            return error
        return [
            [(type(s).__name__, s.sequence_id, s.offset, s.length) for s in spans]
            for spans in (datum.model_input_spans, datum.loss_fn_input_spans)
        ]

    expected, actual = run(official), run(ours)
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), actual
    else:
        assert actual == expected


def test_provenance_comes_as_a_pair():
    prompt, _ = spans(ours)
    with pytest.raises(ValidationError, match="both"):
        Datum(ModelInput.empty(), {}, prompt, None)
    with pytest.raises(AssertionError):
        official.Datum(official.ModelInput.empty(), {}, spans(official)[0], None)


def test_with_provenance_names_the_field_and_both_numbers():
    with pytest.raises(ValidationError, match=r"model_input: spans cover 1 .* has 3"):
        datum_of(ours).with_provenance(spans(ours)[0][:1], spans(ours)[1])


def test_with_provenance_leaves_the_original_alone():
    datum = datum_of(ours)
    marked = datum.with_provenance(*spans(ours))
    assert datum.model_input_spans is None
    assert marked.model_input_spans == spans(ours)[0]
    assert isinstance(marked.model_input_spans[0], PromptProvenanceSpan)
    assert isinstance(marked.model_input_spans[1], SampledProvenanceSpan)


def test_datums_are_immutable_and_pickle_copy_compare_and_print():
    """S7"""
    datum = Datum(
        model_input=ModelInput.from_ints(range(5_000)),
        loss_fn_inputs={"weights": [0.5] * 5_000, "target_tokens": SPARSE},
    ).with_provenance([PromptProvenanceSpan(sequence_id="s", length=5_000)], [])
    for twin in (pickle.loads(pickle.dumps(datum)), copy.deepcopy(datum), copy.copy(datum)):
        assert twin == datum
    with pytest.raises(AttributeError):
        datum.model_input = ModelInput.empty()
    assert datum != datum_of(ours)
    assert len(repr(datum)) < 600


def test_the_json_form_of_old_releases_has_no_place_for_provenance():
    with pytest.raises(ValidationError, match="model_input_spans"):
        datum_of(ours).with_provenance(*spans(ours)).to_wire()
    assert Datum.model_validate(datum_of(ours).model_dump()) == datum_of(ours)
    with pytest.raises(ValidationError, match="weights_"):
        Datum.model_validate({"model_input": {"chunks": []}, "weights_": {}})
