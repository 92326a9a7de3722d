"""Frozen weights in 8 or 4 bits: less memory, and a base model that is rounded once.

`int8` has a byte for each number, and for each row the largest magnitude. `fp8` has an 8-bit float
(E4M3) in its place, finer for small numbers and coarser for large ones. `nf4` (arXiv 2305.14314)
has four bits for each number, which stand for one of sixteen values at equal shares of a normal
distribution, and for each 64 numbers the largest magnitude: 4.5 bits in all. Products are those of
the rounded weight, made again for each (`linear`, `experts`), or read in few bits where a kernel
multiplies few rows on CUDA; adapters, gradients and moments are as exact as ever. What
is rounded depends on the weight alone, so that loading a model again gives the same one.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.config import BaseWeights

_BLOCK = 64
_HALF_BLOCK = _BLOCK // 2

_FP8_CAPABILITY = (8, 9)
"""Of the first CUDA devices that convert 8-bit floats."""

_STACK_NUMBERS = 1 << 25
"""Numbers of experts' matrices that CUDA makes full at a time: few calls, in a few hundred MiB."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What the sixteen codes stand for, in shares of a block's largest magnitude."""


class Quantized(abc.ABC):
    """A weight (outputs, inputs) in few bits."""

    kind: ClassVar[BaseWeights]
    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dense(self) -> Tensor:
        """The numbers it stands for, in the dtype of the weight that it was made of."""
        if not self.is_read_by(self.codes):
            return self.plain_dense()
        made: Tensor = kernels.module("few_bits").dense(
            self.kind,
            self.codes,
            self.scales,
            nf4_values(self.codes.device),
            self.shape[1],
            self.dtype,
        )
        return made

    @abc.abstractmethod
    def plain_dense(self) -> Tensor:
        """The same without a kernel."""

    def is_read_by(self, x: Tensor) -> bool:
        """Whether kernels where x is can read it."""
        return kernels.are_usable(x)

    def can_multiply(self, x: Tensor) -> bool:
        """Whether `product` takes x (N, inputs), and is quicker than making the weight full."""
        if x.dtype != self.dtype or x.dtype == torch.float32 or not self.is_read_by(x):
            return False
        return 0 < len(x) <= kernels.module("few_bits").MAX_ROWS and x.stride(1) == 1

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x Wᵀ + bias in `dtype`, where `can_multiply` says so: that with the full weight, but for
        the order of the additions, and that order is the same each time."""
        y: Tensor = kernels.module("few_bits").product(
            x, self.kind, self.codes, self.scales, nf4_values(x.device), bias, dtype
        )
        return y


def quantize(weight: Tensor, kind: BaseWeights) -> Tensor | Quantized:
    if kind == "full":
        return weight
    kinds: dict[str, Callable[[Tensor], Quantized]] = {
        "int8": Int8Weight,
        "fp8": Fp8Weight,
        "nf4": Nf4Weight,
    }
    return kinds[kind](weight)


class Int8Weight(Quantized):
    """127 steps to either side of zero, up to a row's largest magnitude."""

    kind = "int8"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        rows = weight.float()
        self.scales = rows.abs().amax(dim=1, keepdim=True) / 127
        # A row of zeros has no scale to divide by.
        steps = rows / self.scales.clamp_min(torch.finfo(torch.float32).tiny)
        self.codes = steps.round().to(torch.int8)

    def plain_dense(self) -> Tensor:
        return (self.codes.float() * self.scales).to(self.dtype)


class Fp8Weight(Quantized):
    """Three bits of mantissa and four of exponent, scaled so that a row's largest fits."""

    kind = "fp8"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        rows = weight.float()
        largest = torch.finfo(torch.float8_e4m3fn).max
        self.scales = rows.abs().amax(dim=1, keepdim=True) / largest
        steps = rows / self.scales.clamp_min(torch.finfo(torch.float32).tiny)
        self.codes = steps.clamp(-largest, largest).to(torch.float8_e4m3fn)

    def plain_dense(self) -> Tensor:
        return (self.codes.float() * self.scales).to(self.dtype)

    def is_read_by(self, x: Tensor) -> bool:
        has_fp8 = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= _FP8_CAPABILITY
        return has_fp8 and super().is_read_by(x)


class Nf4Weight(Quantized):
    """Two numbers in a byte, k and k + 32 of a block of 64; blocks take no notice of rows."""

    kind = "nf4"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        flat = weight.float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
        self.scales = blocks.abs().amax(dim=1, keepdim=True)
        shares = blocks / self.scales.clamp_min(torch.finfo(torch.float32).tiny)
        values = nf4_values(weight.device)
        codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2).to(torch.uint8)
        self.codes = codes[:, :_HALF_BLOCK] << 4 | codes[:, _HALF_BLOCK:]
        if self._has_whole_blocks:
            # As kernels read them: (outputs, bytes), and (outputs, blocks) with those of
            # neighbouring outputs side by side.
            self.codes = self.codes.view(len(weight), -1)
            self.scales = self.scales.view(len(weight), -1).t().contiguous().t()

    def plain_dense(self) -> Tensor:
        # Bytes to the shares of their upper and of their lower halves, to numbers (blocks, 64).
        codes = self.codes.flatten().int()
        halves = [table.index_select(0, codes) for table in _nf4_halves(codes.device)]
        numbers = torch.cat([half.view(-1, _HALF_BLOCK) for half in halves], dim=1)
        numbers.mul_(self.scales.reshape(-1, 1))
        return numbers.flatten()[: math.prod(self.shape)].view(self.shape).to(self.dtype)

    def is_read_by(self, x: Tensor) -> bool:
        return self._has_whole_blocks and super().is_read_by(x)

    @property
    def _has_whole_blocks(self) -> bool:
        """Whether no block is of two rows."""
        return self.shape[1] % _BLOCK == 0


class QuantizedStack:
    """The matrices (outputs, inputs) of all experts, made full for some experts at a time."""

    def __init__(self, weight: Tensor, kind: BaseWeights) -> None:
        """`weight` is (experts, outputs, inputs)."""
        self.shape = torch.Size((len(weight), weight.shape[2], weight.shape[1]))
        """(experts, inputs, outputs), as it is multiplied."""
        most = _STACK_NUMBERS if weight.device.type == "cuda" else 1
        self.at_once = max(1, most // math.prod(weight.shape[1:]))
        """Experts that are made full together."""
        self._parts = [quantize(part.flatten(0, 1), kind) for part in weight.split(self.at_once)]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def dense(self, first: int) -> Tensor:
        """(some, inputs, outputs): those from expert `first` on, a multiple of `at_once`."""
        part = self._parts[first // self.at_once]
        full = part if isinstance(part, Tensor) else part.dense()
        _, inputs, outputs = self.shape
        return full.view(-1, outputs, inputs).transpose(1, 2)


@functools.cache
def nf4_values(device: torch.device) -> Tensor:
    """`NF4` where it is needed."""
    return torch.tensor(NF4, device=device)


@functools.cache
def _nf4_halves(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the upper four bits of each byte stand for (256,), and the lower four."""
    values = nf4_values(device)
    return values.repeat_interleave(16), values.repeat(16)
