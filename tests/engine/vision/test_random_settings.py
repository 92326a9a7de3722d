"""Random legal settings of types that read images: transformers' logits, or a refusal by name.

What is drawn of the language part is what is drawn of a type without images; here are the vision
tower, the axes of positions, and the images themselves. `make fuzz` tries hundreds.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.engine.families.test_random_settings import (
    TOLERANCE,
    fields_of,
    fill,
    rounded_otherwise,
)
from tests.engine.sample.sampling_reference import tokens_of
from tests.engine.vision.test_models import images_in
from tests.support.random_settings import random_settings
from tests.support.tiny_vision import (
    IMAGE_TOKEN,
    PROCESSOR,
    VISION_END,
    VISION_START,
    image_bytes,
    with_images,
)
from tinsmith.engine.images import count_images
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.images.settings import SEEING_TYPES
from tinsmith.engine.local.model.inputs import Input, Seen
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.model_types import needed_transformers
from tinsmith.errors import EngineError
from tinsmith.types import ImageChunk, ModelInput

NUM_DRAWS = int(os.environ.get("TINSMITH_RANDOM_MODELS", "8"))


def image(width: int, height: int, seed: int) -> ImageChunk:
    return ImageChunk(data=image_bytes(width, height, seed), format="png")


def drawn(model_type: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of `config.json`, and that of the processor's file."""
    draw = random.Random(f"images {model_type} {seed}")
    fields = fields_of(f"{model_type}_text")
    text = random_settings(f"{model_type}_text", fields, seed)
    text = {name: text[name] for name in text if name in {*fields, "model_type"}}
    text["vocab_size"] = 97
    if draw.random() < 0.8:
        rope = {"rope_type": "default", "rope_theta": 1e4, **text.get("rope_parameters", {})}
        rope["mrope_section"] = draw.choice([[1, 1, 1], [2, 1, 1], [0, 2, 2], [4, 0, 3]])
        text["rope_parameters"] = rope
    tower = {
        "depth": draw.choice([1, 2, 3]),
        "hidden_size": draw.choice([16, 32]),
        "intermediate_size": draw.choice([12, 24]),
        "hidden_act": draw.choice(["gelu_pytorch_tanh", "silu", "gelu"]),
        "num_heads": draw.choice([1, 2, 4]),
        "patch_size": draw.choice([2, 4]),
        "spatial_merge_size": draw.choice([1, 2, 3]),
        "temporal_patch_size": draw.choice([1, 2]),
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": draw.choice([4, 9, 16]),
    }
    if model_type.startswith("qwen3_vl"):
        most = min(tower["depth"], text["num_hidden_layers"])
        tower["deepstack_visual_indexes"] = draw.sample(
            range(tower["depth"]), draw.randint(0, most)
        )
    settings = {
        "model_type": model_type,
        "text_config": text,
        "vision_config": tower,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": IMAGE_TOKEN + 3,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    if draw.random() < 0.6:
        settings["tie_word_embeddings"] = draw.random() < 0.5
    cell = tower["patch_size"] * tower["spatial_merge_size"]
    processor = {
        **PROCESSOR,
        "patch_size": tower["patch_size"],
        "merge_size": tower["spatial_merge_size"],
        "temporal_patch_size": tower["temporal_patch_size"],
        "size": {"shortest_edge": 2 * cell**2, "longest_edge": 12 * cell**2},
        "image_std": draw.choice([[0.5, 0.5, 0.5], [0.2, 0.3, 0.4]]),
    }
    return settings, processor


def save(settings: dict[str, Any], processor: dict[str, Any], folder: Path) -> Any:
    """A model of these settings as transformers builds it, whose files say just them."""
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(copy.deepcopy(settings))
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    fill(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_random_settings_have_the_logits_of_transformers_or_are_refused_by_name(
    number: int, tmp_path: Path
) -> None:
    model_type = SEEING_TYPES[number % len(SEEING_TYPES)]
    if needed_transformers(model_type) is not None:
        pytest.skip(f"{model_type} needs another release of transformers")
    settings, processor = drawn(model_type, number // len(SEEING_TYPES))
    reference = save(settings, processor, tmp_path)
    config = LocalEngineConfig(
        device="cpu", models={"m": str(tmp_path)}, cache_folder=tmp_path / "cache"
    )
    try:
        decoder = BaseModels(config).get("m")
    except EngineError as error:
        fields = {*fields_of(f"{model_type}_text"), *settings["text_config"]}
        named = {*fields, *settings["vision_config"], *settings, "rope_type"}
        is_named = any(name in str(error) for name in named)
        assert is_named or logits_of(reference, [TEXT], processor) is None, f"{settings}: {error}"
        return
    inputs = [count_images(each, decoder.config.images, "prompt") for each in (*PICTURES, TEXT)]
    expected = logits_of(reference, inputs, processor)
    nearby = logits_of(rounded_otherwise(reference), inputs, processor)
    assert expected is not None and nearby is not None
    found = packed_logits(decoder, inputs)
    for ours, theirs, other in zip(found, expected, nearby, strict=True):
        allowed = max(TOLERANCE * theirs.abs().max(), 10 * (theirs - other).abs().max())
        assert (ours - theirs).abs().max() <= allowed, (settings, processor)


TEXT = with_images(tokens_of(7, 5))
PICTURES = (
    with_images(tokens_of(4, 1), image(17, 11, 1), tokens_of(5, 2)),
    with_images(image(9, 25, 2), tokens_of(3, 3), image(30, 8, 3), tokens_of(6, 4)),
)


def logits_of(
    model: Any, inputs: list[ModelInput], processor: dict[str, Any]
) -> list[Tensor] | None:
    """None where the model's code does not take its own settings."""
    try:
        return [model(**images_in(each, processor)).logits[0] for each in inputs]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def packed_logits(decoder: Decoder, inputs: list[ModelInput]) -> list[Tensor]:
    rules = decoder.config.images
    assert rules is not None
    read = [Input(each, rules) for each in inputs]
    lengths = [each.length for each in inputs]
    tokens = [torch.from_numpy(each.tokens) for each in read]
    positions = [
        torch.from_numpy(each.positions(0, length))
        for each, length in zip(read, lengths, strict=True)
    ]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    seen = Seen.joined(
        (start, each.seen(0, length, decoder.vision, "owner"))
        for start, each, length in zip(starts, read, lengths, strict=True)
    )
    segments = AdapterSegments.whole(sum(lengths))
    attention = PackedAttention(decoder.config, lengths)
    with torch.no_grad():
        hidden = decoder.hidden(
            torch.cat(tokens), torch.cat(positions), attention, segments, seen=seen
        )
        return list(decoder.unembed(hidden, segments).split(lengths))
