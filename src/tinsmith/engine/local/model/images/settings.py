"""From the files of a model folder to the numbers by which the model reads images.

Counting tokens and scaling pixels go by the processor's file, which clients read too. A folder
without one serves text only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.images.kimi import read_kimi_rules
from tinsmith.engine.local.model.images.numbers import (
    MOST_SCALED_PIXELS,
    MOST_SIDE,
    deviations,
    given,
    number,
    three,
    token_of_images,
    whole,
)
from tinsmith.engine.local.model.model_types import needed_transformers
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import IN_PARTS, read_settings

logger = logging.getLogger(__name__)

SEEING_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose images are read."""

_BLIND_TYPES = ("inkling_mm_model",)
"""Types with a vision tower that are served for text."""

_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSOR = "Qwen2VLImageProcessor"
_BICUBIC = 3


def read_image_rules(folder: Path) -> ImageRules | None:
    """How the model in `folder` reads images; None where it does not."""
    settings = read_settings(folder / "config.json")
    vision = settings.get("vision_config")
    model_type = settings.get("model_type")
    if model_type not in (*SEEING_TYPES, *IN_PARTS) or not isinstance(vision, Mapping):
        return None
    processor = _processor(folder)
    if (needed := needed_transformers("qwen3_vl")) is not None:
        logger.warning("images need transformers %s; %s is served for text", needed, folder.name)
        return None
    if processor is None:
        logger.warning(
            "%s reads images, but its folder has no %s; it is served for text only",
            folder.name,
            _FILES[0],
        )
        return None
    if model_type in IN_PARTS:
        return read_kimi_rules(settings, processor)
    _refuse_others(processor)
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    rules = ImageRules(
        token_id=token_of_images(settings, "image_token_id"),
        patch_size=whole("patch_size", given(processor, "patch_size"), 1, MOST_SIDE),
        merge_size=whole("merge_size", given(processor, "merge_size"), 1, MOST_SIDE),
        frames=whole("temporal_patch_size", given(processor, "temporal_patch_size"), 1, 64),
        min_pixels=_pixels(processor.get("min_pixels"), size, "shortest_edge"),
        max_pixels=_pixels(processor.get("max_pixels"), size, "longest_edge"),
        scale=number("rescale_factor", processor.get("rescale_factor", 1 / 255)),
        mean=three(processor, "image_mean"),
        std=deviations(processor, "image_std"),
    )
    if not max(rules.cell**2, rules.min_pixels) <= rules.max_pixels:
        raise UnsupportedModelError(
            f"its image processor scales images to {rules.min_pixels} to {rules.max_pixels} "
            f"pixels, in cells of {rules.cell} x {rules.cell} (size, min_pixels, max_pixels)"
        )
    if rules.scale == 0:
        raise UnsupportedModelError("its image processor has 0 for rescale_factor")
    _compare(rules, vision)
    return rules


def model_class(model_type: str, images: ImageRules | None) -> Any:
    """What builds a model in `transformers`: with its vision tower where that is used, or where
    there is no class without."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    has_tower = model_type in (*SEEING_TYPES, *_BLIND_TYPES)
    needs_tower = images is not None or (has_tower and not is_causal)
    return AutoModelForImageTextToText if needs_tower else AutoModelForCausalLM


def _processor(folder: Path) -> Mapping[str, Any] | None:
    """Its own file, or the part of the newer one for all kinds of input."""
    for name in _FILES:
        if (folder / name).is_file():
            found = read_settings(folder / name)
            return found.get("image_processor", found) if name == _FILES[1] else found
    return None


def _refuse_others(processor: Mapping[str, Any]) -> None:
    kind = str(processor.get("image_processor_type"))
    if not kind.startswith(_PROCESSOR):
        raise UnsupportedModelError(f"its image processor is {kind!r}; known: {_PROCESSOR}")
    for name, wanted in {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": _BICUBIC,
    }.items():
        if (found := processor.get(name, wanted)) != wanted:
            raise UnsupportedModelError(f"its image processor has {name} = {found!r}")


def _compare(rules: ImageRules, vision: Mapping[str, Any]) -> None:
    """Processor and vision tower must agree about patches."""
    for name, mine in {
        "patch_size": rules.patch_size,
        "spatial_merge_size": rules.merge_size,
        "temporal_patch_size": rules.frames,
    }.items():
        if (found := vision.get(name, mine)) != mine:
            raise UnsupportedModelError(
                f"its image processor has {mine} for {name}, and its vision_config {found}"
            )


def _pixels(said: object, size: Mapping[str, Any], name: str) -> int:
    """By the older setting, where it is there, or the newer one."""
    return whole(f"size.{name}", said or given(size, name), 1, MOST_SCALED_PIXELS)
