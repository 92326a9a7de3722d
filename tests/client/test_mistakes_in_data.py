"""What is given in place of data is named; before, it was an AttributeError somewhere below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import ValidationError
from tinsmith.types import Datum, ModelInput, TensorData

DATUM = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [1]})


@pytest.fixture
def training(stub: Any, make_service: Callable[..., ServiceClient]) -> TrainingClient:
    return make_service().create_lora_training_client("m", rank=4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DATUM, r"data: expected a list of datums, got one datum; write \[datum\]"),
        ([DATUM, DATUM.model_dump()], r"data\[1\]: expected a Datum, got dict; make one"),
        ({"model_input": [1]}, "data: expected a list of datums, got dict"),
        ([[1, 2]], r"data\[0\]: expected a Datum, got list"),
        ("text", "data: expected a list of datums, got str"),
        (3, "data: expected a list of datums, got int"),
    ],
    ids=str,
)
def test_what_is_no_datum_is_named(training: TrainingClient, data: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        training.forward_backward(data, "cross_entropy")
    with pytest.raises(ValidationError, match=message):
        training.forward_backward_custom(data, lambda data, logprobs: (logprobs[0].sum(), {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelInput.from_ints([True, False]),
        lambda: TensorData(data=[True, False], dtype="int64"),
        lambda: Datum(
            model_input=ModelInput.from_ints([1, 2]),
            loss_fn_inputs={"target_tokens": [True, False]},
        ),
    ],
)
def test_booleans_are_no_tokens(make: Callable[[], object]) -> None:
    """They passed for 1 and 0."""
    with pytest.raises(ValidationError, match="expected integers, got booleans"):
        make()


def test_booleans_are_weights() -> None:
    """As with the official package: a mask as a list is what it looks like."""
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"weights": [True, False]}
    )
    assert datum.loss_fn_inputs["weights"].tolist() == [1.0, 0.0]


def test_an_array_of_booleans_is_refused_with_the_cure() -> None:
    with pytest.raises(ValidationError, match=r"astype\('float32'\)"):
        Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"weights": np.array([True])})
