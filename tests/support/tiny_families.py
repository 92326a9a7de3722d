"""A tiny random model of each model type beyond our own decoder: one table for all tests.

Every one has 97 tokens and a few layers, and everything that makes its type what it is: routers
that choose, groups of experts, sinks, windows, latent vectors, recurrent layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tinsmith.engine.local.model.model_types import needed_transformers

VOCAB_SIZE = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DELTA_RULE: dict[str, Any] = {
    # A token's first output is a number times its value, and is normed: near zero, rounding is all.
    "initializer_range": 0.05,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SHARED_EXPERT: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

TINY_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        **_SHARED_EXPERT,
        "intermediate_size": 48,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "head_dim": 8,
    },
    "mixtral": {
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "olmoe": {"intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": {
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "deepseek_v3": {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {**_SHARED_EXPERT, **_DELTA_RULE, "intermediate_size": 48},
    "qwen3_5_text": {**_DELTA_RULE, "intermediate_size": 48},
    "qwen3_5_moe_text": {**_SHARED_EXPERT, **_DELTA_RULE},
    "inkling_text": {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 8,
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 12,
        "log_scaling_n_floor": 8,
        "route_scale": 2.0,
        "logits_mup_width_multiplier": 2.0,
    },
    "nemotron_h": {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "moe_shared_expert_intermediate_size": 16,
        "n_shared_experts": 1,
    },
}
"""By `model_type`: what differs from the settings that all have."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, dense": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "deepseek_v3, whole queries": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "n_shared_experts": 2,
            "v_head_dim": 20,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_next, dense": ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_moe, dense": ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
    "nemotron_h, no mlp": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention", "mamba", "attention"]},
    ),
    "mixtral, settings of others": (
        "mixtral",
        {"norm_topk_prob": False, "mlp_only_layers": [0], "moe_intermediate_size": 8},
    ),
    "inkling_text, plain": (
        "inkling_text",
        {
            "mlp_layer_types": ["sparse", "sparse", "sparse"],
            "log_scaling_n_floor": None,
            "swa_num_key_value_heads": 2,
            "head_dim": 8,
        },
    ),
    "olmoe, two sizes": ("olmoe", {"moe_intermediate_size": 8}),
    **{
        f"{name}, heads of a kernel's size": (
            name,
            {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        )
        for name in ("qwen3_5_text", "qwen3_next")
    },
}
"""Legal settings of a type that leave out what is usual in it, or say what it does not read."""

_TEXT_PARTS = {"inkling_mm_model": "inkling_text"}
"""Types that have another as a part, beside what sees and hears."""

_SENSES: dict[str, Any] = {
    "vision_config": {"patch_size": 4, "num_hidden_layers": 4},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    "image_token_id": 90,
    "audio_token_id": 91,
    "image_bos_token_id": 92,
    "audio_bos_token_id": 93,
}

_BUILT_AS = {"kimi_k2": "deepseek_v3"}
"""Types that `transformers` has under another name."""


def build_tiny(model_type: str, **changes: Any) -> Any:
    """A `transformers` model with random weights, vectors included."""
    if (needed := needed_transformers(model_type)) is not None:
        pytest.skip(f"{model_type} needs transformers {needed}")
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    part = _TEXT_PARTS.get(model_type)
    settings = {**_COMMON, **TINY_FAMILIES[part or model_type], **changes}
    config = CONFIG_MAPPING[model_type](
        **(settings if part is None else {"text_config": settings, **_SENSES})
    )
    torch.manual_seed(7)
    built_by = AutoModelForCausalLM if part is None else AutoModelForImageTextToText
    model = built_by.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_vector = tensor.ndim == 1 or name.endswith("_bias")
            if is_vector and name in model.state_dict():
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()


def save_tiny(model_type: str, folder: Path, **changes: Any) -> Any:
    """Write such a model, or a variant, as `transformers` does, and return it."""
    model_type, variant = VARIANTS.get(model_type, (model_type, {}))
    changes = {**variant, **changes}
    model = build_tiny(_BUILT_AS.get(model_type, model_type), **changes)
    model.save_pretrained(folder)
    if model_type in _BUILT_AS:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))
    return model
