"""The settings of published models, spelled as in their files, are read as they are meant.

Files differ from what `transformers` writes: parts are nested, ropes have older names, and there
are settings that no code looks at. Whole, on the device `meta`, a model has the adapters that the
hosted service counts; made smaller, with its ratios, ropes, heads and pattern of layers as they
are, it has the logits of `transformers`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families.test_families import packed_logits
from tests.engine.families.test_param_counts import PUBLISHED, only_train
from tests.engine.families.test_random_settings import TOLERANCE, fill, logits_of, rounded_otherwise
from tests.engine.sample.sampling_reference import tokens_of
from tinsmith.engine.image_headers import ImageSize
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.foreign.config import is_foreign
from tinsmith.engine.local.model.lora import Layout
from tinsmith.engine.local.model.model_types import needed_transformers
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.types import LoraConfig

Settings = dict[str, Any]


def qwen3_5(
    hidden: int, layers: int, heads: tuple[int, int], value_heads: int, **other: Any
) -> Settings:
    """Language part, vision tower and what is said of the whole."""
    is_tied = other.pop("is_tied", False)
    kind = "qwen3_5_moe" if "num_experts" in other else "qwen3_5"
    name = "Qwen3_5Moe" if "num_experts" in other else "Qwen3_5"
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": heads[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": is_tied,
        "use_cache": True,
        "vocab_size": 248_320,
        **other,
    }
    text["layer_types"] = text["layer_types"] * (layers // 4)
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "image_token_id": 248_056,
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": is_tied,
        "video_token_id": 248_057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "model_type": kind,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248_054,
        "vision_start_token_id": 248_053,
    }


def experts(count: int, per_token: int, inner: int) -> Settings:
    return {
        "moe_intermediate_size": inner,
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": inner,
    }


def gpt_oss(layers: int, num_experts: int) -> Settings:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 200_002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131_072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": num_experts,
        "pad_token_id": 199_999,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
    }


_DEEPSEEK: Settings = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10_000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129_280,
}

KIMI: Settings = {
    **_DEEPSEEK,
    "eos_token_id": 163_586,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262_144,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {**_DEEPSEEK["rope_scaling"], "factor": 64.0},
    "rope_theta": 50_000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163_840,
}

_NEMOTRON: Settings = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262_144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10_000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131_072,
}

_NEMOTRON_SUPER: Settings = {
    **_NEMOTRON,
    "hidden_size": 4096,
    # As many layers of each kind; their order changes no count.
    "hybrid_override_pattern": "ME" * 40 + "*" * 8,
    "intermediate_size": 2688,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
}

_QWEN3: Settings = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151_645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "max_position_embeddings": 40_960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}

MODELS: dict[str, Settings] = {
    "Qwen/Qwen3-8B": _QWEN3,
    "Qwen/Qwen3.5-4B": qwen3_5(2560, 32, (16, 4), 32, intermediate_size=9216, is_tied=True),
    "Qwen/Qwen3.5-9B": qwen3_5(4096, 32, (16, 4), 32, intermediate_size=12_288),
    # Qwen3.6-27B and Qwen3.8-27B say the same.
    "Qwen/Qwen3.5-27B": qwen3_5(5120, 64, (24, 4), 48, intermediate_size=17_408),
    # And so does Qwen3.6-35B-A3B.
    "Qwen/Qwen3.5-35B-A3B": qwen3_5(2048, 40, (16, 2), 32, **experts(256, 8, 512)),
    "Qwen/Qwen3.5-397B-A17B": qwen3_5(4096, 60, (32, 2), 64, **experts(512, 10, 1024)),
    "openai/gpt-oss-20b": gpt_oss(24, 32),
    "openai/gpt-oss-120b": gpt_oss(36, 128),
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK,
    "moonshotai/Kimi-K2-Thinking": KIMI,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _NEMOTRON_SUPER,
}
"""Without `quantization_config`, as their folders are once they have been read in full."""

COUNTS: dict[str, dict[str, int]] = {
    **{name: counts for name, (_, _, counts) in PUBLISHED.items()},
    "Qwen/Qwen3-8B": {"mlp": 1_769_472, "attn": 958_464, "unembed": 156_032},
    "Qwen/Qwen3.5-9B": {"mlp": 1_572_864, "attn": 1_130_496, "unembed": 252_416},
    "Qwen/Qwen3.5-397B-A17B": {"mlp": 96_030_720, "attn": 2_841_600, "unembed": 252_416},
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": {
        "mlp": 111_349_760,
        "attn": 1_675_264,
        "unembed": 135_168,
    },
}
"""Parameters of rank 1, as `get_lora_param_count` of the cookbook's release 0.6.1 has them."""

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "temporal_patch_size": 2,
}


def read(settings: Settings, folder: Path) -> DecoderConfig:
    """As an engine reads it, weights aside."""
    if (needed := needed_transformers(str(settings["model_type"]))) is not None:
        pytest.skip(f"it needs transformers {needed}")
    (folder / "config.json").write_text(json.dumps(settings))
    if "vision_config" in settings and needed_transformers("qwen3_vl") is None:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    config = LocalEngineConfig(device="cpu", models={"m": str(folder)}, verify_models=False)
    return BaseModels(config).config("m")


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_as_large_as_the_hosted_services(name: str, tmp_path: Path) -> None:
    config = read(MODELS[name], tmp_path)
    found = {
        part: Layout(config, LoraConfig(rank=1, **only_train(part))).size for part in COUNTS[name]
    }
    assert found == COUNTS[name]


@pytest.mark.parametrize("name", [name for name in MODELS if "Qwen3.5" in name])
def test_qwen3_5_runs_in_our_decoder_and_reads_images(name: str, tmp_path: Path) -> None:
    if needed_transformers("qwen3_vl") is not None:
        pytest.skip("images need another release of transformers")
    settings = MODELS[name]
    config = read(settings, tmp_path)
    assert not is_foreign(config)
    assert config.images is not None and config.images.token_id == 248_056
    assert config.images.grid(ImageSize(width=640, height=480)) == (15, 20)
    assert config.num_blocks == settings["text_config"]["num_hidden_layers"]
    assert config.num_layers == config.num_blocks // 4
    assert 3 not in config.recurring and {0, 1, 2} <= {*config.recurring}
    ropes = {spec.rope for spec in config.layers}
    (rope,) = ropes
    assert rope is not None
    assert (rope.theta, rope.head_dim, rope.num_plain) == (1e7, 64, 192)
    assert rope.sections == (11, 11, 10)
    assert config.is_tied == settings["tie_word_embeddings"]
    assert config.eos_token_ids == (248_044,)


def test_a_type_without_a_class_for_text_is_refused_in_a_line(tmp_path: Path) -> None:
    """A later Kimi, whose language part has another kind of layer."""
    text = {**KIMI, "model_type": "kimi_linear"}
    settings = {"model_type": "kimi_k3", "text_config": text, "vision_config": {}}
    with pytest.raises(
        UnsupportedModelError, match="nearest type that works is 'kimi_k2'"
    ) as found:
        read(settings, tmp_path)
    assert len(str(found.value)) < 800


_SMALLER = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_latent_size": 32,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "vocab_size": 97,
    "num_hidden_layers": 4,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}


def smaller(settings: Settings) -> Settings:
    """Few and narrow layers; heads by as much as leaves their ratios."""
    settings = copy.deepcopy(settings)
    text = settings.get("text_config", settings)
    text |= {name: size for name, size in _SMALLER.items() if name in text}
    for one, other, least in (
        ("num_key_value_heads", "num_attention_heads", 1),
        ("linear_num_key_heads", "linear_num_value_heads", 2),
        ("n_groups", "mamba_num_heads", 2),
    ):
        if one in text:
            text[one], text[other] = least, least * text[other] // text[one]
    if "num_experts_per_tok" in text:
        text["num_experts_per_tok"] = min(text["num_experts_per_tok"], 10)
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:4]
    if "hybrid_override_pattern" in text:
        text["hybrid_override_pattern"] = "MEM*"
    if "vision_config" in settings:
        settings["vision_config"] |= {**_TOWER, "out_hidden_size": text["hidden_size"]}
        for number, name in enumerate(sorted(n for n in settings if n.endswith("_token_id"))):
            settings[name] = 90 + number
    return settings


def build(settings: Settings) -> Any:
    """The model of these settings in `transformers`, with all that it has."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = settings["model_type"].replace("kimi_k2", "deepseek_v3")
    config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy({**settings, "model_type": kind}))
    of_type = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    torch.manual_seed(1)
    model = of_type.from_config(config, attn_implementation="eager", experts_implementation="eager")
    fill(model)
    return model


@pytest.mark.parametrize(
    "name", [n for n in MODELS if n not in ("Qwen/Qwen3.5-9B", "openai/gpt-oss-120b")]
)
def test_made_smaller_a_model_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Those that are left out have the ratios of another."""
    settings = smaller(MODELS[name])
    if (needed := needed_transformers(settings["model_type"])) is not None:
        pytest.skip(f"it needs transformers {needed}")
    reference = build(settings)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    models = {"m": str(tmp_path)}
    config = LocalEngineConfig(device="cpu", models=models, cache_folder=tmp_path / "cache")
    decoder = BaseModels(config).get("m")
    sequences = [torch.tensor(tokens_of(length, length)) % 90 for length in (9, 1, 20, 33)]
    expected = logits_of(reference, sequences)
    nearby = logits_of(rounded_otherwise(reference), sequences)
    assert expected is not None and nearby is not None
    logits = packed_logits(decoder, sequences)
    for found, theirs, other in zip(logits, expected, nearby, strict=True):
        allowed = max(TOLERANCE * theirs.abs().max(), 10 * (theirs - other).abs().max())
        assert (found - theirs).abs().max() <= allowed
