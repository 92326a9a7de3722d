"""The gated delta rule (arXiv 2412.06464): linear attention of Qwen3-Next and Qwen3.5.

A head's memory first fades; then what it says to the token's key is moved towards the token's
value, by a share that the token decides; then the token's query reads it:

    M ← exp(g) M;   M ← M + β k (v - kᵀM)ᵀ;   y = qᵀM

Within a chunk these steps are a triangular system, solved once (arXiv 2406.06484, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.families import Projection
from tinsmith.engine.local.model.recurrent.recurrence import (
    SequenceStates,
    StateShape,
    Terms,
    convolve,
    decays,
    recur,
    state_before,
)
from tinsmith.engine.local.model.rope import UnsupportedModelError

NORM_EPS = 1e-6
"""Beside the square of a key's or query's length, as the models were trained."""


def state_shape(module: Any) -> StateShape:
    """Of one layer."""
    if module.activation != "silu":
        raise UnsupportedModelError(
            f"its linear attention has the hidden_act {module.activation!r}; known: silu"
        )
    return StateShape(
        num_layers=1,
        taps=module.conv_kernel_size,
        channels=module.conv_dim,
        num_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
    )


def projections(name: str, module: Any) -> Iterator[Projection]:
    """What is adapted: all but the two small projections that gate the memory.

    Queries, keys and values of Qwen3.5 have an adapter each, though their weight is one. In
    Qwen3-Next that weight has the rows of each head together, with the gate's among them.
    """
    hidden, keys, values = module.hidden_size, module.key_dim, module.value_dim
    if hasattr(module, "in_proj_qkv"):
        parts = tuple(f"{name}.in_proj_{part}" for part in "qkv")
        yield _projection(f"{name}.in_proj_qkv", hidden, parts, (keys, keys, values))
        yield _projection(f"{name}.in_proj_z", hidden, (f"{name}.in_proj_z",), (values,))
    else:
        fused = f"{name}.in_proj_qkvz"
        yield _projection(fused, hidden, (fused,), (2 * keys + 2 * values,))
    yield _projection(f"{name}.out_proj", values, (f"{name}.out_proj",), (hidden,))


KERNEL_SIZES = ((128, 128),)
"""Sizes of keys and values for which there are kernels: those of the models that there are. With
some smaller ones they ended in an illegal memory access on a GPU."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The frozen weights of a layer's core: all but its projections and the output's norm."""

    conv: Tensor
    """(C, taps), with C the queries', keys' and values' channels, in this order."""

    a_log: Tensor
    """(H,), with H heads of values: logarithm of how fast each one's memory fades."""

    dt_bias: Tensor
    """(H,), added to what the token says of that."""

    num_key_heads: int
    """Each serves several heads of values."""

    key_dim: int
    """Of one head, as `value_dim`."""

    value_dim: int

    kernel_sizes: tuple[tuple[int, int], ...] = KERNEL_SIZES
    """Of keys and values: those for which kernels are used."""

    @property
    def have_kernels(self) -> bool:
        """Whether there are kernels for heads of these sizes."""
        return (self.key_dim, self.value_dim) in self.kernel_sizes

    @property
    def state_shape(self) -> StateShape:
        channels, taps = self.conv.shape
        return StateShape(
            num_layers=1,
            taps=taps,
            channels=channels,
            num_heads=len(self.a_log),
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )

    @property
    def nbytes(self) -> int:
        return self.conv.nbytes + self.a_log.nbytes + self.dt_bias.nbytes


def forward(module: Any, x: Tensor, states: SequenceStates, layer: int) -> Tensor:
    """The layer's output (N, d) of x (N, d); `layer` counts recurrent layers."""
    mixed, gate, b, a = _project(module, x)
    weights = DeltaWeights(
        conv=module.conv1d.weight[:, 0],
        a_log=module.A_log,
        dt_bias=module.dt_bias,
        num_key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
    )
    y = mix(mixed, a, b, weights, states, layer)
    # The output gate, and back to the residual stream's size.
    y, gate = (part.reshape(-1, module.head_v_dim) for part in (y.to(x.dtype), gate))
    out: Tensor = module.out_proj(module.norm(y, gate).view(len(x), -1))
    return out


def mix(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    states: SequenceStates,
    layer: int,
) -> Tensor:
    """What queries read of the memories, (N, H, V): convolution, gates, delta rule.

    `mixed` (N, C) are queries, keys and values; a and b (N, H) are what the token says of how the
    memory fades and of its own share in it.
    """
    if _have_kernels(mixed, weights):
        return _mix_by_kernels(mixed, a, b, weights, states, layer)
    past, memory = state_before(states, layer, weights.state_shape, mixed.device)
    mixed, past = convolve(mixed.float(), weights.conv.float(), None, states.walk, past)
    inputs = _gated(F.silu(mixed), a, b, weights)
    y, memory = recur(step, terms, inputs, states.walk, memory)
    states.write(layer, past, memory)
    return y


def _have_kernels(mixed: Tensor, weights: DeltaWeights) -> bool:
    is_usable = kernels.are_usable(mixed) and mixed.dtype != torch.float64
    return weights.have_kernels and is_usable


def _mix_by_kernels(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    states: SequenceStates,
    layer: int,
) -> Tensor:
    """The same in the dtype of `mixed`. No gradient goes to the states before."""
    found = states.read(layer)
    before = (None, None) if found is None else weights.state_shape.split(found)
    mixed, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (mixed, a, b))
    tables = states.walk.tables(mixed.device)
    y, memory = _Mix.apply(mixed, a, b, weights, tables, *before)
    num_past = weights.conv.shape[1] - 1
    convolution = kernels.module("short_convolution")
    past = convolution.last_inputs(mixed.detach(), tables.sequences, before[0], num_past)
    states.write(layer, past, memory)
    return y


class _Mix(torch.autograd.Function):  # type: ignore[misc]  # torch is unannotated here
    """`kernels.delta_rule`. Only what came in is kept; the rest is computed again."""

    @staticmethod
    def forward(ctx, mixed, a, b, weights, tables, past, memory):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(mixed, a, b)
        ctx.given = (weights, tables, past, memory)
        y, after = kernels.module("delta_rule").forward(mixed, a, b, *ctx.given)
        ctx.mark_non_differentiable(after)
        ctx.set_materialize_grads(False)
        return y, after

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        rule = kernels.module("delta_rule")
        return *rule.backward(grad, *ctx.saved_tensors, *ctx.given), None, None, None, None


def _gated(mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights) -> tuple[Tensor, ...]:
    """The rule's inputs (N, H, …): queries, keys, values, the memory's fading and the shares."""
    num_rows, num_heads = a.shape
    keys = weights.num_key_heads * weights.key_dim
    q, k, v = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], dim=1)
    # Key heads serve several value heads: all (N, H, …) from here.
    group = num_heads // weights.num_key_heads
    q, k = (part.view(num_rows, -1, weights.key_dim) for part in (q, k))
    q, k = (_normed(part).repeat_interleave(group, dim=1) for part in (q, k))
    v = v.view(num_rows, -1, weights.value_dim)
    g = -weights.a_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float())
    return q * weights.key_dim**-0.5, k, v, g[..., None], b.float().sigmoid()[..., None]


def step_in_place(
    mixed: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, states: Tensor, numbers: Tensor
) -> Tensor:
    """`mix` for one token of each sequence, without gradients: (B, H, V).

    `states` (R, n) are those of the layer, in the form of `StateShape.split`. `numbers` (B,) say
    which is a row's, and that is changed in place; the last one is for rows of negative numbers.
    Nothing here waits for the device.
    """
    if _have_kernels(mixed, weights):
        kernel = kernels.module("delta_step").step_in_place
        found: Tensor = kernel(mixed, a, b, weights, states, numbers, 0)
        return found
    rows = torch.where(numbers < 0, len(states) - 1, numbers)
    past, memory = weights.state_shape.split(states[rows])
    seen = torch.cat([past, mixed.float()[:, None]], dim=1)
    convolved = (seen * weights.conv.float().t()).sum(dim=1)
    q, k, v, g, beta = _gated(F.silu(convolved), a, b, weights)
    y, memory = step(q, k, v, g, beta, memory)
    states[rows] = torch.cat([seen[:, 1:].flatten(1), memory.flatten(1)], dim=1)
    return y


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q, k (S, H, K), v (S, H, V), g and beta (S, H, 1), memory (S, H, K, V)."""
    memory = memory * g.exp()[..., None]
    said = (k[..., None, :] @ memory)[..., 0, :]
    memory = torch.addcmul(memory, k[..., None], ((v - said) * beta)[..., None, :])
    return (q[..., None, :] @ memory)[..., 0, :], memory


def terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Terms:
    """The same for chunks: (chunks, H, c, …)."""
    since_start, until_end, between = decays(g[..., 0])
    # What each token writes depends on what those before it wrote: a system with ones on the
    # diagonal, solved for the values and for the keys that read the memory at the chunk's start.
    system = (beta * k) @ k.transpose(2, 3) * between
    right = torch.cat([beta * v, beta * k * since_start[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, foreseen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return Terms(
        reads=q * since_start[..., None],
        within=q @ k.transpose(2, 3) * between,
        values=values,
        foreseen=foreseen,
        writes=k * until_end[..., None],
        decay=since_start[..., -1:, None],
    )


def _project(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values (N, C), the output gate (N, H · V), and b and a (N, H)."""
    if hasattr(module, "in_proj_qkv"):
        return (
            module.in_proj_qkv(x),
            module.in_proj_z(x),
            module.in_proj_b(x),
            module.in_proj_a(x),
        )
    qkvz, ba = module.in_proj_qkvz(x)[None], module.in_proj_ba(x)[None]
    q, k, v, gate, b, a = module.fix_query_key_value_ordering(qkvz, ba)
    mixed = torch.cat([part[0].flatten(1) for part in (q, k, v)], dim=1)
    return mixed, gate[0].flatten(1), b[0], a[0]


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _projection(
    name: str, inputs: int, modules: tuple[str, ...], outputs: tuple[int, ...]
) -> Projection:
    return Projection(
        layer=None, name=name, part="attn", inputs=inputs, modules=modules, outputs=outputs
    )
