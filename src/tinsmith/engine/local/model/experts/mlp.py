"""Experts in place of a block's MLP, forward and backward, by hand.

Shapes: T tokens, k experts of each, S = k · T rows, d hidden size, I inner columns of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model import adapted_linear
from tinsmith.engine.local.model.adapted_linear import Inner
from tinsmith.engine.local.model.experts.grouped_router import GroupedRouter
from tinsmith.engine.local.model.experts.products import Batch, Down, Up
from tinsmith.engine.local.model.experts.router import Routed, Router
from tinsmith.engine.local.model.experts.routing import Routing
from tinsmith.engine.local.model.experts.steering import Steer
from tinsmith.engine.local.model.experts.weights import ExpertWeights
from tinsmith.engine.local.model.linear import Linear
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.pointwise import Activation, swiglu, swiglu_backward


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token goes to."""

    gate_up: Linear
    down: Linear
    share: Tensor | None
    """(1, d): its product with a token goes through a sigmoid, and is what the token takes of it;
    None where it takes all."""

    @property
    def nbytes(self) -> int:
        share = 0 if self.share is None else self.share.nbytes
        return self.gate_up.nbytes + self.down.nbytes + share

    def shares(self, x: Tensor) -> Tensor | None:
        """(T, 1) of x (T, d)."""
        return None if self.share is None else F.linear(x, self.share).sigmoid()

    def add(self, y: Tensor, part: Tensor, shares: Tensor | None) -> Tensor:
        """y (T, d) and what each token takes of `part` (T, d), the expert's output."""
        return y + part if shares is None else torch.addcmul(y, part, shares.to(y.dtype))


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """The frozen weights of a layer of experts."""

    router: Router | GroupedRouter
    gate_up: ExpertWeights
    down: ExpertWeights
    shared: SharedExpert | None

    @property
    def nbytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes + shared

    @property
    def linears(self) -> tuple[Linear, ...]:
        return () if self.shared is None else (self.shared.gate_up, self.shared.down)


@dataclass(slots=True)
class _KeptShared:
    shares: Tensor | None
    gate_up: Tensor
    gate_up_inner: Inner
    part: Tensor
    down_inner: Inner


@dataclass(slots=True)
class Kept:
    """What the backward pass needs of the forward pass, besides the input."""

    routed: Routed
    batch: Batch
    gate_up: Tensor
    """(S, 2 I)"""

    gate_up_inner: Inner
    down_inner: Inner
    shared: _KeptShared | None


class ExpertPass:
    """A layer of experts under the adapters of one batch."""

    def __init__(
        self,
        mlp: ExpertMlp,
        layer: int,
        activation: Activation,
        adapters: AdapterSegments,
        steer: Steer | None = None,
    ) -> None:
        self._mlp = mlp
        self._layer = layer
        self._activation = activation
        self._adapters = adapters
        self._steer = steer

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Kept]:
        """(T, d) of x (T, d), where asked in float32."""
        mlp = self._mlp
        routed = mlp.router.forward(x, self._steer)
        batch = Batch(Routing(routed.choices, len(mlp.router.weight)), self._adapters)
        # Dispatch and up: (T, d) to (S, 2 I), sorted by expert.
        gate_up, gate_up_inner = self._up(x, batch).forward(x)
        active = swiglu(gate_up, self._activation)
        # Down and combine: (S, I) to (T, d).
        y, down_inner = self._down(active, batch).forward(active, routed.shares, dtype)
        shared = None
        if mlp.shared is not None:
            shared = self._forward_shared(mlp.shared, x, dtype)
            y = mlp.shared.add(y, shared.part, shared.shares)
        return y, Kept(routed, batch, gate_up, gate_up_inner, down_inner, shared)

    def backward(self, grad: Tensor, x: Tensor, kept: Kept) -> Tensor:
        """The gradient for x; those of adapters go to their buffers."""
        mlp, batch = self._mlp, kept.batch
        active = swiglu(kept.gate_up, self._activation)
        grad_active, grad_shares = self._down(active, batch).backward(
            grad, active, kept.routed.shares, kept.down_inner
        )
        grad_gate_up, _ = swiglu_backward(grad_active, kept.gate_up, self._activation)
        grad_x = self._up(x, batch).backward(grad_gate_up, x, kept.gate_up_inner)
        grad_x += mlp.router.backward(grad_shares, kept.routed)
        if mlp.shared is not None and kept.shared is not None:
            grad_x += self._backward_shared(mlp.shared, grad, x, kept.shared)
        return grad_x

    def _up(self, x: Tensor, batch: Batch) -> Up:
        return Up(x, self._mlp.gate_up, batch, (self._layer, "experts_up"))

    def _down(self, x: Tensor, batch: Batch) -> Down:
        return Down(x, self._mlp.down, batch, (self._layer, "experts_down"))

    def _forward_shared(
        self, shared: SharedExpert, x: Tensor, dtype: torch.dtype | None
    ) -> _KeptShared:
        adapters, layer = self._adapters, self._layer
        gate_up, gate_up_inner = adapted_linear.forward(
            x, shared.gate_up, adapters, (layer, "gate_up")
        )
        active = swiglu(gate_up, self._activation)
        part, down_inner = adapted_linear.forward(
            active, shared.down, adapters, (layer, "down"), dtype=dtype
        )
        return _KeptShared(shared.shares(x), gate_up, gate_up_inner, part, down_inner)

    def _backward_shared(
        self, shared: SharedExpert, grad: Tensor, x: Tensor, kept: _KeptShared
    ) -> Tensor:
        adapters, share = self._adapters, kept.shares
        key = (self._layer, "down")
        grad_part = grad if share is None else grad * share
        grad_active, inner_grad = adapted_linear.backward_input(
            grad_part, shared.down, adapters, key
        )
        assert grad_active is not None, "it was asked for"
        grad_gate_up, active = swiglu_backward(grad_active, kept.gate_up, self._activation)
        adapted_linear.backward_adapters(
            grad_part, active, kept.down_inner, inner_grad, adapters, key
        )
        key = (self._layer, "gate_up")
        grad_x, inner_grad = adapted_linear.backward_input(
            grad_gate_up, shared.gate_up, adapters, key
        )
        assert grad_x is not None, "it was asked for"
        adapted_linear.backward_adapters(
            grad_gate_up, x, kept.gate_up_inner, inner_grad, adapters, key
        )
        if share is None or shared.share is None:
            return grad_x
        along = torch.linalg.vecdot(grad.to(kept.part.dtype), kept.part)[:, None]
        return grad_x.addmm_((along * share * (1 - share)).to(x.dtype), shared.share)
