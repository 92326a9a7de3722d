"""Mamba-2 (arXiv 2405.21060): the state space layers of Nemotron-H.

A head's memory fades, takes in the token's value under a key (B) that its group shares, and is read
by a query (C) of the group. How long the token lasts (Δ) scales both the fading and the value:

    M ← exp(-AΔ) M + B (Δx)ᵀ;   y = CᵀM + Dx
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


def state_shape(module: Any) -> StateShape:
    """Of one layer, whose fields have other names than those of `delta_rule`'s."""
    if module.activation != "silu":
        raise UnsupportedModelError(
            f"its Mamba layers have the mamba_hidden_act {module.activation!r}; known: silu"
        )
    return StateShape(
        num_layers=1,
        taps=module.conv_kernel_size,
        channels=module.conv_dim,
        num_heads=module.num_heads,
        key_dim=module.ssm_state_size,
        value_dim=module.head_dim,
    )


def projections(name: str, module: Any) -> Iterator[Projection]:
    """What is adapted: of `in_proj` the rows of the gate and of x, not those of B, C and Δ."""
    hidden, inner = module.hidden_size, module.intermediate_size
    yield Projection(
        layer=None,
        name=f"{name}.in_proj",
        part="attn",
        inputs=hidden,
        modules=(f"{name}.gate_proj", f"{name}.x_proj"),
        outputs=(inner, inner),
    )
    yield Projection(
        layer=None,
        name=f"{name}.out_proj",
        part="attn",
        inputs=inner,
        modules=(f"{name}.out_proj",),
        outputs=(hidden,),
    )


def forward(module: Any, x: Tensor, states: SequenceStates, layer: int) -> Tensor:
    """The layer's output (N, d) of x (N, d); `layer` counts recurrent layers."""
    num_rows, inner, heads = len(x), module.intermediate_size, module.num_heads
    gate, mixed, dt = module.in_proj(x).split([inner, module.conv_dim, heads], dim=1)
    past, memory = state_before(states, layer, state_shape(module), x.device)
    # Convolution of x, B and C: (N, inner + 2 · groups · K).
    weight, bias = module.conv1d.weight[:, 0].float(), module.conv1d.bias
    bias = None if bias is None else bias.float()
    mixed, past = convolve(mixed.float(), weight, bias, states.walk, past)
    keys = module.n_groups * module.ssm_state_size
    values, b, c = F.silu(mixed).split([inner, keys, keys], dim=1)
    # Groups serve several heads: all (N, H, …) from here.
    values = values.view(num_rows, heads, -1)
    group = heads // module.n_groups
    b, c = (
        part.view(num_rows, module.n_groups, -1).repeat_interleave(group, dim=1) for part in (b, c)
    )
    dt = F.softplus(dt.float() + module.dt_bias.float()).clamp(*module.time_step_limit)[..., None]
    g = -module.A_log.float().exp()[:, None] * dt
    y, memory = recur(step, terms, (c, b, values * dt, g), states.walk, memory)
    states.write(layer, past, memory)
    y = y + values * module.D.float()[:, None]
    # The gate and its norm, and back to the residual stream's size.
    out: Tensor = module.out_proj(module.norm(y.flatten(1), gate).to(x.dtype))
    return out


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k (S, H, K), v (S, H, V), g (S, H, 1), memory (S, H, K, V)."""
    memory = torch.addcmul(memory * g.exp()[..., None], k[..., None], v[..., None, :])
    return (q[..., None, :] @ memory)[..., 0, :], memory


def terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Terms:
    """The same for chunks: (chunks, H, c, …)."""
    since_start, until_end, between = decays(g[..., 0])
    return Terms(
        reads=q * since_start[..., None],
        within=q @ k.transpose(2, 3) * between,
        values=v,
        foreseen=None,
        writes=k * until_end[..., None],
        decay=since_start[..., -1:, None],
    )
