"""A foreign model as `transformers` builds it: its settings, and the model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.foreign.calls import (
    ATTENTION_NAME,
    attention_function,
    replace_attention,
    replace_experts,
    replace_fused_mlps,
    replace_recurrent_layers,
)
from tinsmith.engine.local.model.images.settings import model_class
from tinsmith.engine.local.model.settings import as_transformers_knows, read_settings


def build_empty(folder: Path, images: ImageRules | None) -> Any:
    """The model without memory for its weights, calling our attention."""
    return call_ours(build_untouched(transformers_config(folder), images))


def build_untouched(config: Any, images: ImageRules | None) -> Any:
    """The model of these settings with its own code, in float32, on the device of the context."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    built_by = model_class(config.model_type, images)
    text, classes = config.get_text_config(), MODEL_FOR_CAUSAL_LM_MAPPING
    # Older releases do not find the language part of a model with a vision tower by themselves
    # here.
    is_same = classes.get(type(config), None) is classes.get(type(text), None)
    if built_by is AutoModelForCausalLM and is_same:
        config = text
    model = built_by.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


def call_ours(model: Any) -> Any:
    """The model, calling our attention, experts and recurrent layers from now on."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_function)
    text_model(model).set_attn_implementation(ATTENTION_NAME)
    replace_attention(model)
    replace_fused_mlps(model)
    replace_experts(model)
    replace_recurrent_layers(model)
    return model


def text_model(model: Any) -> Any:
    """The part that reads embeddings: all below the unembedding, or beside a vision tower."""
    return getattr(model.base_model, "language_model", model.base_model)


def transformers_config(folder: Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = read_settings(folder / "config.json")
    known = as_transformers_knows(settings)
    if known is settings:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return CONFIG_MAPPING[known["model_type"]].from_dict(known)
