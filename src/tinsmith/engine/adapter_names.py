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


def hosted_module(module: str, *, is_unembedding: bool) -> str:
    """What the hosted service calls one of a model's modules."""
    return UNEMBEDDING if is_unembedding else without_text_part(module)


def without_text_part(name: str) -> str:
    return name.replace(TEXT_PART, ".")
