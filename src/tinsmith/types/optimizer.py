"""Which optimizer a model uses, and its numbers for one step.

Adam is what every service offers. Other families are open: any object with a `type` is kept as
it came, and a service that does not know the family says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from tinsmith.types.convert import Bounds, Tagged
from tinsmith.types.model import Open, Request


class OptimizerConfigBase(Open):
    """An optimizer family, chosen when a model is created."""

    type: str


class AdamOptimizerConfig(OptimizerConfigBase):
    """AdamW with decoupled weight decay: the default."""

    __unknown__ = "refuse"

    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(OptimizerConfigBase):
    __unknown__ = "refuse"

    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


OptimizerConfig = Annotated[
    AdamOptimizerConfig | DimuonOptimizerConfig | OptimizerConfigBase, Tagged("type")
]
ReportedOptimizerConfig = Annotated[
    AdamOptimizerConfig | DimuonOptimizerConfig | OptimizerConfigBase,
    Tagged("type", reopens=True),
]
"""The same in a response, where a known family may have gained fields."""


class AdamParams(Request):
    """The numbers of one AdamW step.

    >>> AdamParams(learning_rate=1e-5).beta2
    0.95
    """

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled (AdamW)."""
    grad_clip_norm: float = 0.0
    """Largest global gradient norm; 0 means no clipping."""


class OptimParamsBase(Open):
    """The numbers of one step of another family."""

    type: str


class DimuonParams(OptimParamsBase):
    __unknown__ = "refuse"

    type: Literal["dimuon"] = "dimuon"
    learning_rate: Annotated[float, Bounds(ge=0, finite=True)]
    grad_clip_norm: Annotated[float, Bounds(finite=True)] = 0.0
    """Largest global gradient norm; 0 or less means no clipping."""
    beta1: Annotated[float, Bounds(ge=0, lt=1, finite=True)] = 0.9


OptimParams = AdamParams | Annotated[DimuonParams | OptimParamsBase, Tagged("type")]


class OptimStepRequest(Request):
    """Apply the gradients gathered so far.

    On the wire the numbers go under `adam_params` for Adam and under `optimizer_params` for every
    other family; here they are one field.
    """

    optim_params: OptimParams
    model_id: str
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> dict[str, Any]:
        names = ("optim_params", "adam_params", "optimizer_params")
        given = [name for name in names if values.get(name) is not None]
        if len(given) > 1:
            from tinsmith.errors import ValidationError

            raise ValidationError(f"give one set of optimizer numbers, not {len(given)}", given[1])
        accepted = {name: value for name, value in values.items() if name not in names}
        if given:
            value = values[given[0]]
            accepted["optim_params"] = (
                AdamParams.model_validate(value) if given[0] == "adam_params" else value
            )
        return accepted

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return self._with_wire_name(super().model_dump(**options))

    def to_wire(self) -> dict[str, Any]:
        return self._with_wire_name(super().to_wire())

    def _with_wire_name(self, fields: dict[str, Any]) -> dict[str, Any]:
        is_adam = isinstance(self.optim_params, AdamParams)
        if "optim_params" in fields:
            fields["adam_params" if is_adam else "optimizer_params"] = fields.pop("optim_params")
        return fields
