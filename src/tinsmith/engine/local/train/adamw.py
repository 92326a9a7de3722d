"""The optimizer step: AdamW on an adapter's flat vectors.

Decoupled weight decay, bias correction and clipping of the gradient's global norm, with the
parameters that came with this step; they may differ from one step to the next. An adapter has
its own moments and its own norm, so no model feels another's step. Gradients are what
`passes` left in the adapter, and a step consumes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.engine.local.model.cpu.cores import on_all_cores
from tinsmith.engine.optimizer import (
    LARGEST_NORM,
    check_adam_params,
    check_gradient_norm,
    check_update_norm,
    step_metrics,
)
from tinsmith.errors import ValidationError
from tinsmith.types import AdamParams

CHUNK = 2**18
"""Elements that a CPU core updates at a time: what is read once more to measure the update is then
still in its cache."""

_DEVICE_CHUNK = 2**25
"""The same elsewhere; it bounds the copy that measuring the update takes."""


class Trainable(Protocol):
    """What a step needs of an adapter. All vectors are float32 of one length."""

    grad: Tensor | None
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None
    step: int

    @property
    def flat(self) -> Tensor: ...

    def drop_gradient(self) -> None: ...


class Shares(Protocol):
    """How the vectors are divided among several ranks; this one has a part of each."""

    @property
    def pieces(self) -> Sequence[tuple[slice, bool]]:
        """The vectors in pieces, in order, and whether each counts here: what several ranks have
        alike counts on one of them."""
        ...

    def total(self, number: float) -> float:
        """The sum of the ranks' numbers, the same on all."""
        ...

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        ...


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch's own
def adamw_step(
    adapter: Trainable, params: AdamParams, shares: Shares | None = None, *, chunk: int = CHUNK
) -> dict[str, float]:
    """Take one step and consume the pending gradient; returns the step's metrics.

    Where other ranks have `shares` of the adapter, norms are those of all of it.
    Without a pending gradient the step is taken with a gradient of zero: moments fade, decay
    applies, the step counts. A step that is refused leaves weights, moments and step count as they
    were, and the gradient too, unless it is the gradient that could never be used.
    """
    check_adam_params(params)
    weights = adapter.flat
    gradient = adapter.grad if adapter.grad is not None else torch.zeros_like(weights)
    exp_avg = adapter.exp_avg if adapter.exp_avg is not None else torch.zeros_like(weights)
    exp_avg_sq = adapter.exp_avg_sq if adapter.exp_avg_sq is not None else torch.zeros_like(weights)
    if shares is None:
        grad_norm, momentum = _sizes(gradient, adapter.exp_avg)
    else:
        grad_norm, momentum = _shared_sizes(gradient, adapter.exp_avg, shares)
    try:
        check_gradient_norm(grad_norm, adapter.step)
    except ValidationError:
        adapter.drop_gradient()
        raise
    scale = _clip_scale(grad_norm, params)
    state = [weights, gradient, exp_avg, exp_avg_sq]
    may_overflow = _may_overflow(max(momentum, grad_norm), adapter.step + 1, len(weights), params)
    kept = [tensor.clone() for tensor in state] if may_overflow else []
    update_norm = _update_all(state, adapter.step + 1, scale, params, shares, chunk)
    if kept:
        try:
            check_update_norm(update_norm, params, adapter.step)
        except ValidationError:
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
            raise
    adapter.exp_avg, adapter.exp_avg_sq = exp_avg, exp_avg_sq
    adapter.drop_gradient()
    adapter.step += 1
    return step_metrics(params, adapter.step, grad_norm, update_norm)


def _sizes(gradient: Tensor, exp_avg: Tensor | None) -> tuple[float, float]:
    """The gradient's norm and the largest momentum, in one transfer from the device."""
    norm = torch.linalg.vector_norm(gradient)
    largest = norm.new_zeros(()) if exp_avg is None else torch.linalg.vector_norm(exp_avg, math.inf)
    grad_norm, momentum = torch.stack([norm, largest]).tolist()
    return grad_norm, momentum


def _shared_sizes(gradient: Tensor, exp_avg: Tensor | None, shares: Shares) -> tuple[float, float]:
    """The same of the whole vectors."""
    own, momentum = _sizes(
        torch.cat([gradient[piece] for piece, counts in shares.pieces if counts]), exp_avg
    )
    return math.sqrt(shares.total(own**2)), shares.largest(momentum)


def _may_overflow(momentum: float, step: int, num_weights: int, params: AdamParams) -> bool:
    """Whether the update could be beyond all bounds; only then is it worth a copy to undo it.

    A weight moves by at most its momentum over eps, which is far from tight, and it is not decayed
    beyond zero while learning rate times decay stays below one.
    """
    rate = params.learning_rate / (1 - params.beta1**step)
    bound = rate * momentum / params.eps * math.sqrt(num_weights)
    return not bound <= LARGEST_NORM or params.learning_rate * params.weight_decay > 1


def _update_all(
    state: list[Tensor],
    step: int,
    scale: float,
    params: AdamParams,
    shares: Shares | None,
    chunk: int,
) -> float:
    """Update weights, gradient and moments in place; the norm of the change in the weights."""
    weights = state[0]
    is_cpu = weights.device.type == "cpu"
    if not is_cpu:
        chunk = _DEVICE_CHUNK
    pieces = [(slice(0, len(weights)), True)] if shares is None else shares.pieces
    parts = [
        (slice(start, min(start + chunk, piece.stop)), counts)
        for piece, counts in pieces
        for start in range(piece.start, piece.stop, chunk)
    ]

    def update(some: Sequence[slice]) -> list[Tensor]:
        # One for all of them: memory that is new costs more to touch than to compute with.
        scratch = weights.new_empty(min(chunk, len(weights)))
        return [
            _update([tensor[part] for tensor in state], scratch, step, scale, params)
            for part in some
        ]

    moved = weights.new_zeros(())
    slices = [part for part, _ in parts]
    changes = on_all_cores(update, slices) if is_cpu else update(slices)
    for change, (_, counts) in zip(changes, parts, strict=True):
        if counts:
            moved += change
    # The fused kernels do not count as a change to the weights, and copies of them go by that.
    torch.autograd.graph.increment_version(weights)
    square = moved.item() if shares is None else shares.total(moved.item())
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _clip_scale(grad_norm: float, params: AdamParams) -> float:
    """The factor that brings the gradient's norm down to the limit; 1 where there is none."""
    if params.grad_clip_norm == 0:
        return 1.0
    # The small number is torch's own, in clip_grad_norm_.
    return min(1.0, params.grad_clip_norm / (grad_norm + 1e-6))


def _update(
    state: list[Tensor], scratch: Tensor, step: int, scale: float, params: AdamParams
) -> Tensor:
    """Update one chunk in place; returns the squared length of the change."""
    weights, gradient, exp_avg, exp_avg_sq = state
    before = scratch[: len(weights)].copy_(weights)
    if scale != 1.0:
        gradient.mul_(scale)
    adamw(
        [weights],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        # The function counts the step itself.
        [torch.full((), float(step - 1), device=weights.device)],
        fused=weights.device.type in ("cpu", "cuda"),
        foreach=False,
        amsgrad=False,
        maximize=False,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
    )
    change = before.sub_(weights)
    return torch.dot(change, change)
