"""A layer of the gated delta rule in place of a block's attention, forward and backward.

The products that begin and end it are the block's, which has their adapters. Here is what lies
between: the rule itself (`delta_rule`), whose backward pass is autograd's, and the norm and gate of
what it gives, by hand.

Shapes: N rows, C channels of queries, keys and values, H heads of values, V their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.pointwise import gated_norm, gated_norm_backward
from tinsmith.engine.local.model.recurrent.delta_rule import DeltaWeights, mix
from tinsmith.engine.local.model.recurrent.recurrence import SequenceStates


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """The frozen weights of a layer, but for the first and last product."""

    core: DeltaWeights
    z: Linear | None
    """To the gate of the output; None where that comes with queries, keys and values."""

    ba: Linear
    """(2 H, d): to the shares and to how the memory fades; neither has an adapter."""

    norm: Tensor
    """(V,), of each head of the output."""

    @property
    def nbytes(self) -> int:
        z = 0 if self.z is None else self.z.nbytes
        return self.core.nbytes + z + self.ba.nbytes + self.norm.nbytes

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.ba,) if self.z is None else (self.z, self.ba)

    def split(self, qkvz: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C) and the gate (N, H · V), which come together for each key head."""
        core = self.core
        values = len(core.a_log) // core.num_key_heads * core.value_dim
        heads = qkvz.unflatten(1, (core.num_key_heads, -1))
        q, k, v, z = heads.split([core.key_dim, core.key_dim, values, values], dim=2)
        return torch.cat([part.flatten(1) for part in (q, k, v)], dim=1), z.flatten(1)

    def join(self, qkv: Tensor, z: Tensor) -> Tensor:
        """The inverse of `split`."""
        keys = self.core.num_key_heads * self.core.key_dim
        parts = (*qkv.split([keys, keys, z.shape[1]], dim=1), z)
        by_head = [part.unflatten(1, (self.core.num_key_heads, -1)) for part in parts]
        return torch.cat(by_head, dim=2).flatten(1)


@dataclass(slots=True)
class Recurred:
    """What the backward pass needs of the forward pass."""

    inputs: tuple[Tensor, Tensor, Tensor]
    z: Tensor
    output: Tensor
    """(N, H, V): of the rule, before norm and gate."""


class Gradients(NamedTuple):
    """For what a layer's products gave."""

    qkv: Tensor
    z: Tensor
    ba: Tensor


class DeltaPass:
    """A layer in one batch."""

    def __init__(self, mixer: DeltaMixer, eps: float, states: SequenceStates, place: int) -> None:
        """`place` is the layer's number among recurrent ones."""
        self._mixer = mixer
        self._eps = eps
        self._states = states
        self._place = place

    def forward(self, qkv: Tensor, z: Tensor, ba: Tensor, *, keep: bool) -> tuple[Tensor, Recurred]:
        """(N, H · V), for the last product, of qkv (N, C), z (N, H · V) and ba (N, 2 H)."""
        with torch.set_grad_enabled(keep):
            inputs = tuple(x.detach().requires_grad_(keep) for x in (qkv, *ba.chunk(2, dim=1)))
            mixed, b, a = inputs
            output = mix(mixed, a, b, self._mixer.core, self._states, self._place).to(qkv.dtype)
        flat = output.detach().flatten(1)
        return gated_norm(flat, z, self._mixer.norm, self._eps), Recurred(inputs, z, output)

    def backward(self, grad: Tensor, kept: Recurred) -> tuple[Gradients, Tensor]:
        """The gradients of what `forward` was given; and its answer once more."""
        output = kept.output.detach().flatten(1)
        grad_output, grad_z, flat = gated_norm_backward(
            grad, output, kept.z, self._mixer.norm, self._eps
        )
        grad_mixed, grad_b, grad_a = torch.autograd.grad(
            kept.output, kept.inputs, grad_output.view(kept.output.shape)
        )
        grad_ba = torch.cat([grad_b, grad_a], dim=1)
        return Gradients(grad_mixed, grad_z, grad_ba), flat
