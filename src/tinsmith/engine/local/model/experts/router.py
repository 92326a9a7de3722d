"""A router: which experts a token goes to, and what share each has in its output.

A softmax over all experts, of which the largest are taken; in some models their shares are then
made to sum up to one: that is also what a softmax over the chosen alone gives. Routers have no
adapter. `grouped_router` is of another kind.

Shapes: T tokens, k experts of each, E experts, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.experts.steering import Steer


class Routed(NamedTuple):
    probabilities: Tensor
    """(T, E) float32."""

    choices: Tensor
    """(T, k): the experts of each token."""

    shares: Tensor
    """(T, k) float32."""


@dataclass(frozen=True, slots=True)
class Router:
    weight: Tensor
    """(E, d)"""

    per_token: int
    is_normalized: bool
    """Whether the shares of a token sum up to one."""

    bias: Tensor | None = None
    """(E,)"""

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: Tensor, steer: Steer | None = None) -> Routed:
        """From x (T, d). `steer` may have tokens go to other experts, by the shares of these."""
        logits = F.linear(x, self.weight, self.bias)
        if kernels.are_usable(logits):
            return self._on_device(logits, steer)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        shares, choices = probabilities.topk(self.per_token, dim=-1)
        if steer is not None:
            choices = steer(choices)
            shares = probabilities.gather(1, choices)
        if self.is_normalized:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return Routed(probabilities, choices, shares)

    def _on_device(self, logits: Tensor, steer: Steer | None) -> Routed:
        """By one kernel, so that among equals sampling and training choose the same."""
        choose, k = kernels.module("routing").choose, self.per_token
        routed = Routed(*choose(logits, k, self.is_normalized))
        if steer is None:
            return routed
        choices = steer(routed.choices)
        return Routed(*choose(logits, k, self.is_normalized, choices))

    def backward(self, grad: Tensor, routed: Routed) -> Tensor:
        """The gradient for x, from that of the shares (T, k)."""
        probabilities, choices, shares = routed
        chosen = probabilities.gather(1, choices)
        if self.is_normalized:
            along = (grad * shares).sum(dim=-1, keepdim=True)
            grad = (grad - along) / chosen.sum(dim=-1, keepdim=True)
        along = (grad * chosen).sum(dim=-1, keepdim=True)
        # Of a token every expert is chosen once at most, so that no two are written to one place.
        grad_logits = (-along * probabilities).scatter_(1, choices, chosen * (grad - along))
        return grad_logits.to(self.weight.dtype) @ self.weight
