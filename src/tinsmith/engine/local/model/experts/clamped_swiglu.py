"""The gate between the projections of gpt-oss's experts, forward and backward, by hand.

It is SwiGLU of bounded numbers with a steeper sigmoid: (up + 1) · gate · sigmoid(alpha · gate), of
a gate of `limit` at most and an up between the two limits. On CUDA each way is one kernel, here is
the same in plain torch. `pointwise` has the gates of other models.

Shapes: S rows, I inner columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.engine.local import kernels


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    alpha: float
    limit: float

    def forward(self, gate_up: Tensor) -> Tensor:
        """(S, I) of gate_up (S, 2 I): gates, then ups."""
        if kernels.are_usable(gate_up):
            found: Tensor = kernels.module("clamped_swiglu").forward(
                gate_up, self.alpha, self.limit
            )
            return found
        gate, up = self._clamped(gate_up)
        return gate.mul_(torch.sigmoid(self.alpha * gate)).mul_(up.add_(1))

    def backward(self, grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient for gate_up (S, 2 I); and the output once more. What is beyond a limit has
        none."""
        if kernels.are_usable(gate_up):
            found: tuple[Tensor, Tensor] = kernels.module("clamped_swiglu").backward(
                grad, gate_up, self.alpha, self.limit
            )
            return found
        gate, up = self._clamped(gate_up)
        share = torch.sigmoid(self.alpha * gate)
        active, up = gate * share, up.add_(1)
        grad_in = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_in.chunk(2, dim=-1)
        # d gate = grad · (up + 1) · sigmoid · (1 + alpha · gate · (1 - sigmoid)).
        torch.mul(grad * up, share + self.alpha * active * (1 - share), out=grad_gate)
        torch.mul(grad, active, out=grad_up)
        whole_gate, whole_up = gate_up.chunk(2, dim=-1)
        grad_gate.masked_fill_(whole_gate > self.limit, 0.0)
        grad_up.masked_fill_(whole_up.abs() > self.limit, 0.0)
        return grad_in, active.mul_(up)

    def _clamped(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
