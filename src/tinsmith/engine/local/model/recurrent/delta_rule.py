"""The gated delta rule (arXiv 2412.06464): linear attention of Qwen3-Next and Qwen3.5.

A head's memory first fades; then what it says to the token's key is moved towards the token's
value, by a share that the token decides; then the token's query reads it:

    M ← exp(g) M;   M ← M + β k (v - kᵀM)ᵀ;   y = qᵀM

Within a chunk these steps are a triangular system, solved once (arXiv 2406.06484, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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

_NORM_EPS = 1e-6
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


def forward(module: Any, x: Tensor, states: SequenceStates, layer: int) -> Tensor:
    """The layer's output (N, d) of x (N, d); `layer` counts recurrent layers."""
    num_rows = len(x)
    mixed, gate, b, a = _project(module, x)
    past, memory = state_before(states, layer, state_shape(module), x.device)
    # Convolution of queries, keys and values: (N, 2 · keys + values).
    weight = module.conv1d.weight[:, 0].float()
    mixed, past = convolve(mixed.float(), weight, None, states.walk, past)
    keys = module.key_dim
    q, k, v = F.silu(mixed).split([keys, keys, module.value_dim], dim=1)
    # Key heads serve several value heads: all (N, H, …) from here.
    group = module.num_v_heads // module.num_k_heads
    q, k = (part.view(num_rows, -1, module.head_k_dim) for part in (q, k))
    q, k = (_normed(part).repeat_interleave(group, dim=1) for part in (q, k))
    v = v.view(num_rows, -1, module.head_v_dim)
    g = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias.float())
    inputs = (q * module.head_k_dim**-0.5, k, v, g[..., None], b.float().sigmoid()[..., None])
    y, memory = recur(step, terms, inputs, states.walk, memory)
    states.write(layer, past, memory)
    # The output gate, and back to the residual stream's size.
    y, gate = (part.reshape(-1, module.head_v_dim) for part in (y.to(x.dtype), gate))
    out: Tensor = module.out_proj(module.norm(y, gate).view(num_rows, -1))
    return out


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
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _projection(
    name: str, inputs: int, modules: tuple[str, ...], outputs: tuple[int, ...]
) -> Projection:
    return Projection(
        layer=None, name=name, part="attn", inputs=inputs, modules=modules, outputs=outputs
    )
