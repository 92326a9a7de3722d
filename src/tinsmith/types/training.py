"""Creating a model and training it: the messages of the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tinsmith.errors import ValidationError
from tinsmith.types.convert import converter, fields_of, kind_of
from tinsmith.types.datum import Datum, LossFnOutput
from tinsmith.types.model import Request, Response
from tinsmith.types.non_finite import ResultFloat, from_json, to_json
from tinsmith.types.optimizer import (
    AdamOptimizerConfig,
    OptimizerConfig,
    ReportedOptimizerConfig,
)
from tinsmith.types.tensors import TensorData

ModelID = str

LossFnType = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]


class LoraConfig(Request):
    """The shape of a model's adapter: its rank, and which matrices it changes."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(Request):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Response):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class UnloadModelRequest(Request):
    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Response):
    model_id: ModelID
    type: Literal["unload_model"] | None = None


class GetInfoRequest(Request):
    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Response):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Response):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: ReportedOptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class OptimStepResponse(Response):
    metrics: dict[str, ResultFloat] | None = None


@dataclass(frozen=True)
class ForwardBackwardInput:
    """The examples of one pass, and the loss to apply to them."""

    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: Mapping[str, float | str] | None = None

    def __post_init__(self) -> None:
        for name, check in (("loss_fn", _check_loss_fn), ("loss_fn_config", _check_config)):
            try:
                object.__setattr__(self, name, check(getattr(self, name)))
            except ValidationError as error:
                raise error.under(name) from None

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """From the JSON form that releases before 0.25.0 sent, or an instance as it is."""
        if isinstance(obj, cls):
            return obj
        fields = fields_of(obj, "ForwardBackwardInput", ("data", "loss_fn", "loss_fn_config"))
        for name in ("data", "loss_fn"):
            if fields.get(name) is None:
                raise ValidationError("ForwardBackwardInput needs this field", name)
        if not isinstance(fields["data"], Sequence):
            raise ValidationError(f"expected a list, got {kind_of(fields['data'])}", "data")
        data = []
        for index, item in enumerate(fields["data"]):
            try:
                data.append(Datum.model_validate(item))
            except ValidationError as error:
                raise error.under(f"data[{index}]") from None
        return cls(data, fields["loss_fn"], fields.get("loss_fn_config"))

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {
            "data": [datum.to_wire() for datum in self.data],
            "loss_fn": self.loss_fn,
        }
        if self.loss_fn_config is not None:
            wire["loss_fn_config"] = dict(self.loss_fn_config)
        return wire


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """One pass over some examples that adds to the model's gradients."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True)
class ForwardRequest:
    """One pass over some examples that leaves no trace."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """What a pass gives back: per example its tensors, and metrics over all of them.

    A metric's name ends in how values of several requests combine: `loss:sum`, `entropy:mean`.
    """

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """From the JSON form, or an instance as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ValidationError(f"expected an object, got {kind_of(obj)}")
        outputs = obj.get("loss_fn_outputs")
        if isinstance(outputs, list):
            numbers = [
                {key: _output_tensor(tensor) for key, tensor in output.items()}
                if isinstance(output, Mapping)
                else output
                for output in outputs
            ]
            obj = {**obj, "loss_fn_outputs": numbers}
        parts = {}
        for name, annotation, absent in (
            ("loss_fn_output_type", str, "ArrayRecord"),
            ("loss_fn_outputs", list[dict[str, TensorData]], []),
            ("metrics", dict[str, ResultFloat], {}),
        ):
            try:
                parts[name] = converter(annotation)(obj.get(name) or absent)
            except ValidationError as error:
                raise error.under(name) from None
        return cls(**parts)

    def model_dump(self, *, mode: str = "python", **_: Any) -> dict[str, Any]:
        return {
            "loss_fn_output_type": self.loss_fn_output_type,
            "loss_fn_outputs": [
                {key: t.model_dump(mode=mode) for key, t in output.items()}
                for output in self.loss_fn_outputs
            ],
            "metrics": dict(self.metrics),
        }

    def to_wire(self) -> dict[str, Any]:
        """The JSON form that releases before 0.25.0 read."""
        return {
            "loss_fn_output_type": self.loss_fn_output_type,
            "loss_fn_outputs": [
                {key: tensor.to_wire(words=True) for key, tensor in output.items()}
                for output in self.loss_fn_outputs
            ],
            "metrics": {name: to_json(float(value)) for name, value in self.metrics.items()},
        }


def _output_tensor(obj: Any) -> Any:
    """A tensor of a result in its JSON form, with numbers in place of words."""
    if isinstance(obj, Mapping) and isinstance(data := obj.get("data"), list):
        return {**obj, "data": [from_json(value) for value in data]}
    return obj


_check_loss_fn = converter(LossFnType)
_check_config = converter(Mapping[str, float | str] | None)
