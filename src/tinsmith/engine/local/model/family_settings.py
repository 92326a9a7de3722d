"""What families make of settings: which they look at, and what holds where a file leaves one out.

Tables, for `settings`, which reads the files.
"""

from __future__ import annotations

from typing import Any

from tinsmith.engine.local.model.latent.settings import LATENT_DEFAULTS, OF_LATENTS

_GEMMAS = ("gemma2", "gemma3_text")
OF_DELTA_RULE = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
"""Families most of whose layers are recurrent."""

_QWENS_OF_EXPERTS = ("qwen3_moe", "qwen2_moe")

READ_BY: dict[str, tuple[str, ...]] = {
    "attn_logit_softcapping": ("gemma2",),
    "query_pre_attn_scalar": _GEMMAS,
    "hidden_activation": _GEMMAS,
    "use_bidirectional_attention": _GEMMAS,
    "attention_bias": (
        *("llama", "qwen3", "qwen3_moe", "olmoe", "gpt_oss"),
        *_GEMMAS,
        *OF_DELTA_RULE,
        *OF_LATENTS,
    ),
    "mlp_bias": ("llama",),
    "clip_qkv": ("olmoe",),
    "norm_topk_prob": (*_QWENS_OF_EXPERTS, "qwen3_next", "olmoe", *OF_LATENTS),
    "decoder_sparse_step": (*_QWENS_OF_EXPERTS, "qwen3_next"),
    "mlp_only_layers": (*_QWENS_OF_EXPERTS, "qwen3_next"),
}
"""Settings that only some families look at; in the files of others they mean nothing."""

_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

_QWEN: dict[str, Any] = {"sliding_window": 4096, "use_sliding_window": False}

_DELTA_RULE: dict[str, Any] = {
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

# What `transformers` assumes where a file leaves a setting out, as far as released models do.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10_000.0, "max_position_embeddings": 2048},
    "mistral": {
        "rope_theta": 10_000.0,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
    "qwen2": {**_QWEN, "rope_theta": 10_000.0, "max_position_embeddings": 32_768},
    "qwen3": {**_QWEN, "rope_theta": 10_000.0, "max_position_embeddings": 32_768, "head_dim": 128},
    "gemma2": {
        **_GEMMA,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
    "qwen3_5_text": {
        **_DELTA_RULE,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
    },
    "qwen3_moe": {
        **_QWEN,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "qwen2_moe": {
        **_QWEN,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    "mixtral": {
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "gpt_oss": {
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "qwen3_next": {
        **_DELTA_RULE,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3_5_moe_text": {
        **_DELTA_RULE,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "intermediate_size": 0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    **dict.fromkeys(OF_LATENTS, LATENT_DEFAULTS),
}

FAMILIES = tuple(DEFAULTS)

WITH_QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "olmoe", *OF_DELTA_RULE)

NO_O_BIAS = ("qwen2", "qwen2_moe", "mixtral")

WITH_SHARED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
WITH_EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", *WITH_SHARED_EXPERT)

INNER_SIZE = dict.fromkeys(("qwen3_moe", *WITH_SHARED_EXPERT), "moe_intermediate_size")
"""What an expert's inner columns are called, where it is not as of an MLP."""

BY_LAYER_TYPES = (
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    *OF_DELTA_RULE,
)
"""Families whose layers are what `layer_types` says, where it is there; the others do not look at
it. `transformers` takes a Mistral that has it for a Ministral."""

NEVER_SLIDING = ("llama", "olmoe", *OF_LATENTS)
"""Families that do not look at `sliding_window` either."""
