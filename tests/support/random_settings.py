"""Random small settings of each model type, from every field that its configuration class has.

A field is drawn from `DRAWN`, in the order of that table: what comes later may depend on what came
before. `WITHOUT_EFFECT` names those that change no logits. A test compares both with the classes,
so that a field which a later release adds is not passed over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Draw = Callable[[random.Random, dict[str, Any]], Any]


def one_of(*values: Any) -> Draw:
    return lambda draw, _: draw.choice(values)


def seldom(value: Any, *others: Any) -> Draw:
    """Mostly the first; now and then another, which may be one that is refused."""
    return lambda draw, _: draw.choice(others) if draw.random() < 0.15 else value


def _divisor_of_heads(draw: random.Random, settings: dict[str, Any]) -> int:
    heads = settings["num_attention_heads"]
    return draw.choice([n for n in range(1, heads + 1) if heads % n == 0])


def _hidden_size(draw: random.Random, settings: dict[str, Any]) -> int:
    return int(settings["num_attention_heads"]) * draw.choice([8, 12])


def _layers(draw: random.Random, settings: dict[str, Any]) -> list[int]:
    return [n for n in range(settings.get("num_hidden_layers", 4)) if draw.random() < 0.4]


def _kinds(*kinds: str) -> Draw:
    """At least one layer is of the first kind."""

    def drawn(draw: random.Random, settings: dict[str, Any]) -> list[str]:
        count = settings.get("num_hidden_layers") or draw.choice([1, 2, 4])
        found = [draw.choice(kinds) for _ in range(count)]
        found[draw.randrange(len(found))] = kinds[0]
        return found

    return drawn


def _experts(draw: random.Random, settings: dict[str, Any]) -> int:
    return int(settings.get("n_group", 1)) * draw.choice([2, 3, 4])


def _per_token(draw: random.Random, settings: dict[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next(settings[name] for name in names if name in settings)
    within = count // settings.get("n_group", 1) * settings.get("topk_group", 1)
    return draw.randint(1, min(count, within))


def _topk_group(draw: random.Random, settings: dict[str, Any]) -> int:
    return draw.randint(1, settings["n_group"])


def _value_heads(draw: random.Random, settings: dict[str, Any]) -> int:
    return int(settings["linear_num_key_heads"]) * draw.choice([1, 2, 3])


def _mamba_heads(draw: random.Random, settings: dict[str, Any]) -> int:
    return int(settings["n_groups"]) * draw.choice([1, 2])


def _rope(draw: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Every kind with what it needs, and at times what it does not."""
    kind = draw.choice(["default", "default", "linear", "llama3", "yarn", "yarn", "dynamic"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([100.0, 1e4, 1e6])}
    if kind != "default":
        rope["factor"] = draw.choice([1.0, 2.0, 8.0])
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw.choice([16, 32])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    if kind == "yarn":
        for name, value in {
            "beta_fast": draw.choice([32.0, 4.0]),
            "beta_slow": draw.choice([1.0, 2.0]),
            "attention_factor": draw.choice([0.7, 1.3]),
            "mscale": draw.choice([1.0, 0.7]),
            "mscale_all_dim": draw.choice([1.0, 0.7]),
            "truncate": draw.choice([True, False]),
        }.items():
            if draw.random() < 0.3:
                rope[name] = value
    if draw.random() < 0.1:
        rope["partial_rotary_factor"] = 0.5
    return rope


SIZES: dict[str, Draw] = {
    "num_hidden_layers": one_of(1, 2, 3, 5),
    "num_attention_heads": one_of(1, 2, 4, 6),
    "num_key_value_heads": _divisor_of_heads,
    "hidden_size": _hidden_size,
    "head_dim": one_of(8, 12, 16),
    "vocab_size": one_of(61, 97),
    "intermediate_size": one_of(8, 17, 24),
    "max_position_embeddings": one_of(64, 100, 256),
    "n_group": one_of(1, 1, 2, 4),
    "topk_group": _topk_group,
    "num_experts": _experts,
    "num_local_experts": _experts,
    "n_routed_experts": _experts,
    "num_experts_per_tok": _per_token,
    "moe_intermediate_size": one_of(8, 10),
    "shared_expert_intermediate_size": one_of(6, 12),
    "moe_shared_expert_intermediate_size": one_of(6, 12),
    "q_lora_rank": one_of(None, 8, 12),
    "kv_lora_rank": one_of(8, 12),
    "qk_rope_head_dim": one_of(4, 8),
    "qk_nope_head_dim": one_of(4, 10),
    "v_head_dim": one_of(4, 8, 20),
    "linear_num_key_heads": one_of(1, 2),
    "linear_num_value_heads": _value_heads,
    "linear_key_head_dim": one_of(4, 8),
    "linear_value_head_dim": one_of(4, 8),
    "n_groups": one_of(1, 2),
    "mamba_num_heads": _mamba_heads,
    "mamba_head_dim": one_of(4, 8),
    "ssm_state_size": one_of(4, 8),
    "chunk_size": one_of(4, 8, 64),
    "layers_block_type": _kinds("attention", "mamba", "moe", "mlp"),
    "swa_num_attention_heads": lambda _, settings: settings["num_attention_heads"],
    "swa_num_key_value_heads": _divisor_of_heads,
    "swa_head_dim": one_of(8, 12, 16),
    "sliding_window_size": one_of(3, 8, 20),
    "d_rel": one_of(2, 4),
    "rel_extent": one_of(1, 5, 40),
    "n_shared_experts": one_of(1, 2),
    "mlp_layer_types": _kinds("sparse", "dense"),
}
"""Always said: where they are left out, the model is large, or its parts do not fit."""

OPTIONS: dict[str, Draw] = {
    "hidden_act": seldom("silu", "gelu_pytorch_tanh", "gelu", "relu"),
    "hidden_activation": seldom("gelu_pytorch_tanh", "silu", "gelu"),
    "mlp_hidden_act": seldom("relu2", "silu"),
    "mamba_hidden_act": seldom("silu", "gelu"),
    "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
    "layer_norm_epsilon": one_of(1e-6, 1e-3),
    "tie_word_embeddings": one_of(True, False),
    "attention_bias": one_of(True, False),
    "mlp_bias": one_of(True, False),
    "qkv_bias": one_of(True, False),
    "rope_parameters": _rope,
    "use_sliding_window": one_of(True, False),
    "sliding_window": one_of(None, 3, 8, 20),
    "max_window_layers": one_of(0, 1, 2),
    "layer_types": _kinds("full_attention", "sliding_attention"),
    "attn_logit_softcapping": one_of(None, 2.0, 50.0),
    "final_logit_softcapping": one_of(None, 3.0, 30.0),
    "query_pre_attn_scalar": one_of(7, 16),
    "use_bidirectional_attention": seldom(False, True),
    "norm_topk_prob": one_of(True, False),
    "decoder_sparse_step": one_of(1, 2, 3),
    "mlp_only_layers": _layers,
    "clip_qkv": seldom(None, 0.5),
    "first_k_dense_replace": one_of(0, 1, 2, 9),
    "routed_scaling_factor": one_of(1.0, 2.5),
    "rope_interleave": one_of(True, False),
    "linear_conv_kernel_dim": one_of(2, 4),
    "swiglu_alpha": one_of(1.702, 1.0),
    "swiglu_limit": one_of(7.0, 0.5),
    "conv_kernel": one_of(2, 4),
    "use_conv_bias": one_of(True, False),
    "use_bias": one_of(True, False),
    "mamba_proj_bias": one_of(True, False),
    "time_step_limit": one_of([0.0, 0.5], [0.01, 100.0]),
    "expand": one_of(1, 2),
    "moe_latent_size": seldom(None, 8),
    "log_scaling_n_floor": one_of(None, 1, 8),
    "log_scaling_alpha": one_of(0.1, 1.0),
    "local_layer_ids": _layers,
    "conv_kernel_size": one_of(2, 3, 4),
    "route_scale": one_of(1.0, 8.0),
    "shared_expert_sink": one_of(True, False),
    "logits_mup_width_multiplier": one_of(1.0, 24.0),
    "rms_norm_eps_moe_gate": one_of(1e-6, 1e-3),
    "unpadded_vocab_size": one_of(None, 50, 61),
    "residual_in_fp32": one_of(True, False),
}
"""Said or left out."""

WITHOUT_EFFECT = {
    # Of training, and of how tokens are generated.
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "router_jitter_noise",
    "router_aux_loss_coef",
    "output_router_logits",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "use_cache",
    "num_logits_to_keep",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    # Of how it is computed, and on how many devices.
    "pretraining_tp",
    "mamba_ssm_cache_dtype",
    "use_mamba_kernels",
    "moe_shared_expert_overlap",
    # Layers that predict further tokens, which are no part of the model that is built.
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "mtp_layers_block_type",
    "mtp_hidden_states_first",
    "mtp_local_layer_ids",
    "chain_hidden_post_norm",
}

OF_TYPE: dict[str, dict[str, Draw]] = {
    # What a Mistral does with them is a Ministral's; there is one of each in the odd spellings.
    "mistral": {"layer_types": one_of(None)},
    "deepseek_v3": {"num_key_value_heads": lambda _, settings: settings["num_attention_heads"]},
    "kimi_k2": {"num_key_value_heads": lambda _, settings: settings["num_attention_heads"]},
    "inkling_text": {"layer_types": one_of(None)},  # `local_layer_ids` says it
    **{
        name: {
            "layer_types": _kinds("full_attention", "linear_attention"),
            "head_dim": one_of(16, 24),  # of which a quarter is rotated
        }
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
}
"""Fields that are drawn otherwise in one type."""


def random_settings(model_type: str, fields: set[str], seed: int) -> dict[str, Any]:
    """The content of a `config.json`: fields of its type, and now and then one of another."""
    draw = random.Random(f"{model_type} {seed}")
    settings: dict[str, Any] = {"model_type": model_type}
    for name, drawn in {**SIZES, **OPTIONS}.items():
        chance = 0.6 if name in fields else 0.02
        if name in fields & SIZES.keys() or (name in OPTIONS and draw.random() < chance):
            settings[name] = OF_TYPE.get(model_type, {}).get(name, drawn)(draw, settings)
    return settings
