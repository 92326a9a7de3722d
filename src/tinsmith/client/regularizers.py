"""Pieces to build a custom loss from: a main loss, and terms that hold the model back.

    loss = Regularized(my_loss, [KLToReference(0.1), Entropy(-0.01)])
    training.forward_backward_custom(data, loss)

Each term reads the log-probabilities of the target tokens, and, where it compares, a reference that
the datum carries under `reference_logprobs`. Its value and the norm of its gradient appear in the
metrics, so that one can see which term pulls how hard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinsmith.client.calls.custom_loss import CustomLossFn, import_torch
from tinsmith.errors import ValidationError
from tinsmith.types import Datum

if TYPE_CHECKING:
    import torch

REFERENCE = "reference_logprobs"


@dataclass(frozen=True)
class Regularizer(ABC):
    """One term: `weight` times the sum of `per_token` over the tokens that count.

    A token counts if the datum has no `weights`, or a weight other than zero there.
    """

    weight: float

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def per_token(self, logprobs: torch.Tensor, datum: Datum, index: int) -> torch.Tensor:
        """The term at each token, same shape as `logprobs`."""


@dataclass(frozen=True)
class L2ToReference(Regularizer):
    """The squared distance of the log-probabilities from the reference's."""

    name = "l2"

    def per_token(self, logprobs: torch.Tensor, datum: Datum, index: int) -> torch.Tensor:
        return (logprobs - _reference(datum, index, logprobs)) ** 2


@dataclass(frozen=True)
class KLToReference(Regularizer):
    """An estimate of the divergence from the reference, from the sampled tokens alone.

    With r the log-ratio reference / model: exp(r) - 1 - r, which is never negative and whose mean
    over tokens that the model sampled is the divergence.
    """

    name = "kl"

    def per_token(self, logprobs: torch.Tensor, datum: Datum, index: int) -> torch.Tensor:
        ratio = _reference(datum, index, logprobs) - logprobs
        return ratio.exp() - 1.0 - ratio


@dataclass(frozen=True)
class Entropy(Regularizer):
    """An estimate of the entropy from the sampled tokens: minus their log-probabilities.

    A negative weight rewards a spread-out model, a positive one a decided model.
    """

    name = "entropy"

    def per_token(self, logprobs: torch.Tensor, datum: Datum, index: int) -> torch.Tensor:
        return -logprobs


@dataclass(frozen=True)
class Consistency(Regularizer):
    """How uneven the log-probabilities of a datum are: their squared distance from its mean."""

    name = "consistency"

    def per_token(self, logprobs: torch.Tensor, datum: Datum, index: int) -> torch.Tensor:
        return (logprobs - logprobs.mean()) ** 2


@dataclass(frozen=True)
class Regularized:
    """A custom loss with terms; itself a custom loss."""

    main: CustomLossFn
    terms: Sequence[Regularizer]

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if len(set(names)) != len(names):
            raise ValidationError(f"each kind of term can be used once, got {names}", "terms")

    def __call__(self, data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        torch = import_torch("use a regularizer")
        loss, metrics = self.main(data, logprobs)
        metrics = dict(metrics)
        for term in self.terms:
            value = torch.zeros(())
            for index, (datum, values) in enumerate(zip(data, logprobs, strict=True)):
                value = (
                    value + (term.per_token(values, datum, index) * _counts(datum, values)).sum()
                )
            value = term.weight * value
            gradients = torch.autograd.grad(value, logprobs, retain_graph=True, allow_unused=True)
            norm = sum(float((g**2).sum()) for g in gradients if g is not None) ** 0.5
            metrics[f"regularizer/{term.name}:sum"] = float(value.detach())
            metrics[f"regularizer/{term.name}_grad_norm:sum"] = norm
            loss = loss + value
        return loss, metrics


def _reference(datum: Datum, index: int, logprobs: torch.Tensor) -> torch.Tensor:
    tensor = datum.loss_fn_inputs.get(REFERENCE)
    path = f"data[{index}].loss_fn_inputs[{REFERENCE!r}]"
    if tensor is None:
        raise ValidationError("this term compares with a reference; give one", path)
    values = tensor.to_torch()
    if values.shape != logprobs.shape:
        raise ValidationError(
            f"has shape {tuple(values.shape)}, the logprobs {tuple(logprobs.shape)}", path
        )
    return values


def _counts(datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        return logprobs.new_ones(logprobs.shape)
    return (weights.to_torch() != 0).to(logprobs.dtype)
