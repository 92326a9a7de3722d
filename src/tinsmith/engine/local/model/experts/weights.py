"""The frozen weights of one projection of all experts, and products of rows with them.

Shapes: S rows sorted by expert, E experts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.experts.routing import Routing
from tinsmith.engine.local.model.quantized import QuantizedStack


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    weight: Tensor | QuantizedStack
    """(E, inputs, outputs of all modules): as it is multiplied."""

    bias: Tensor | None
    """(E, outputs)."""

    columns: tuple[slice, ...]
    """Which outputs are each module's."""

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def product(self, x: Tensor, routing: Routing, *, back: bool = False) -> Tensor:
        """Rows x (S, inputs) by their expert's matrix; with `back` (S, outputs), transposed."""
        if kernels.are_usable(x):
            return self._on_device(x, routing, back)
        y = x.new_empty(len(x), self.weight.shape[1 if back else 2])
        stops = [0, *(edge for (edge,) in routing.host_edges((routing.num_tokens,)))]
        for first in range(0, routing.num_experts, self._at_once):
            own = stops[first : first + self._at_once + 1]
            # What no row needs is not made full.
            if own[-1] > own[0]:
                for matrix, (start, stop) in zip(
                    self._dense(first), itertools.pairwise(own), strict=True
                ):
                    turned = matrix.t() if back else matrix
                    torch.mm(x[start:stop], turned, out=y[start:stop])
        return y

    def _on_device(self, x: Tensor, routing: Routing, back: bool) -> Tensor:
        weight, x = self.weight, x.contiguous()
        if not isinstance(weight, Tensor):
            return self.gathered_product(x, routing, None, back=back)
        turned = weight.transpose(1, 2) if back else weight
        if _can_group(x, turned):
            return F.grouped_mm(x, turned, offs=routing.offsets)
        return self.gathered_product(x, routing, None, back=back)

    def add_biases(self, rows: Tensor, routing: Routing) -> None:
        """Add to rows (S, outputs) their experts' biases, in place, where there are any."""
        if self.bias is None:
            return
        if kernels.are_usable(rows):
            kernels.module("clamped_swiglu").add_biases(rows, self.bias, routing.experts)
        else:
            rows += self.bias.index_select(0, routing.experts)

    def gathered_product(
        self,
        x: Tensor,
        routing: Routing,
        sources: Tensor | None,
        *,
        back: bool = False,
        is_biased: bool = False,
    ) -> Tensor:
        """The same by our own kernel, which finds row s in row `sources[s]` of x. If it is to be
        biased, with the experts' biases, where there are any."""
        own = kernels.module("experts")
        tiles = routing.tiles(_rows_of_tile(routing))
        y = x.new_empty(routing.num_rows, self.weight.shape[1 if back else 2])
        biases = self.bias if is_biased else None
        for first in range(0, routing.num_experts, self._at_once):
            dense = self._dense(first)
            turned = dense.transpose(1, 2) if back else dense
            own.product(x, turned, y, routing.experts, first, tiles, sources, biases)
        return y

    @property
    def _at_once(self) -> int:
        """Experts whose matrices are in full at a time."""
        return len(self.weight) if isinstance(self.weight, Tensor) else self.weight.at_once

    def _dense(self, first: int) -> Tensor:
        """(some, inputs, outputs): those from expert `first` on."""
        return self.weight if isinstance(self.weight, Tensor) else self.weight.dense(first)


def _rows_of_tile(routing: Routing) -> int:
    """Half as many again as an expert has on average: most then have one tile, and their weight is
    read by one program for each of its columns."""
    average = routing.num_rows // routing.num_experts
    return next((size for size in (16, 32, 64) if average * 3 <= size * 2), 128)


def _can_group(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has one kernel for it, which reads the offsets on the device.

    So it is in bfloat16 on Hopper and later, where every row begins at 16 bytes. Elsewhere torch
    copies the offsets to the host and multiplies expert by expert.
    """
    if not hasattr(F, "grouped_mm") or not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    sizes = (x.data_ptr(), weight.data_ptr(), *(n * x.itemsize for n in weight.shape[1:]))
    return _has_grouped_kernel(x.device) and all(size % 16 == 0 for size in sizes)


@functools.cache
def _has_grouped_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
