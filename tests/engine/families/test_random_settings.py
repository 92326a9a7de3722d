"""Random legal settings of every type: the logits of transformers, or a refusal by a field's name.

A few dozens here; `make fuzz` tries hundreds. A number of a draw gives the same settings each time.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from tests.engine.families.test_families import packed_logits
from tests.support.random_settings import OPTIONS, SIZES, WITHOUT_EFFECT, random_settings
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.images.settings import SEEING_TYPES
from tinsmith.engine.local.model.model_types import MODEL_TYPES, needed_transformers
from tinsmith.engine.local.model.settings import IN_PARTS
from tinsmith.errors import EngineError

NUM_DRAWS = int(os.environ.get("TINSMITH_RANDOM_MODELS", "34"))
TOLERANCE = 1e-5
"""Of the largest logit; or ten times what changes in the reference when its weights change in their
last bits, where that is more: near zero, the norms of recurrent layers magnify rounding."""

TYPES = [
    each.name
    for each in MODEL_TYPES
    if each.name not in (*SEEING_TYPES, *IN_PARTS, "inkling_mm_model")
]
"""Those with images are drawn beside their other tests; those in parts have the language part of
another, as Inkling has with what it sees."""

_BUILT_AS = {"kimi_k2": "deepseek_v3"}


def fields_of(model_type: str) -> set[str]:
    """What the configuration class of a type has beyond what all have."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    of_type = CONFIG_MAPPING[_BUILT_AS.get(model_type, model_type)]
    return {field.name for field in dataclasses.fields(of_type)} - common


@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_of_a_type_is_drawn_or_known_to_have_no_effect(model_type: str) -> None:
    assert fields_of(model_type) - {*SIZES, *OPTIONS} - WITHOUT_EFFECT == set()


def save(settings: dict[str, Any], folder: Path) -> Any:
    """A model of these settings as transformers builds it, whose `config.json` says just them."""
    built_as = _BUILT_AS.get(settings["model_type"], settings["model_type"])
    config = CONFIG_MAPPING[built_as].from_dict(copy.deepcopy({**settings, "model_type": built_as}))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    fill(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    return model


def fill(model: Any) -> None:
    """Random weights that keep the size of what passes through, vectors included."""
    model.eval().requires_grad_(False)
    for tensor in model.parameters():
        if tensor.ndim > 1:
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
        else:
            tensor.add_(torch.randn_like(tensor) * 0.2)


@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_random_settings_have_the_logits_of_transformers_or_are_refused_by_name(
    number: int, tmp_path: Path
) -> None:
    model_type = TYPES[number % len(TYPES)]
    if needed_transformers(model_type) is not None:
        pytest.skip(f"{model_type} needs another release of transformers")
    settings = random_settings(model_type, fields_of(model_type), number // len(TYPES))
    reference = save(settings, tmp_path)
    config = LocalEngineConfig(
        device="cpu", models={"m": str(tmp_path)}, cache_folder=tmp_path / "cache"
    )
    generator = torch.Generator().manual_seed(number)
    vocab_size = settings["vocab_size"]
    sequences = [
        torch.randint(0, vocab_size, (length,), generator=generator) for length in (9, 1, 20, 33)
    ]
    expected = logits_of(reference, sequences)
    try:
        decoder = BaseModels(config).get("m")
    except EngineError as error:
        named = [*fields_of(model_type), *settings, "rope_type", "partial_rotary_factor"]
        is_named = any(name in str(error) for name in named)
        assert is_named or expected is None, f"{settings}: {error}"
        return
    nearby = logits_of(rounded_otherwise(reference), sequences)
    if expected is None or nearby is None:
        return  # `transformers` cannot run it, because of a setting that we do not look at
    logits = [each[:, : expected[0].shape[1]] for each in packed_logits(decoder, sequences)]
    for found, theirs, other in zip(logits, expected, nearby, strict=True):
        allowed = max(TOLERANCE * theirs.abs().max(), 10 * (theirs - other).abs().max())
        assert (found - theirs).abs().max() <= allowed, settings


def logits_of(model: Any, sequences: list[Tensor]) -> list[Tensor] | None:
    """None where the model's code does not take its own settings."""
    try:
        return [model(sequence[None]).logits[0] for sequence in sequences]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def rounded_otherwise(model: Any) -> Any:
    model = copy.deepcopy(model)
    for tensor in model.parameters():
        tensor.mul_(1 + 1e-7 * torch.randn_like(tensor))
    return model
