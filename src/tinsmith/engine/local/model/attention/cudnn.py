"""cuDNN's attention for batches of sequences of one length, on CUDA in half precision.

Shapes: B sequences of n tokens, H query heads, K key/value heads, D head size; (B, heads, n, D)
may be views of packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.engine.local.model.attention.sinks import take_share


def is_usable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of q (B, H, n, D) over k and v (B, K, n, D)."""
    if sinks is None:
        return _forward(q, k, v, scale)[0]
    found: Tensor = _WithSinks.apply(q, k, v, scale, sinks)
    return found


def backward(
    grad: Tensor,
    kept: Sequence[Tensor],
    normalizers: Tensor,
    scale: float,
) -> Sequence[Tensor]:
    """The gradients of q, k and v; `kept` are these three and what they gave, and `normalizers`
    (B, H, n) log Σ exp(scores)."""
    length = grad.shape[2]
    grads: Sequence[Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        *kept,
        normalizers.contiguous()[..., None],
        *(grad.new_zeros((), dtype=torch.int64) for _ in range(2)),
        None,
        None,
        None,
        length,
        length,
        0.0,
        True,
        scale=scale,
    )
    return grads


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and log Σ exp(scores) of each query."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return found[0], found[1]


class _WithSinks(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    @staticmethod
    def forward(ctx, q, k, v, scale, sinks):  # type: ignore[no-untyped-def]
        out, normalizers = _forward(q, k, v, scale)
        normalizers = normalizers.reshape(q.shape[:3])
        take_share(out, normalizers, sinks)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, normalizers)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *kept, normalizers = ctx.saved_tensors
        return *backward(grad, kept, normalizers, ctx.scale), None, None
