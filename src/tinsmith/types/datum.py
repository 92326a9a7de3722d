"""`Datum`: one training example, and where its tokens came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from tinsmith.errors import ValidationError
from tinsmith.types import notebook
from tinsmith.types.arrays import TensorDtype
from tinsmith.types.convert import kind_of
from tinsmith.types.inputs import ModelInput
from tinsmith.types.tensors import TensorData, is_torch_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    _Tensor: TypeAlias = TensorData | Sequence[Any] | npt.NDArray[Any] | torch.Tensor
else:
    _Tensor = TensorData  # what is kept; at run time torch need not be installed

LossFnInputs = dict[str, TensorData]
LossFnOutput = dict[str, TensorData]

# A bare list says nothing about its dtype; the name of the input does.
LIST_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
_SPARSE_KEYS = frozenset({"target_tokens", "weights"})


@dataclass(frozen=True, kw_only=True)
class _Span:
    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        if not self.sequence_id:
            raise ValidationError("must not be empty", "sequence_id")
        for name in ("offset", "length"):
            if getattr(self, name) < 0:
                raise ValidationError(f"must be at least 0, got {getattr(self, name)}", name)


@dataclass(frozen=True, kw_only=True)
class PromptProvenanceSpan(_Span):
    """A run of tokens from the prompt of the sampling request that made `sequence_id`."""


@dataclass(frozen=True, kw_only=True)
class SampledProvenanceSpan(_Span):
    """A run of tokens that the sampled sequence named by `sequence_id` produced."""


ProvenanceSpans = list[PromptProvenanceSpan | SampledProvenanceSpan]


@dataclass(frozen=True, init=False)
class Datum:
    """One training example: what the model reads, and what the loss needs at each position.

    Position t of `model_input` predicts `target_tokens[t]`: the shift by one is the caller's.

    >>> datum = Datum(
    ...     model_input=ModelInput.from_ints([1, 2, 3]),
    ...     loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    ... )
    >>> datum.loss_fn_inputs["weights"].dtype
    'float32'
    """

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    """Where the input tokens came from: runs that cover them in order, without gaps."""
    loss_fn_input_spans: ProvenanceSpans | None = None
    """The same for `target_tokens`."""

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, _Tensor] = MappingProxyType({}),
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        """What may be given is wider than what is kept: `as_tensor` takes lists and arrays too."""
        given: object = model_input  # whatever the annotation says
        if not isinstance(given, ModelInput):
            try:
                model_input = ModelInput.model_validate(given)
            except ValidationError as error:
                raise error.under("model_input") from None
        if model_input_spans is not None or loss_fn_input_spans is not None:
            _check_spans("model_input_spans", model_input_spans)
            _check_spans("loss_fn_input_spans", loss_fn_input_spans)
        # Written past `__setattr__`, which forbids it: many are made for each batch.
        fields = self.__dict__
        fields["model_input"] = model_input
        fields["loss_fn_inputs"] = {key: as_tensor(key, v) for key, v in loss_fn_inputs.items()}
        fields["model_input_spans"] = model_input_spans
        fields["loss_fn_input_spans"] = loss_fn_input_spans

    def _repr_html_(self) -> str | None:
        """For notebooks: the targets, coloured by what is learned from each. None, which shows the
        plain form, where each position has several targets or none."""
        inputs = {name: tensor.to_numpy() for name, tensor in self.loss_fn_inputs.items()}
        targets = inputs.get("target_tokens")
        if targets is None or targets.ndim != 1:
            return None
        name = next((name for name in ("weights", "advantages") if name in inputs), "weights")
        weights = inputs.get(name, np.ones(len(targets)))
        if weights.shape != targets.shape:
            return None
        learned = int(np.count_nonzero(weights))
        title = f"Datum: {len(targets):,} targets, {learned:,} with {name}"
        return notebook.weighted(targets.tolist(), weights.tolist(), title, name.removesuffix("s"))

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Self:
        """A copy that says where its tokens came from; the runs must cover each field exactly."""
        _check_cover("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.shape is not None and len(targets.shape) == 1:
            _check_cover("loss_fn_inputs", loss_fn_inputs, targets.shape[0])
        return dataclasses.replace(
            self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs
        )

    @property
    def nbytes(self) -> int:
        """About how large this is in a request: its token, media and tensor bytes."""
        return self.model_input.nbytes + sum(t.nbytes for t in self.loss_fn_inputs.values())

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """From the JSON form that releases before 0.25.0 sent, or an instance as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ValidationError(f"expected a datum object, got {kind_of(obj)}")
        for name in obj:
            if name not in ("model_input", "loss_fn_inputs"):
                raise ValidationError("a datum has no such field", str(name)[:80])
        if obj.get("model_input") is None:
            raise ValidationError("a datum needs this field", "model_input")
        inputs = obj.get("loss_fn_inputs") or {}
        if not isinstance(inputs, Mapping):
            raise ValidationError(f"expected an object, got {kind_of(inputs)}", "loss_fn_inputs")
        tensors = {}
        for key, value in inputs.items():
            try:
                tensors[str(key)] = TensorData.model_validate(value)
            except ValidationError as error:
                raise error.under(f"loss_fn_inputs[{str(key)[:40]!r}]") from None
        try:
            model_input = ModelInput.model_validate(obj["model_input"])
        except ValidationError as error:
            raise error.under("model_input") from None
        return cls(model_input=model_input, loss_fn_inputs=tensors)

    def model_dump(
        self, *, mode: str = "python", exclude_none: bool = False, exclude_defaults: bool = False
    ) -> dict[str, Any]:
        options: dict[str, Any] = {
            "mode": mode,
            "exclude_none": exclude_none,
            "exclude_defaults": exclude_defaults,
        }
        return {
            "model_input": self.model_input.model_dump(**options),
            "loss_fn_inputs": {k: t.model_dump(**options) for k, t in self.loss_fn_inputs.items()},
        }

    def to_wire(self) -> dict[str, Any]:
        """The JSON form that releases before 0.25.0 sent; it has no place for provenance."""
        if self.model_input_spans is not None:
            raise ValidationError("provenance cannot be sent as JSON", "model_input_spans")
        return {
            "model_input": self.model_input.to_wire(),
            "loss_fn_inputs": {key: t.to_wire() for key, t in self.loss_fn_inputs.items()},
        }


def as_tensor(key: str, value: Any) -> TensorData:
    """A loss input as a tensor, whatever the user gave: list, numpy array, torch tensor."""
    if isinstance(value, TensorData):
        return value
    try:
        if isinstance(value, (list, tuple)):
            return TensorData.from_list(value, _dtype_of_list(key))
        if isinstance(value, np.ndarray):
            return TensorData.from_numpy(value)
        if is_torch_tensor(value):
            if key in _SPARSE_KEYS and value.ndim == 2:
                return TensorData.from_torch_sparse(value)
            return TensorData.from_torch(value)
    except ValidationError as error:
        raise error.under(f"loss_fn_inputs[{key!r}]") from None
    raise TypeError(
        f"loss_fn_inputs[{key!r}]: expected a tensor, an array or a list, got {kind_of(value)}"
    )


def _dtype_of_list(key: str) -> TensorDtype:
    if key not in LIST_DTYPES:
        raise KeyError(
            f"loss_fn_inputs[{key!r}]: a bare list needs a known name to tell its dtype "
            f"({', '.join(LIST_DTYPES)}); give a numpy array, a torch tensor or TensorData instead"
        )
    return LIST_DTYPES[key]


def _check_spans(name: str, spans: ProvenanceSpans | None) -> None:
    if spans is None:
        raise ValidationError("provenance needs both span lists, or neither", name)
    for index, span in enumerate(spans):
        if not isinstance(span, _Span):
            raise TypeError(
                f"{name}[{index}] must be a PromptProvenanceSpan or a SampledProvenanceSpan, "
                f"got {kind_of(span)}"
            )


def _check_cover(name: str, spans: ProvenanceSpans, expected: int) -> None:
    total = sum(span.length for span in spans)
    if total != expected:
        raise ValidationError(f"spans cover {total} positions, the field has {expected}", name)
