"""Log-probabilities of chosen tokens from logits, and their gradient, one row at a time.

Logits are read once forward, and once backward, where their gradient is written, in whatever dtype
the product left them; the arithmetic is in float32. There is one target a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.engine.local.kernels.launching import Launcher

_BLOCK = 8192


def target_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log softmax(logits)[target] and the normalizer, (M,) float32 each, for logits (M, V)."""
    values = logits.new_empty(len(logits), dtype=torch.float32)
    normalizers = torch.empty_like(values)
    _TARGET_LOGPROBS(
        (len(logits), 1, 1),
        (logits, targets, values, normalizers, logits.shape[1]),
        (_BLOCK,),
        num_warps=8,
    )
    return values, normalizers


def normalizers(logits: Tensor) -> Tensor:
    """log Σ exp(logits) of each row of logits (M, V): the same as with targets, to the bit."""
    return target_logprobs(logits, logits.new_zeros(len(logits), dtype=torch.int64))[1]


def gradient(
    logits: Tensor, targets: Tensor, normalizers: Tensor, grad: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient for logits (M, V), given that for the values, (M,) float32: in the place of the
    logits where it is of their dtype."""
    num_columns = logits.shape[1]
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    _GRADIENT(
        (len(logits), -(-num_columns // _BLOCK), 1),
        (logits, targets, normalizers, grad, out, num_columns),
        (_BLOCK,),
        num_warps=8,
    )
    return out


@triton.jit
def _target_logprobs(logits, targets, values, normalizers, size, BLOCK: tl.constexpr):
    # One program per row of logits (M, V); each of BLOCK lanes has a running maximum and sum.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # Online softmax: one pass over the vocabulary, BLOCK logits at a time.
    for at in range(0, size, BLOCK):
        inside = at + columns < size
        part = tl.load(logits + row * size + at + columns, mask=inside, other=float("-inf"))
        part = part.to(tl.float32)
        larger = tl.maximum(largest, part)
        # Where nothing was seen yet both are minus infinity, and their difference is NaN.
        seen = larger > float("-inf")
        safe = tl.where(seen, larger, 0.0)
        total = total * tl.exp(largest - safe) + tl.exp(part - safe)
        largest = larger
    # Join the lanes: log Σ exp(logits), a scalar.
    top = tl.max(largest, axis=0)
    normalizer = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
    # log p(target) = logit - log Σ exp.
    target = tl.load(targets + row)
    chosen = tl.load(logits + row * size + target).to(tl.float32)
    tl.store(values + row, chosen - normalizer)
    tl.store(normalizers + row, normalizer)


@triton.jit
def _gradient(logits, targets, normalizers, grad, out, size, BLOCK: tl.constexpr):
    # One program per row and BLOCK columns; d logits = (1[target] - softmax) · grad.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    upstream, normalizer = tl.load(grad + row), tl.load(normalizers + row)
    at = row * size + columns
    part = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    tl.store(out + at, (chosen - tl.exp(part - normalizer)) * upstream, mask=inside)


_TARGET_LOGPROBS, _GRADIENT = Launcher(_target_logprobs), Launcher(_gradient)
