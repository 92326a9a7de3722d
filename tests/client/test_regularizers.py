"""Regularizers: values and gradients against the formulas written out."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tinsmith.client.regularizers import (  # noqa: E402
    Consistency,
    Entropy,
    KLToReference,
    L2ToReference,
    Regularized,
)
from tinsmith.errors import ValidationError  # noqa: E402
from tinsmith.types import Datum, ModelInput, TensorData  # noqa: E402

LOGPROBS = [-1.0, -2.0, -0.5]
REFERENCE = [-1.5, -1.0, -0.5]
COUNTED = [0, 1]


def datum(*, reference: list[float] | None = REFERENCE) -> Datum:
    inputs: dict[str, Any] = {"target_tokens": [1, 2, 3], "weights": [1.0, 0.5, 0.0]}
    if reference is not None:
        inputs["reference_logprobs"] = TensorData.from_torch(torch.tensor(reference))
    return Datum(ModelInput.from_ints([1, 2, 3]), inputs)


def no_loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return sum((lp * 0).sum() for lp in logprobs), {"main": 1.0}


MEAN = sum(LOGPROBS) / 3
EXPECTED = [
    (L2ToReference(2.0), 2 * sum((LOGPROBS[i] - REFERENCE[i]) ** 2 for i in COUNTED)),
    (
        KLToReference(1.0),
        sum(
            torch.tensor(REFERENCE[i] - LOGPROBS[i]).exp().item() - 1 - REFERENCE[i] + LOGPROBS[i]
            for i in COUNTED
        ),
    ),
    (Entropy(-0.1), 0.1 * sum(LOGPROBS[i] for i in COUNTED)),
    (Consistency(1.0), sum((LOGPROBS[i] - MEAN) ** 2 for i in COUNTED)),
]


@pytest.mark.parametrize(("term", "expected"), EXPECTED)
def test_each_term_has_its_value_and_gradient(term: Any, expected: float) -> None:
    values = torch.tensor(LOGPROBS, requires_grad=True)
    loss, metrics = Regularized(no_loss, [term])([datum()], [values])
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics[f"regularizer/{term.name}:sum"] == pytest.approx(expected, abs=1e-6)
    loss.backward()
    norm = metrics[f"regularizer/{term.name}_grad_norm:sum"]
    assert norm == pytest.approx(values.grad.norm().item(), abs=1e-6) and metrics["main"] == 1.0


def test_terms_add_up() -> None:
    terms = [term for term, _ in EXPECTED]
    values = torch.tensor(LOGPROBS, requires_grad=True)
    loss, _ = Regularized(no_loss, terms)([datum()], [values])
    assert loss.item() == pytest.approx(sum(value for _, value in EXPECTED), abs=1e-5)


def test_the_divergence_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    for shift, is_zero in ((0.0, True), (0.3, False), (-0.3, False)):
        values = (torch.tensor(REFERENCE) + shift).requires_grad_(True)
        loss, _ = Regularized(no_loss, [KLToReference(1.0)])([datum()], [values])
        assert (abs(loss.item()) < 1e-6) == is_zero and loss.item() > -1e-6


def test_what_is_missing_is_named() -> None:
    values = torch.tensor(LOGPROBS, requires_grad=True)
    with pytest.raises(ValidationError, match=r"data\[0\].*reference_logprobs"):
        Regularized(no_loss, [L2ToReference(1.0)])([datum(reference=None)], [values])
    with pytest.raises(ValidationError, match="shape"):
        Regularized(no_loss, [L2ToReference(1.0)])([datum(reference=[1.0])], [values])
    with pytest.raises(ValidationError, match="once"):
        Regularized(no_loss, [Entropy(1.0), Entropy(2.0)])


def test_as_a_custom_loss_of_a_client(stub: Any, service: Any) -> None:
    training = service.create_lora_training_client("m")
    loss = Regularized(no_loss, [Entropy(1.0)])
    result = training.forward_backward_custom([datum()], loss).result(10)
    assert result.metrics["regularizer/entropy:sum"] == 2.0
    sent = stub.passes[1].forward_backward_input.data[0].loss_fn_inputs["weights"].tolist()
    assert sent == [1.0, 1.0, 0.0]
