"""What the files of an adapter and the tensors in them are called.

Checkpoints have the hosted service's names: the unembedding is `model.unembed_tokens` in every
model, and the text part of a model that also sees images has no name of its own. PEFT has the
model's own names.
"""

from __future__ import annotations

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MANIFEST = "tinsmith.json"

PREFIX = "base_model.model."
"""What both put before a module's name."""

UNEMBEDDING = "model.unembed_tokens"
TEXT_PART = ".language_model."

FUSED = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj": ("gate_proj", "x_proj"),
}
"""Modules that are one matrix in the model and several in an adapter, in the order of their
rows."""

GATED_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
PLAIN_EXPERTS = {"w1": "up_proj", "w2": "down_proj"}
"""What the model calls the matrices of an expert, with a gate and without."""


def hosted_module(module: str, *, is_unembedding: bool) -> str:
    """What the hosted service calls one of a model's modules."""
    return UNEMBEDDING if is_unembedding else without_text_part(module)


def without_text_part(name: str) -> str:
    return name.replace(TEXT_PART, ".")


def fused_parts(name: str) -> list[str]:
    """From the name of a fused module's A or B to the names that an adapter has for its parts."""
    *layer, module, letter, weight = name.split(".")
    return [".".join([*layer, part, letter, weight]) for part in FUSED.get(module, ())]
