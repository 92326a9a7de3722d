"""From latent vectors to the keys and values of all heads, and the other way to attend to them.

A head's key is K c beside a rotated part that all heads share, and its value V c, of a token's
latent vector c. Where many tokens look at many, both are made (*expanded*). Where one token looks
at many, they are not: q · K c is (Kᵀ q) · c, so that its query comes to the latent vectors
(*absorbed*), all heads look at the same vectors, and V goes over the sum of those.

Shapes: N tokens, H heads, R the size of a latent vector, P that of the rotated part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.families import LatentSpec

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q, k and v, which are (N, H, D) each, to (N, H, D)."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The frozen weights of a layer that make keys and values."""

    spec: LatentSpec
    weight: Tensor
    """(H, plain_dim + value_dim, R): of each head first K, then V."""

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (N, H, plain_dim + P) and values (N, H, value_dim) of latents (N, R + P)."""
        spec, num_heads = self.spec, len(self.weight)
        vectors, shared = latents.split([spec.rank, spec.rotated_dim], dim=1)
        both = F.linear(vectors, self.weight.flatten(0, 1)).unflatten(1, (num_heads, -1))
        plain, values = both.split([spec.plain_dim, spec.value_dim], dim=2)
        rotated = shared[:, None].expand(-1, num_heads, -1)
        return torch.cat([plain, rotated], dim=2), values

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries (N, H, R + P) for latents, of those for keys (N, H, plain_dim + P)."""
        spec = self.spec
        plain, rotated = q.split([spec.plain_dim, spec.rotated_dim], dim=2)
        # By head: (H, N, plain_dim) times (H, plain_dim, R).
        of_latents = torch.bmm(plain.transpose(0, 1), self.weight[:, : spec.plain_dim])
        return torch.cat([of_latents.transpose(0, 1), rotated], dim=2)

    def values_of(self, sums: Tensor) -> Tensor:
        """(N, H, value_dim) of sums of latent vectors (N, H, R)."""
        values = self.weight[:, self.spec.plain_dim :].transpose(1, 2)
        return torch.bmm(sums.transpose(0, 1), values).transpose(0, 1)

    def attend_expanded(self, attend: Attend, q: Tensor, latents: Tensor) -> Tensor:
        """(N, H, value_dim): what `attend` finds for q among the keys and values of latents, whose
        heads are made equally large for it by zeros."""
        k, v = self.expanded(latents)
        size = max(k.shape[-1], v.shape[-1])
        return attend(*(_widened(x, size) for x in (q, k, v)))[..., : v.shape[-1]]


def _widened(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
