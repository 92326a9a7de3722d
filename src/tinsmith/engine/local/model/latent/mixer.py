"""Latent attention in a block, forward and backward: what lies between the first and last product.

Both products are the block's, which has their adapters. The first gives what queries are made of
and, behind that, a token's latent vector and rotated key. The projections that follow are of low
rank themselves and have no adapter; their backward pass is autograd's, as that of attention is.

Shapes: N rows, H heads, R the size of a latent vector, P that of the rotated part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model.latent.heads import LatentHeads
from tinsmith.engine.local.model.pointwise import differentiable_rms_norm
from tinsmith.engine.local.model.rope import Rotation

NORM_EPS = 1e-6
"""Of the norms of the two vectors, whatever the model has for its others."""


class LatentAttention(Protocol):
    """What the tokens of a batch see by way of latent vectors."""

    def of_latents(self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads) -> Tensor:
        """(N, H, value_dim) of q (N, H, plain_dim + P) and latents (N, R + P), rotated already."""
        ...


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """The frozen weights of a layer, but for the first and last product."""

    heads: LatentHeads
    q_norm: Tensor | None
    """Of the vector that queries are made of; None where they come from the first product."""

    q_b: Tensor | None
    """(H · (plain_dim + P), query_rank), as above."""

    kv_norm: Tensor
    """(R,)"""

    @property
    def nbytes(self) -> int:
        tensors = (self.heads.weight, self.q_norm, self.q_b, self.kv_norm)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def numbers_a_token(self) -> int:
        """About what a training pass keeps of a token."""
        num_heads, spec = len(self.heads.weight), self.heads.spec
        q_rank = 0 if self.q_norm is None else len(self.q_norm)
        size = max(spec.key_dim, spec.value_dim)
        return num_heads * (4 * size + spec.key_dim + spec.value_dim) + q_rank + spec.kept_dim

    def split(self, mixed: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries (N, H, plain_dim + P) and latents (N, R + P), of what the first product gave."""
        spec = self.heads.spec
        sizes = [mixed.shape[1] - spec.kept_dim, spec.rank, spec.rotated_dim]
        q, vectors, shared = mixed.split(sizes, dim=1)
        if self.q_norm is not None and self.q_b is not None:
            q = F.linear(differentiable_rms_norm(q.contiguous(), self.q_norm, NORM_EPS), self.q_b)
        heads = q.unflatten(1, (-1, spec.key_dim))
        plain, turning = heads.split([spec.plain_dim, spec.rotated_dim], dim=2)
        vectors = differentiable_rms_norm(vectors.contiguous(), self.kv_norm, NORM_EPS)
        rotated = self._rotated(shared[:, None], rotation)[:, 0]
        queries = torch.cat([plain, self._rotated(turning, rotation)], dim=2)
        return queries, torch.cat([vectors, rotated], dim=1)

    def _rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x (N, heads, P) with each pair turned by its angle; those of a pair are then P / 2 apart,
        wherever they were."""
        cos, sin = rotation.cos, rotation.sin
        if self.heads.spec.is_interleaved:
            left, right = x[..., 0::2], x[..., 1::2]
        else:
            left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


@dataclass(slots=True)
class Looked:
    """What the backward pass needs of the forward pass."""

    mixed: Tensor
    output: Tensor
    """(N, H, value_dim)"""


class LatentPass:
    """A layer in one batch."""

    def __init__(
        self, mixer: LatentMixer, rotation: Rotation, attention: LatentAttention, place: int
    ) -> None:
        """`place` is the layer's number among those that attend."""
        self._mixer = mixer
        self._rotation = rotation
        self._attention = attention
        self._place = place

    def forward(self, mixed: Tensor, *, keep: bool) -> tuple[Tensor, Looked]:
        """(N, H · value_dim), for the last product, of what the first one gave."""
        with torch.set_grad_enabled(keep):
            mixed = mixed.detach().requires_grad_(keep)
            q, latents = self._mixer.split(mixed, self._rotation)
            output = self._attention.of_latents(self._place, q, latents, self._mixer.heads)
        return output.detach().flatten(1), Looked(mixed, output)

    def backward(self, grad: Tensor, kept: Looked) -> tuple[Tensor, Tensor]:
        """The gradient of what `forward` was given; and its answer once more."""
        output = kept.output
        (grad_mixed,) = torch.autograd.grad(output, kept.mixed, grad.view(output.shape))
        return grad_mixed, output.detach().flatten(1)
