"""Experts in a decoding step on a GPU: the router's choices stay on the device.

Nothing here depends on what a router chooses but numbers in buffers: a captured graph has as many
rows and tiles as there can be. `model.experts` computes the same in training.

Shapes: B rows of the step, k experts of each, S = k · B rows sorted by expert, d hidden size, I
inner columns, R the largest rank rounded up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.engine.local.kernels import experts as kernels
from tinsmith.engine.local.kernels.decode_lora import TiledAdapters
from tinsmith.engine.local.kernels.experts import Matrices, Sorted
from tinsmith.engine.local.model.experts.mlp import ExpertMlp
from tinsmith.engine.local.model.experts.routing import Routing, TokenAdapters
from tinsmith.engine.local.model.experts.steering import Steer
from tinsmith.engine.local.model.families import Projection
from tinsmith.engine.local.model.pointwise import Activation, swiglu

Placed = tuple[int, Projection]
"""A projection, and its number among those of the model."""


class ExpertAdapters(NamedTuple):
    """The adapters of a step, as a layer of experts needs them."""

    tiled: TiledAdapters
    token_adapters: TokenAdapters
    """The number of each row's adapter."""

    up: Placed
    down: Placed

    def add_up(self, y: Tensor, x: Tensor, routing: Routing) -> None:
        """Add scale · (x Aᵀ) Bᵀ to y (S, 2 I), of x (B, d): one A, and the B of each expert."""
        index, projection = self.up
        inner = self.tiled.new_inner(x, projection)
        self.tiled.shrink(inner, x, index, projection)
        # (shares, B, modules, R) to (B, modules, R), to (S, modules, R).
        narrow = routing.expanded(inner.sum(dim=0))
        for module, part in enumerate(y.split(projection.outputs, dim=1)):
            matrices = self._matrices(self.up, 1 + module)
            rows = Sorted(routing, self.token_adapters)
            kernels.expand(part, narrow[:, module], matrices, rows, scales=True)

    def add_down(self, y: Tensor, x: Tensor, routing: Routing, shares: Tensor) -> None:
        """Add scale · (x Aᵀ) Bᵀ, summed by shares, to y (B, d), of x (S, I): the A of each expert,
        and one B."""
        index, projection = self.down
        narrow = torch.zeros(len(x), self.tiled.max_rank, device=x.device)
        matrices = self._matrices(self.down, 0)
        kernels.shrink(x, matrices, Sorted(routing, self.token_adapters), narrow, scales=False)
        # (S, R) to (B, R), as a sum over one share of the inputs, for one module.
        inner = routing.weighed_sums(narrow, shares)[None, :, None].contiguous()
        self.tiled.expand(y, inner, index, projection)

    def _matrices(self, placed: Placed, place: int) -> Matrices:
        """Those at a place of the table of addresses: A, or a module's B."""
        (index, projection), is_b = placed, place > 0
        size = projection.outputs[place - 1] if is_b else projection.inputs
        return Matrices(
            addresses=self.tiled.addresses[:, index, place],
            offset=0,
            facts=self.tiled.facts,
            size=size,
            is_b=is_b,
            max_rank=self.tiled.max_rank,
            is_aligned=self.tiled.is_aligned and size % 8 == 0,
        )


def run_experts(
    x: Tensor,
    mlp: ExpertMlp,
    activation: Activation,
    adapters: ExpertAdapters | None,
    steer: Steer | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(B, d) of x (B, d), where asked in float32; without the shared expert."""
    _, choices, shares = mlp.router.forward(x, steer)
    routing = Routing(choices, len(mlp.router.weight))
    # Up: (B, d) to (S, 2 I), sorted by expert, to (S, I).
    z = mlp.gate_up.gathered_product(x, routing, routing.tokens, is_biased=True)
    if adapters is not None:
        adapters.add_up(z, x, routing)
    z = swiglu(z, activation)
    # Down: (S, I) to (S, d), summed to (B, d).
    rows = mlp.down.gathered_product(z, routing, None, is_biased=True)
    y = routing.weighed_sums(rows, shares, dtype)
    if adapters is not None:
        adapters.add_down(y, z, routing, shares)
    return y
