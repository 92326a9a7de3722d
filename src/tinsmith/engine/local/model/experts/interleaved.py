"""Layers of experts as the files of gpt-oss have them.

All experts are in one tensor, inputs before outputs, in which gates and ups take turns; beside it
are biases, and the router has one too. In memory they are as those of other models: outputs before
inputs, all gates of an expert before its ups.

Shapes: E experts, d hidden size, I inner columns of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tinsmith.engine.local.config import BaseWeights
from tinsmith.engine.local.model.experts.mlp import ExpertMlp
from tinsmith.engine.local.model.experts.router import Router
from tinsmith.engine.local.model.experts.weights import ExpertWeights
from tinsmith.engine.local.model.families import ExpertsSpec
from tinsmith.engine.local.model.quantized import QuantizedStack

if TYPE_CHECKING:
    from tinsmith.engine.local.model.loading import Weights


def load_interleaved(
    spec: ExpertsSpec, hidden: int, weights: Weights, prefix: str, base_weights: BaseWeights
) -> ExpertMlp:
    """Those of the MLP under `prefix`. The router and all biases stay in full."""
    count, inner = spec.num_experts, spec.inner_size

    def stacked(module: str, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
        name = f"{prefix}.experts.{module}"
        weight = weights.get(name, (count, inputs, outputs)).transpose(1, 2)
        return weight, weights.get(f"{name}_bias", (count, outputs))

    def kept(weight: Tensor, bias: Tensor, columns: tuple[slice, ...]) -> ExpertWeights:
        weight = weight.contiguous()
        if base_weights == "full":
            return ExpertWeights(weight.transpose(1, 2), bias, columns)
        return ExpertWeights(QuantizedStack(weight, base_weights), bias, columns)

    # (E, 2 I, d) by turns to (E, 2 · I, d), gates first; and the biases (E, 2 I).
    by_turns, bias = stacked("gate_up_proj", hidden, 2 * inner)
    gate_up = by_turns.unflatten(1, (inner, 2)).transpose(1, 2).flatten(1, 2)
    bias = bias.unflatten(1, (inner, 2)).transpose(1, 2).flatten(1, 2)
    down, down_bias = stacked("down_proj", inner, hidden)
    router = weights.get(f"{prefix}.router.weight", (count, hidden))
    router_bias = weights.get(f"{prefix}.router.bias", (count,))
    return ExpertMlp(
        router=Router(router, spec.per_token, spec.is_normalized, router_bias),
        gate_up=kept(gate_up, bias, (slice(inner), slice(inner, None))),
        down=kept(down, down_bias, (slice(None),)),
        shared=None,
    )
