"""Tiny random models that read images, and images to give them.

They have the 97 tokens of the other tiny models. An image is cut into cells of 8 x 8 pixels, a
token each; the processor's file says so, as those of published models do.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny_families import TINY_FAMILIES, VOCAB_SIZE
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput

IMAGE_TOKEN, VISION_START, VISION_END = 90, 91, 92
CELL = 8

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Halves of a head's 16 numbers, shared by the three axes of a position.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_PARTIAL = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}

TINY_TEXT_PARTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {**_TEXT, "rope_parameters": _ROPE},
    "qwen3_vl_moe": {**_TEXT, **_EXPERTS, "rope_parameters": _ROPE},
    "qwen3_5": {**_TEXT, **TINY_FAMILIES["qwen3_5_text"], "rope_parameters": _PARTIAL},
    "qwen3_5_moe": {**_TEXT, **TINY_FAMILIES["qwen3_5_moe_text"], "rope_parameters": _PARTIAL},
}
_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": CELL // 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "initializer_range": 0.3,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": CELL // 2,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * CELL**2, "longest_edge": 16 * CELL**2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build_tiny_vision(model_type: str, **changes: Any) -> Any:
    """A `transformers` model with random weights, vectors included."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    tower = dict(_TOWER)
    if model_type.startswith("qwen3_vl"):
        tower["deepstack_visual_indexes"] = [0, 1]
    config = CONFIG_MAPPING[model_type](
        text_config={**TINY_TEXT_PARTS[model_type], **changes},
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 3,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        eos_token_id=2,
    )
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1 and name in model.state_dict():
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()


def save_tiny_vision(model_type: str, folder: Path, **changes: Any) -> Any:
    """Write such a model, with changes to its language part, as it would be published."""
    model = build_tiny_vision(model_type, **changes)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def image_bytes(width: int, height: int, seed: int = 0, **options: Any) -> bytes:
    """A PNG file of random pixels; `options` are Pillow's, `format` among them."""
    from PIL import Image

    mode = options.pop("mode", "RGB")
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, **{"format": "PNG", **options})
    return file.getvalue()


def image_chunk(columns: int, rows: int, seed: int = 0) -> ImageChunk:
    """An image of so many tokens."""
    data = image_bytes(columns * CELL, rows * CELL, seed)
    return ImageChunk(data=data, format="png", expected_tokens=columns * rows)


def with_images(*parts: list[int] | ImageChunk) -> ModelInput:
    """Tokens and images in a row."""
    chunks = [EncodedTextChunk(tokens=p) if isinstance(p, list) else p for p in parts]
    return ModelInput(chunks=chunks)
