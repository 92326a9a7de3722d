"""Which modules of `transformers` are recurrent layers that we compute ourselves.

Their own code knows neither where packed sequences begin nor our states, so `foreign` calls ours in
its place. A recurrent module that is not in this table is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tinsmith.engine.local.model.families import Projection
from tinsmith.engine.local.model.recurrent import delta_rule, mamba, short_convolution
from tinsmith.engine.local.model.recurrent.recurrence import SequenceStates, StateShape


def _number(module: Any) -> int:
    number: int = module.layer_idx
    return number


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """How a kind of module is computed."""

    state_shape: Callable[[Any], StateShape]
    projections: Callable[[str, Any], Iterator[Projection]]
    """Those of a module by its name: what adapters may extend."""

    forward: Callable[[Any, Tensor, SequenceStates, int], Tensor]
    number: Callable[[Any], int] = _number
    """Which one a module is among those of its model; where it takes the place of attention, the
    number of its layer."""

    is_beside_attention: bool = False


_DELTA_RULE = RecurrentLayer(delta_rule.state_shape, delta_rule.projections, delta_rule.forward)
_MAMBA = RecurrentLayer(mamba.state_shape, mamba.projections, mamba.forward)
_SHORT_CONVOLUTION = RecurrentLayer(
    short_convolution.state_shape,
    short_convolution.projections,
    short_convolution.forward,
    short_convolution.number,
    is_beside_attention=True,
)

_KINDS = {
    "Qwen3NextGatedDeltaNet": _DELTA_RULE,
    "Qwen3_5GatedDeltaNet": _DELTA_RULE,
    "Qwen3_5MoeGatedDeltaNet": _DELTA_RULE,
    "NemotronHMamba2Mixer": _MAMBA,
    "InklingShortConvolution": _SHORT_CONVOLUTION,
}


def recurrent_layer(module: nn.Module) -> RecurrentLayer | None:
    """How a module is computed, if it is a recurrent layer that we know."""
    return _KINDS.get(type(module).__name__)
