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
from tinsmith.engine.local.model.model_types import needed_transformers
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import IN_PARTS, read_settings

logger = logging.getLogger(__name__)

SEEING_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose images are read."""

_BLIND_TYPES = ("inkling_mm_model",)
"""Types with a vision tower that are served for text."""

MOST_SCALED_PIXELS = 2**26
"""Of an image as the tower sees it: four times what published models have."""

_MOST_SIDE = 1024
_MOST_NUMBER = 2**53

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
    text = settings.get("text_config")
    vocabulary = (text if isinstance(text, Mapping) else settings).get("vocab_size", 2**31)
    rules = ImageRules(
        token_id=_whole("image_token_id", _given(settings, "image_token_id"), 0, vocabulary - 1),
        patch_size=_whole("patch_size", _given(processor, "patch_size"), 1, _MOST_SIDE),
        merge_size=_whole("merge_size", _given(processor, "merge_size"), 1, _MOST_SIDE),
        frames=_whole("temporal_patch_size", _given(processor, "temporal_patch_size"), 1, 64),
        min_pixels=_pixels(processor.get("min_pixels"), size, "shortest_edge"),
        max_pixels=_pixels(processor.get("max_pixels"), size, "longest_edge"),
        scale=_number("rescale_factor", processor.get("rescale_factor", 1 / 255)),
        mean=_three(processor, "image_mean"),
        std=_three(processor, "image_std"),
    )
    if not max(rules.cell**2, rules.min_pixels) <= rules.max_pixels:
        raise UnsupportedModelError(
            f"its image processor scales images to {rules.min_pixels} to {rules.max_pixels} "
            f"pixels, in cells of {rules.cell} x {rules.cell} (size, min_pixels, max_pixels)"
        )
    if 0 in (rules.scale, *rules.std):
        raise UnsupportedModelError("its image processor has 0 for rescale_factor or image_std")
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


def _given(settings: Mapping[str, Any], name: str) -> Any:
    if settings.get(name) is None:
        raise UnsupportedModelError(f"its image processor's settings have no {name!r}")
    return settings[name]


def _pixels(said: object, size: Mapping[str, Any], name: str) -> int:
    """By the older setting, where it is there, or the newer one."""
    return _whole(f"size.{name}", said or _given(size, name), 1, MOST_SCALED_PIXELS)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    number = _number(name, value)
    if not (number.is_integer() and least <= number <= most):
        raise UnsupportedModelError(
            f"its image processor's settings have {value!r} for {name}; known: {least} to {most}"
        )
    return int(number)


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < _MOST_NUMBER:
        raise UnsupportedModelError(
            f"its image processor's settings have {str(value)[:40]!r} for {name}, which is no "
            "number that it can mean"
        )
    return float(value)


def _three(settings: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = _given(settings, name)
    if not isinstance(values, list) or len(values) != len("RGB"):
        raise UnsupportedModelError(f"its image processor has no three numbers in {name!r}")
    red, green, blue = (_number(name, value) for value in values)
    return red, green, blue
