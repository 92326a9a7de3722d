"""Products with a frozen weight, in both directions.

On the CPU in float32 a weight may be *packed*: copied into the layout in which oneDNN multiplies,
when first needed. That saves rearranging it in every product, which at the sizes of decoding takes
longer than the product. Two cores of an AMD EPYC, queries, keys, values, output, gate and up of a
block of SmolLM2-135M, milliseconds:

    rows           2     8    16    64   256   512  2048
    not packed  0.69  0.96  1.18  2.58   8.0  14.4  57.2
    packed      0.65  0.64  0.73  1.86   6.5  12.3  49.0

Packed products add up in longer chains, so that their last bits are others, and less exact: the
error is one and a half to two times as large. Where that would show, a weight is packed in pieces
as short as the chains of the plain product, whose bits it then has: forward where there are more
inputs than outputs, and in the head, whose rounding goes straight into log-probabilities. The
former, of the same block, milliseconds of one core:

    rows           2     8    16    64  1024
    not packed  0.18  0.40  0.53  1.37  16.6
    in pieces   0.26  0.32  0.37  0.75   8.8
    in groups   0.15  0.19  0.26

In groups all pieces of a few rows are one call (`few_rows`), at the price of one more copy. The
head's outputs are made some thousand at a time, so that they stay in the cache while its pieces are
added to them.

A single row is quicker in the plain layout, which is kept in any case.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.cpu import few_rows, tiles
from tinsmith.engine.local.model.quantized import Quantized

MIN_NUMBERS = 1 << 16
"""Numbers in a weight below which nothing is gained."""

_ROWS_PACKED_FOR = 16
"""The layout is the best one for so many rows, and close to it for others."""

_EXACT_CHAIN = 192
"""Inputs that the plain product adds up before it begins a new sum."""

_MIN_MULTIPLICATIONS = 1 << 21
"""In a product of plain matrices below which oneDNN is not called: 0.02 ms of one core."""

_MIN_ROWS_IN_PIECES = 9
"""With fewer, a weight of more inputs than outputs is no quicker in pieces than plain."""

_ROWS_AT_A_TIME = 128
_OUTPUTS_AT_A_TIME = 4096
"""What of the head's product is made together: each piece goes over it once more, and more of it
would not stay in the cache. One core, 49,152 outputs of 576 inputs, 128 rows: 36 ms, and 55 with
all outputs together."""


class Linear:
    """A frozen weight (outputs, inputs), in full or in few bits, and its bias.

    Several modules may be fused into one.
    """

    def __init__(
        self, weight: Tensor | Quantized, bias: Tensor | None = None, *, is_exact: bool = False
    ) -> None:
        """With `is_exact` the product is as exact packed as it is without."""
        self._weight = weight
        self.bias = bias
        self.is_invariant = False
        """Whether a row's product is the same to the last bit whatever rows are beside it."""
        outputs, inputs = weight.shape
        self._is_exact = is_exact
        self._is_packable = False
        self._chain = _EXACT_CHAIN if is_exact or inputs > outputs else inputs
        """Inputs that the packed product adds up at a time."""
        self._can_group = inputs > outputs and not is_exact and inputs % _EXACT_CHAIN == 0
        """Whether the pieces of few rows are quicker in one call."""
        is_quick = inputs <= outputs or self._can_group
        self._fewest_packed_rows = 2 if is_quick else _MIN_ROWS_IN_PIECES
        self._forward: list[list[Tensor]] | None = None
        """The weight's parts: by outputs, and each by inputs."""
        self._groups: few_rows.Groups | None = None
        self._backward: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """In full: where it is kept in few bits, a new copy."""
        return self._weight if isinstance(self._weight, Tensor) else self._weight.dense()

    @property
    def shape(self) -> tuple[int, ...]:
        """(outputs, inputs)"""
        return tuple(self._weight.shape)

    def allow_packing(self) -> None:
        """Spend memory on packed copies, where that is of use; see `packed_bytes`."""
        self._is_packable = self.packed_bytes > 0

    @property
    def packed_bytes(self) -> int:
        """What packed copies take, whether they are allowed or not."""
        weight = self._weight
        if not isinstance(weight, Tensor):
            return 0
        is_float = weight.device.type == "cpu" and weight.dtype == torch.float32
        if not is_float or weight.numel() < MIN_NUMBERS or not can_pack():
            return 0
        num_copies = 3 if self._can_group else 2  # for products forward and back
        return num_copies * weight.nbytes

    @property
    def nbytes(self) -> int:
        """Memory that it takes, or will take once it is used."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self._weight.nbytes + bias + (self.packed_bytes if self._is_packable else 0)

    def product(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x Wᵀ + bias of x (N, inputs), without gradients; in float32 where `dtype` says so."""
        kept = self._weight
        if not isinstance(kept, Tensor) and not self.is_invariant and kept.can_multiply(x):
            return kept.product(x, self.bias, dtype or x.dtype)
        if dtype is not None and dtype != x.dtype:
            y = float32_product(x, self.weight.t())
            return y if self.bias is None else y.add_(self.bias)
        if self.is_invariant and x.is_cuda:
            return invariant.cuda_product(x, self.weight, self.bias)
        if self.is_invariant:
            kind = (self._is_packable, self._chain, *self._weight.shape)
            return tiles.in_tiles(self._product_of_tile, x, kind)
        if not self._is_packable or len(x) < self._fewest_packed_rows:
            return few_rows.linear(x, self.weight, self.bias)
        return self._packed_product(x)

    def _product_of_tile(self, x: Tensor) -> Tensor:
        if self._is_packable:
            return self._packed_product(x)
        return F.linear(x, self.weight, self.bias)

    def _packed_product(self, x: Tensor) -> Tensor:
        if self._can_group and few_rows.can_group(self.shape, self._chain, len(x)):
            if self._groups is None:
                self._groups = few_rows.Groups(self.weight, self.bias, self._chain)
            return self._groups.product(x)
        if self._forward is None:
            self._forward = [
                [_pack(piece) for piece in part.split(self._chain, dim=1)]
                for part in self.weight.split(self._outputs_at_a_time)
            ]
        if len(self._forward) == 1:
            if self._chain == self._weight.shape[1]:
                return _product(x, self._forward[0][0], self.bias)
            return _sum_of_products(x.split(self._chain, dim=1), self._forward[0], self.bias)
        y = x.new_empty(len(x), self._weight.shape[0])
        for y_of, rows in zip(y.split(_ROWS_AT_A_TIME), x.split(_ROWS_AT_A_TIME), strict=True):
            pieces = [piece.contiguous() for piece in rows.split(self._chain, dim=1)]
            self._fill(y_of, pieces, self._forward)
        return y

    def _fill(self, y: Tensor, pieces: Sequence[Tensor], parts: list[list[Tensor]]) -> None:
        """Some rows of y, part after part of the outputs."""
        size = self._outputs_at_a_time
        biases = [None] * len(parts) if self.bias is None else self.bias.split(size)
        for y_of, part, bias in zip(y.split(size, dim=1), parts, biases, strict=True):
            y_of.copy_(_sum_of_products(pieces, part, bias))

    def product_back(self, grad: Tensor) -> Tensor:
        """grad W of grad (N, outputs)."""
        if not self._is_packable or len(grad) < 2:
            return grad @ self.weight
        if self._backward is None:
            self._backward = _pack(self.weight.t())
        return _product(grad, self._backward, None)

    @property
    def _outputs_at_a_time(self) -> int:
        return _OUTPUTS_AT_A_TIME if self._is_exact else self._weight.shape[0]


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of matrices (N, inputs) and (outputs, inputs) that are in plain layout both.

    On AMD processors oneDNN does it at twice the rate of what is behind `torch.mm`, if it is worth
    a call.
    """
    if not _is_for_onednn(x, weight):
        return x @ weight.t()
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        # Of columns of a larger matrix it would take the slowest way there is.
        weight = weight.t().contiguous().t() if weight.stride(0) == 1 else weight.contiguous()
    return _product(x, weight, None)


def put_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into = left @ right."""
    if _is_for_onednn(left, right.t()):
        into.copy_(plain_product(left, right.t()))
    else:
        torch.mm(left, right, out=into)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right; `into` may be in the float32 that gradients are gathered in."""
    if left.dtype != into.dtype:
        into.add_(float32_product(left, right))
    elif not _is_for_onednn(left, right.t()):
        into.addmm_(left, right)
    elif left.shape[0] > right.shape[1]:
        # A product of few rows is quicker than one of few columns.
        into.t().add_(plain_product(right.t(), left))
    else:
        into.add_(plain_product(left, right.t()))


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    if x.numel() * weight.shape[0] < _MIN_MULTIPLICATIONS or not can_pack():
        return False
    return x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32, whatever the dtype of the two."""
    if left.dtype != torch.float32 and left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@functools.cache
def has_float32_products() -> bool:
    """Whether this release of torch leaves products of half precision in float32 on CUDA."""
    return "dtype" in torch.ops.aten.mm.overloads()


@functools.cache
def can_pack() -> bool:
    """Whether this machine's torch has the operations; they were tried on x86 only."""
    names = ("_reorder_linear_weight", "_get_mkldnn_serialized_md")
    has_them = torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )
    return has_them and platform.machine().lower() in ("x86_64", "amd64")


def _pack(weight: Tensor) -> Tensor:
    # A tensor made in inference mode could not be used in a training pass.
    with torch.inference_mode(False), torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_PACKED_FOR)


def _sum_of_products(pieces: Sequence[Tensor], packed: list[Tensor], bias: Tensor | None) -> Tensor:
    y = _product(pieces[0], packed[0], bias)
    for piece, weight in zip(pieces[1:], packed[1:], strict=True):
        y = torch.ops.mkldnn._linear_pointwise.binary(piece, y, weight, None, "add")
    return y


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn_linear()(x, packed, bias, "none", [], "")


@functools.cache
def _onednn_linear() -> Callable[..., Tensor]:
    """Found once: to look for it takes as long as a small product."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return found
