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
from tinsmith.engine.local.model.images.kimi import load_kimi_tower
from tinsmith.engine.local.model.settings import IN_PARTS, read_settings
from tinsmith.engine.stored_tensors import weight_files
from tinsmith.errors import EngineError

_PREFIX = "visual."


def load_tower(folder: Path, rules: ImageRules, device: torch.device, dtype: torch.dtype) -> Any:
    """The tower in memory, frozen."""
    settings = read_settings(folder / "config.json")
    is_kimi = settings.get("model_type") in IN_PARTS
    tower = load_kimi_tower(folder, rules) if is_kimi else _load_qwen_tower(folder, rules)
    # Buffers stay as they are: those that positions are multiplied with want float32.
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    return tower.eval().requires_grad_(False).to(device)


def _load_qwen_tower(folder: Path, rules: ImageRules) -> Any:
    settings = transformers_config(folder)
    with torch.device("meta"):
        kind = type(build_untouched(settings, rules).base_model.visual)
    tower = kind(settings.vision_config)
    tower.set_attn_implementation("eager")
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
