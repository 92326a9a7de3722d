"""The vision tower of a model whose language part runs in our own decoder: that of `transformers`.

It is read by itself; its weights stay in full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.foreign.building import build_untouched, transformers_config
from tinsmith.engine.local.model.images.kimi import (
    build_kimi_tower,
    kimi_tower_shapes,
    load_kimi_tower,
)
from tinsmith.engine.local.model.images.vision import TOWER_ATTENTION
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import IN_PARTS, read_settings
from tinsmith.engine.stored_tensors import stored_tensors, weight_files
from tinsmith.errors import EngineError

_PREFIX = "visual."


def check_tower(folder: Path, rules: ImageRules) -> None:
    """Refuse a tower that cannot be built, or of which the files lack something, by their headers
    alone."""
    is_kimi = _is_kimi(folder)
    shapes = kimi_tower_shapes(folder) if is_kimi else _qwen_tower_shapes(folder)
    try:
        with torch.device("meta"):
            if is_kimi:
                tower: Any = build_kimi_tower(folder, rules)[0]
            else:
                tower = build_untouched(transformers_config(folder), rules).base_model.visual
    except Exception as error:  # foreign code, on settings that its authors have not seen
        raise UnsupportedModelError(
            f"its vision tower cannot be made of its vision_config ({type(error).__name__}: "
            f"{error})"
        ) from error
    for name, wanted in tower.state_dict().items():
        if shapes.get(name) != tuple(wanted.shape):
            found = f"of shape {shapes[name]}" if name in shapes else "not there"
            whole = name if is_kimi else f"{_PREFIX}{name}"
            raise EngineError(
                f"the vision tower in {folder} could not be read: {whole} is {found}, and its "
                f"vision_config wants {tuple(wanted.shape)}"
            )


def load_tower(folder: Path, rules: ImageRules, device: torch.device, dtype: torch.dtype) -> Any:
    """The tower in memory, frozen."""
    load = load_kimi_tower if _is_kimi(folder) else _load_qwen_tower
    tower = load(folder, rules)
    # Buffers stay as they are: those that positions are multiplied with want float32.
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    return tower.eval().requires_grad_(False).to(device)


def _is_kimi(folder: Path) -> bool:
    return read_settings(folder / "config.json").get("model_type") in IN_PARTS


def _qwen_tower_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {
        name.partition(_PREFIX)[2]: tuple(tensor.shape)
        for name, tensor in stored_tensors(weight_files(folder)).items()
        if _PREFIX in name
    }


def _load_qwen_tower(folder: Path, rules: ImageRules) -> Any:
    settings = transformers_config(folder)
    with torch.device("meta"):
        kind = type(build_untouched(settings, rules).base_model.visual)
    tower = kind(settings.vision_config)
    tower.set_attn_implementation(TOWER_ATTENTION)
    tensors = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                _, prefix, rest = name.partition(_PREFIX)
                if prefix:
                    tensors[rest] = file.get_tensor(name)
    try:
        tower.load_state_dict(tensors)
    except RuntimeError as error:
        raise EngineError(f"the vision tower in {folder} could not be read: {error}") from error
    return tower
