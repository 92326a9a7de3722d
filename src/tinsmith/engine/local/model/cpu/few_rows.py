"""Matrix products with few rows on the CPU, as decoding has them.

For a handful of rows, the BLAS behind `F.linear` is bound neither by memory nor by arithmetic: it
picks a slow kernel, for a single row even a single core. The same product asked for in another form
is quicker. Two cores of an AMD EPYC, weight 3072 × 576, float32, milliseconds:

    rows         1     2     4     8    16    32    64   128
    F.linear  0.58  1.06  0.76  0.67  0.83  1.57  2.41  4.10
    here      0.14  0.41  0.27  0.50  0.71  1.09  1.95  3.33

The results differ in the last bits, and which form is taken depends on the shapes alone.

A weight that is multiplied piece by piece (`linear`) takes a call of oneDNN for each, and with few
rows a call costs as much as its product. `Groups` makes one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_ROWS = 128
_MAX_ROWS_TURNED = 4
_MIN_WEIGHT = 1 << 16
"""Numbers in a weight below which the detour costs more than it saves."""

_NUM_PARTS = 8

_ROWS_PACKED_FOR = 16
_MAX_ROWS_GROUPED = 63
"""With more, adding up the pieces costs what the calls would."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for x (N, inputs) without gradients, in the form that is quick for its N."""
    num_rows, (outputs, inputs) = len(x), weight.shape
    is_few = 0 < num_rows <= _MAX_ROWS and weight.numel() >= _MIN_WEIGHT
    is_plain = x.device.type != "cpu" or x.dtype != torch.float32
    if is_plain or not is_few or outputs % _NUM_PARTS:
        return F.linear(x, weight, bias)
    if 1 < num_rows <= _MAX_ROWS_TURNED:
        y = torch.mm(weight, x.t()).t().contiguous()
    else:
        # One product for each part of the weight; the parts run on different cores.
        parts = weight.view(_NUM_PARTS, -1, inputs)
        if num_rows == 1:
            y = torch.bmm(parts, x.t().expand(_NUM_PARTS, inputs, 1)).view(1, outputs)
        else:
            many = torch.bmm(x.expand(_NUM_PARTS, num_rows, inputs), parts.transpose(1, 2))
            y = many.transpose(0, 1).reshape(num_rows, outputs)
    return y if bias is None else y.add_(bias)


class Groups:
    """Pieces of a weight, packed, whose products are found in one call and then added up.

    To oneDNN it is a convolution with one group for each piece of the inputs, all of which have all
    outputs. The bits are those of piece after piece.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chain: int) -> None:
        """`chain` inputs are a piece."""
        outputs, inputs = weight.shape
        self._count, self._outputs = inputs // chain, outputs
        # A tensor made in inference mode could not be used in a training pass.
        with torch.inference_mode(False), torch.no_grad():
            # (outputs, pieces, chain) to (pieces · outputs, chain).
            by_piece = weight.unflatten(1, (-1, chain)).transpose(0, 1).flatten(0, 1)
            self._packed = _pack_groups(by_piece, self._count, _ROWS_PACKED_FOR)
            self._bias: Tensor | None = None
            if bias is not None:  # of the first piece, as where they are added up one by one
                self._bias = F.pad(bias, (0, (self._count - 1) * outputs))

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + bias of x (N, inputs), for an N that `can_group`."""
        num_rows = len(x)
        # (N, inputs) as an image of 1 × N points, its channels last.
        image = x.contiguous().view(1, 1, num_rows, -1).permute(0, 3, 1, 2)
        found = _onednn_convolution()(
            image, self._packed, self._bias, [0, 0], [1, 1], [1, 1], self._count, "none", [], ""
        )
        found = found.permute(0, 2, 3, 1).reshape(num_rows, self._count, self._outputs)
        return _sum_in_order(found)


@functools.cache
def _onednn_convolution() -> Callable[..., Tensor]:
    """Found once: to look for it takes as long as a small product."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._convolution_pointwise.default
    return found


def _sum_in_order(pieces: Tensor) -> Tensor:
    """(N, outputs) of (N, pieces, outputs), one after the other: `sum` has an order of its own, by
    how many there are and how many threads."""
    first, *others = pieces.unbind(1)
    total = first.contiguous()
    for piece in others:
        total += piece
    return total


@functools.cache
def can_group(shape: tuple[int, int], chain: int, num_rows: int) -> bool:
    """Whether so many rows are few, and read the layout that `Groups` packs for.

    In another layout oneDNN would rearrange the weight in every product. Which one it wants depends
    on shapes, not on numbers, so that one try tells.
    """
    if not 1 < num_rows <= _MAX_ROWS_GROUPED:
        return False
    outputs, inputs = shape
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.empty(inputs // chain * outputs, chain)
        layouts = [
            torch.ops.mkldnn._get_mkldnn_serialized_md(_pack_groups(weight, inputs // chain, rows))
            for rows in (_ROWS_PACKED_FOR, num_rows)
        ]
    return torch.equal(*layouts)


def _pack_groups(by_piece: Tensor, count: int, num_rows: int) -> Tensor:
    """A weight (pieces · outputs, chain) in oneDNN's layout for so many rows."""
    kernel = by_piece.contiguous()[:, :, None, None]
    image = [1, by_piece.shape[1] * count, 1, num_rows]
    return torch.ops.mkldnn._reorder_convolution_weight(
        kernel, [0, 0], [1, 1], [1, 1], count, image
    )
