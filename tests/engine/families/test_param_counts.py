"""Adapters of published models have as many parameters as the hosted service's.

The figures are those that `tinker_cookbook.hyperparam_utils.get_lora_param_count` of release 0.5.8
gives for rank 1, by part (`tests/compat/test_cookbook.py` asks it); the shapes those of the models'
public `config.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.local.model.family_settings import FAMILIES
from tinsmith.engine.local.model.foreign.describing import read_foreign_config
from tinsmith.engine.local.model.lora import Layout
from tinsmith.engine.local.model.model_types import needed_transformers
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import read_config
from tinsmith.types import LoraConfig

_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151_936}
_QWEN3_5 = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "vocab_size": 248_320,
}

PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            **_QWEN3_MOE,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        {"mlp": 14_450_688, "attn": 835_584, "unembed": 153_984},
    ),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (
        "qwen3_moe",
        {
            **_QWEN3_MOE,
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
            "num_key_value_heads": 4,
        },
        {"mlp": 56_598_528, "attn": 3_176_448, "unembed": 156_032},
    ),
    "openai/gpt-oss-20b": (
        "gpt_oss",
        {"num_hidden_layers": 24, "num_local_experts": 32},
        {"mlp": 6_842_880, "attn": 497_664, "unembed": 203_968},
    ),
    "openai/gpt-oss-120b": (
        "gpt_oss",
        {"num_hidden_layers": 36, "num_local_experts": 128},
        {"mlp": 40_124_160, "attn": 746_496, "unembed": 203_968},
    ),
    "deepseek-ai/DeepSeek-V3.1": (
        "deepseek_v3",
        {},
        {"mlp": 94_307_328, "attn": 2_440_000, "unembed": 136_448},
    ),
    # Its own type is not among those of transformers; the modules are DeepSeek's.
    "moonshotai/Kimi-K2-Thinking": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 1,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "topk_group": 1,
            "vocab_size": 163_840,
        },
        {"mlp": 144_583_680, "attn": 1_940_288, "unembed": 171_008},
    ),
    "Qwen/Qwen3.5-4B": (
        "qwen3_5_text",
        {
            **_QWEN3_5,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
        },
        {"mlp": 1_130_496, "attn": 897_024, "unembed": 250_880},
    ),
    "Qwen/Qwen3.5-27B": (
        "qwen3_5_text",
        {
            **_QWEN3_5,
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        },
        {"mlp": 4_325_376, "attn": 2_965_504, "unembed": 253_440},
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        "qwen3_5_moe_text",
        {
            **_QWEN3_5,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
        },
        {"mlp": 16_281_600, "attn": 1_013_760, "unembed": 250_368},
    ),
    # By what its class says where nothing else is said, and two layers without experts.
    "thinkingmachines/Inkling": (
        "inkling_text",
        {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 64},
        {"mlp": 154_705_920, "attn": 3_424_256, "unembed": 207_168},
    ),
    # Its own settings are not public: these are the round numbers that give the three figures.
    "thinkingmachines/Inkling-Small": (
        "inkling_text",
        {
            "hidden_size": 4096,
            "intermediate_size": 16_384,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 40,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 42,
            "num_key_value_heads": 8,
            "swa_num_attention_heads": 32,
            "swa_num_key_value_heads": 8,
        },
        {"mlp": 64_503_808, "attn": 1_311_744, "unembed": 205_120},
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        "nemotron_h",
        {
            "vocab_size": 131_072,
            "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_shared_experts": 1,
        },
        {"mlp": 11_346_176, "attn": 584_832, "unembed": 133_760},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_adapter_has_as_many_parameters_as_the_hosted_services(
    name: str, tmp_path: Path
) -> None:
    from transformers import CONFIG_MAPPING

    model_type, settings, expected = PUBLISHED[name]
    if (needed := needed_transformers(model_type)) is not None:
        pytest.skip(f"{model_type} needs transformers {needed}")
    CONFIG_MAPPING[model_type](**settings).save_pretrained(tmp_path)
    configs = [read_foreign_config(tmp_path, UnsupportedModelError("not one of our own"))]
    if model_type in FAMILIES:
        configs.append(read_config(tmp_path))
    for config in configs:
        found = {
            part: Layout(config, LoraConfig(rank=1, **only_train(part))).size for part in expected
        }
        assert found == expected


def only_train(part: str) -> dict[str, bool]:
    return {f"train_{name}": name == part for name in ("attn", "mlp", "unembed")}
