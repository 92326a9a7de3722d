"""Frozen weights in 8 or 4 bits: less memory, and a base model that is rounded once.

`int8` has a byte for each number, and for each row the largest magnitude. `fp8` has an 8-bit float
(E4M3) in its place, finer for small numbers and coarser for large ones. `nf4` (arXiv 2305.14314)
has four bits for each number, which stand for one of sixteen values at equal shares of a normal
distribution, and for each 64 numbers the largest magnitude: 4.5 bits in all. Products are those of
the rounded weight, made again for each (`linear`, `experts`); adapters, gradients and moments
are as exact as ever. What is rounded depends on the weight alone, so that loading a model again
gives the same one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local.config import BaseWeights

_BLOCK = 64

_STACK_NUMBERS = 1 << 25
"""Numbers of experts' matrices that CUDA makes full at a time: few calls, in a few hundred MiB."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What the sixteen codes stand for, in shares of a block's largest magnitude."""


class Quantized(Protocol):
    """A weight (outputs, inputs) in few bits."""

    shape: torch.Size

    @property
    def nbytes(self) -> int: ...

    def dense(self) -> Tensor:
        """The numbers it stands for, in the dtype of the weight that it was made of."""
        ...


def quantize(weight: Tensor, kind: BaseWeights) -> Tensor | Quantized:
    if kind == "full":
        return weight
    kinds: dict[str, Callable[[Tensor], Quantized]] = {
        "int8": Int8Weight,
        "fp8": Fp8Weight,
        "nf4": Nf4Weight,
    }
    return kinds[kind](weight)


class Int8Weight:
    """127 steps to either side of zero, up to a row's largest magnitude."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self._dtype = weight.dtype
        rows = weight.float()
        self._scales = rows.abs().amax(dim=1, keepdim=True) / 127
        # A row of zeros has no scale to divide by.
        steps = rows / self._scales.clamp_min(torch.finfo(torch.float32).tiny)
        self._codes = steps.round().to(torch.int8)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def dense(self) -> Tensor:
        return (self._codes.float() * self._scales).to(self._dtype)


class Fp8Weight:
    """Three bits of mantissa and four of exponent, scaled so that a row's largest fits."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self._dtype = weight.dtype
        rows = weight.float()
        largest = torch.finfo(torch.float8_e4m3fn).max
        self._scales = rows.abs().amax(dim=1, keepdim=True) / largest
        steps = rows / self._scales.clamp_min(torch.finfo(torch.float32).tiny)
        self._codes = steps.clamp(-largest, largest).to(torch.float8_e4m3fn)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def dense(self) -> Tensor:
        return (self._codes.float() * self._scales).to(self._dtype)


class Nf4Weight:
    """Two numbers in a byte, in blocks of 64 that take no notice of rows."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self._dtype = weight.dtype
        flat = weight.float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
        self._scales = blocks.abs().amax(dim=1, keepdim=True)
        shares = blocks / self._scales.clamp_min(torch.finfo(torch.float32).tiny)
        values = torch.tensor(NF4, device=weight.device)
        codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2).to(torch.uint8)
        self._pairs = codes[:, 0::2] << 4 | codes[:, 1::2]

    @property
    def nbytes(self) -> int:
        return self._pairs.nbytes + self._scales.nbytes

    def dense(self) -> Tensor:
        # (blocks, 32) bytes to (blocks, 32, 2) shares to (blocks, 64) numbers.
        shares = F.embedding(self._pairs.int(), _nf4_pairs(self._pairs.device))
        numbers = shares.flatten(1) * self._scales
        return numbers.flatten()[: math.prod(self.shape)].view(self.shape).to(self._dtype)


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
def _nf4_pairs(device: torch.device) -> Tensor:
    """(256, 2): the two values that a byte stands for."""
    values = torch.tensor(NF4, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
