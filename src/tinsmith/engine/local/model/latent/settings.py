"""What `config.json` says of latent attention, and of the experts that come with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.engine.local.model.families import ExpertGroups, ExpertsSpec, LatentSpec
from tinsmith.engine.local.model.rope import UnsupportedModelError

OF_LATENTS = ("deepseek_v3", "kimi_k2")
"""Families that attend so; the second is the first by another name."""

LATENT_DEFAULTS: dict[str, Any] = {
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
"""What `transformers` assumes where a file leaves a setting out."""

_JUDGED_BY = 2
"""Experts that each group has at least: it is chosen by its two best."""


def read_latent(values: Mapping[str, Any]) -> LatentSpec:
    """From settings with defaults filled in."""
    heads = int(values["num_attention_heads"])
    if (others := int(values.get("num_key_value_heads", heads))) != heads:
        raise UnsupportedModelError(
            f"latent attention makes keys for all of {heads} heads, and num_key_value_heads is "
            f"{others}"
        )
    rank, rotated = values["q_lora_rank"], int(values["qk_rope_head_dim"])
    if (said := int(values.get("head_dim", rotated))) != rotated:
        raise UnsupportedModelError(
            f"a head_dim of {said} beside a qk_rope_head_dim of {rotated} is not known"
        )
    return LatentSpec(
        query_rank=None if rank is None else int(rank),
        rank=int(values["kv_lora_rank"]),
        plain_dim=int(values["qk_nope_head_dim"]),
        rotated_dim=rotated,
        value_dim=int(values["v_head_dim"]),
        is_interleaved=bool(values["rope_interleave"]),
    )


def read_grouped_experts(values: Mapping[str, Any]) -> ExpertsSpec | None:
    """None where every layer has a plain MLP."""
    count = int(values["num_hidden_layers"])
    layers = frozenset(range(int(values["first_k_dense_replace"]), count))
    if not layers:
        return None
    num_experts, per_token = int(values["n_routed_experts"]), int(values["num_experts_per_tok"])
    inner, shared = int(values["moe_intermediate_size"]), int(values["n_shared_experts"])
    groups = ExpertGroups(
        count=int(values["n_group"]),
        per_token=int(values["topk_group"]),
        scale=float(values["routed_scaling_factor"]),
    )
    size, rest = divmod(num_experts, groups.count)
    if rest or size < _JUDGED_BY or not 1 <= groups.per_token <= groups.count:
        raise UnsupportedModelError(
            f"{num_experts} experts (n_routed_experts) in {groups.count} groups (n_group), of "
            f"which a token goes to {groups.per_token} (topk_group), are not known"
        )
    if not 1 <= per_token <= size * groups.per_token:
        raise UnsupportedModelError(
            f"num_experts_per_tok is {per_token}, and the groups of a token have "
            f"{size * groups.per_token} experts"
        )
    if shared < 1:
        raise UnsupportedModelError("layers without a shared expert (n_shared_experts) are unknown")
    return ExpertsSpec(
        num_experts=num_experts,
        per_token=per_token,
        inner_size=inner,
        is_normalized=bool(values["norm_topk_prob"]),
        layers=layers,
        shared_size=inner * shared,
        shared_as="shared_experts",
        has_shared_gate=False,
        groups=groups,
    )
