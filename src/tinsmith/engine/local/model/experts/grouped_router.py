"""A router that scores experts one by one and chooses among groups of them first.

A sigmoid scores each expert. For the choice, and for nothing else, each has a bias; of the groups
those are taken whose two best experts have the largest sums, and in them the best experts. Shares
are scores, made to sum up to one or not, times a scale. All of it is in float32, as the models were
trained; the bias has no gradient. Nothing here waits for the device.

Shapes: T tokens, k experts of each, E experts, G groups, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.experts.router import Routed
from tinsmith.engine.local.model.experts.steering import Steer
from tinsmith.engine.local.model.families import ExpertGroups

_BEST = 2
"""Experts by which a group is judged."""

_LEAST = 1e-20
"""Beside the sum that shares are divided by."""


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    weight: Tensor
    """(E, d) float32."""

    bias: Tensor
    """(E,) float32."""

    per_token: int
    is_normalized: bool
    groups: ExpertGroups

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes

    def forward(self, x: Tensor, steer: Steer | None = None) -> Routed:
        """From x (T, d). `steer` may have tokens go to other experts, by the shares of these."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        choices = self._choose(scores)
        if steer is not None:
            choices = steer(choices)
        shares = scores.gather(1, choices)
        if self.is_normalized:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + _LEAST)
        return Routed(scores, choices, shares * self.groups.scale)

    def _choose(self, scores: Tensor) -> Tensor:
        """(T, k) by their scores (T, E)."""
        judged = scores + self.bias
        if self.groups.per_token < self.groups.count:
            by_group = judged.unflatten(1, (self.groups.count, -1))
            sums = by_group.topk(_BEST, dim=-1).values.sum(dim=-1)
            chosen = sums.topk(self.groups.per_token, dim=-1).indices
            is_out = torch.ones_like(sums, dtype=torch.bool).scatter_(1, chosen, False)
            judged = by_group.masked_fill(is_out[..., None], float("-inf")).flatten(1)
        return judged.topk(self.per_token, dim=-1).indices

    def backward(self, grad: Tensor, routed: Routed) -> Tensor:
        """The gradient for x, from that of the shares (T, k)."""
        scores, choices, _ = routed
        grad = grad.float() * self.groups.scale
        chosen = scores.gather(1, choices)
        if self.is_normalized:
            total = chosen.sum(dim=-1, keepdim=True) + _LEAST
            grad = (grad - (grad * chosen / total).sum(dim=-1, keepdim=True)) / total
        grad = grad * chosen * (1 - chosen)
        # Of a token every expert is chosen once at most, so that no two are written to one place.
        return torch.zeros_like(scores).scatter_(1, choices, grad) @ self.weight
