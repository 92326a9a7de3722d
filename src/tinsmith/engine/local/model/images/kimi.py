"""How Kimi-K2.5 and K2.6 read images: the numbers of their processor, and their vision tower.

An image is laid into whole cells as large as it is, or smaller where it has too many patches, and
its parts have positions as tokens of text do. Tower and projector are those of `transformers`;
settings and weights have the published names, or those that `transformers` has for the settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.images.numbers import (
    MOST_SCALED_PIXELS,
    MOST_SIDE,
    deviations,
    given,
    three,
    token_of_images,
    whole,
)
from tinsmith.engine.local.model.images.vision import TOWER_ATTENTION
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import read_settings
from tinsmith.engine.stored_tensors import stored_tensors, weight_files
from tinsmith.errors import EngineError

_PUBLISHED = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_kernel_size",
}
"""From the published name of a setting of the tower to that of `transformers`."""

_KNOWN = {
    "mm_projector_type": "patchmerger",
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}
"""Settings that say how the tower computes, and the one way that is known."""

_DEFAULTS: Mapping[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "max_patches": 16_384,
    "size": {"max_height": 512},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Of the processor of `transformers`."""

_MOST_PATCHES_ON_A_SIDE = 2**13
"""Sixteen times what published models have."""

_RENAMED = (
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm1\.", r"tower.layers.\1.norm2."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm0\.", r"tower.layers.\1.norm1."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc1\.", r"tower.layers.\1.mlp.fc2."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc0\.", r"tower.layers.\1.mlp.fc1."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.wo\.", r"tower.layers.\1.attn.proj."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.wqkv\.", r"tower.layers.\1.attn.wqkv."),
    (r"^vision_tower\.encoder\.final_layernorm\.", "tower.final_layernorm."),
    (
        r"^vision_tower\.patch_embed\.pos_emb\.weight$",
        "tower.patch_embed.pos_emb.position_embeddings",
    ),
    (r"^vision_tower\.patch_embed\.proj\.", "tower.patch_embed.proj."),
    (r"^mm_projector\.pre_norm\.", "projector.pre_norm."),
    (r"^mm_projector\.proj\.0\.", "projector.in_proj."),
    (r"^mm_projector\.proj\.2\.", "projector.out_proj."),
)
"""Published names, and those below `KimiTower`. Of a name the first that fits."""

_JOINED = "wqkv"


def read_kimi_rules(settings: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageRules:
    """From `config.json` and the processor's file, as published or as `transformers` writes it."""
    published = processor.get("media_proc_cfg")
    if isinstance(published, Mapping):
        numbers, names = published, ("merge_kernel_size", "in_patch_limit")
        side_name, side = "patch_limit_on_one_side", given(published, "patch_limit_on_one_side")
        if published.get("fixed_output_tokens") is not None:
            raise UnsupportedModelError("its image processor has fixed_output_tokens")
    else:
        numbers, names = {**_DEFAULTS, **processor}, ("merge_size", "max_patches")
        size = given(numbers, "size")
        side_name = "size.max_height"
        side = given(size if isinstance(size, Mapping) else {}, "max_height")
    patch = whole("patch_size", given(numbers, "patch_size"), 1, MOST_SIDE)
    merge = whole(names[0], given(numbers, names[0]), 1, MOST_SIDE)
    most = whole(names[1], given(numbers, names[1]), 1, MOST_SCALED_PIXELS // patch**2)
    vision = settings["vision_config"]
    ways = {**_KNOWN, "patch_size": patch, "merge_kernel_size": [merge, merge]}
    for name, known in ways.items():
        if (found := vision.get(name, known)) != known:
            raise UnsupportedModelError(
                f"its vision_config has {name} = {found!r}, which does not go with its image "
                f"processor or is not known; expected {known!r}"
            )
    tokens = ("media_placeholder_token_id", "image_token_id")
    rules = ImageRules(
        token_id=token_of_images(
            settings, next((name for name in tokens if name in settings), tokens[0])
        ),
        patch_size=patch,
        merge_size=merge,
        frames=1,
        min_pixels=0,
        max_pixels=most * patch**2,
        max_side=whole(side_name, side, 1, _MOST_PATCHES_ON_A_SIDE) * patch,
        is_in_line=True,
        scale=1 / 255,
        mean=three(numbers, "image_mean"),
        std=deviations(numbers, "image_std"),
    )
    if rules.max_tokens * rules.cell**2 > MOST_SCALED_PIXELS:
        raise UnsupportedModelError(
            f"its image processor lays images into {rules.max_tokens} cells of {rules.cell} x "
            f"{rules.cell} pixels ({', '.join(names)})"
        )
    return rules


class KimiTower(nn.Module):  # type: ignore[misc]  # torch is unannotated here
    """Tower and projector, called as the towers of other models are."""

    def __init__(self, tower: Any, projector: Any, rules: ImageRules) -> None:
        super().__init__()
        self.tower = tower
        self.projector = projector
        self._rules = rules

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, patches: Tensor, grid_thw: Tensor, return_dict: bool = True) -> Any:
        """From the patches of an image, those of a token beside each other."""
        size, merge = self._rules.patch_size, self._rules.merge_size
        _, height, width = grid_thw[0].tolist()
        cells = patches.view(height // merge, width // merge, merge, merge, 3, size, size)
        # Row by row of the image: (rows, columns, merge, merge, …) to (patches, 3, size, size).
        in_rows = cells.transpose(1, 2).flatten(0, 3)
        merged = self.tower(in_rows, grid_thw=grid_thw, return_dict=return_dict).pooler_output
        return SimpleNamespace(pooler_output=self.projector(merged).squeeze(1))


def load_kimi_tower(folder: Path, rules: ImageRules) -> KimiTower:
    """With its weights in float32, on the CPU."""
    found, num_heads = build_kimi_tower(folder, rules)
    tensors = dict(_stored(folder, num_heads))
    try:
        found.load_state_dict(tensors)
    except RuntimeError as error:
        raise EngineError(f"the vision tower in {folder} could not be read: {error}") from error
    return found


def build_kimi_tower(folder: Path, rules: ImageRules) -> tuple[KimiTower, int]:
    """As its settings have it, without its weights; and how many heads it has."""
    from transformers import CONFIG_MAPPING
    from transformers.models.kimi_k25 import modeling_kimi_k25 as code

    settings = read_settings(folder / "config.json")
    config = CONFIG_MAPPING["kimi_k25"](**_settings(settings))
    tower = code.Kimi_K25VisionModel(config.vision_config)
    tower.set_attn_implementation(TOWER_ATTENTION)
    found = KimiTower(tower, code.Kimi_K25MultimodalProjection(config), rules)
    return found, config.vision_config.num_attention_heads


def kimi_tower_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes that the files have for it, by its own names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in stored_tensors(weight_files(folder)).items():
        new = _renamed(name)
        if new is not None and _JOINED in new:
            third = (tensor.shape[0] // 3, *tensor.shape[1:])
            shapes |= {new.replace(_JOINED, f"{part}_proj"): third for part in "qkv"}
        elif new is not None:
            shapes[new] = tuple(tensor.shape)
    return shapes


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `transformers` wants to be told of tower and projector."""
    vision = settings["vision_config"]
    names = {**_PUBLISHED, **{name: name for name in _PUBLISHED.values()}}
    mine = {name: vision[given] for given, name in names.items() if given in vision}
    width = vision.get("mm_hidden_size", settings.get("projection_hidden_size"))
    eps = vision.get("projector_ln_eps", settings.get("projection_layer_norm_eps", 1e-5))
    return {
        # Of the language part the projector needs to know how wide it is.
        "text_config": {
            "model_type": "deepseek_v3",
            "hidden_size": settings["text_config"]["hidden_size"],
        },
        "vision_config": mine,
        "projection_hidden_size": mine["hidden_size"] if width is None else width,
        "projection_layer_norm_eps": eps,
    }


def _stored(folder: Path, num_heads: int) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                new = _renamed(name)
                if new is None:
                    continue
                tensor = file.get_tensor(name).float()
                if _JOINED not in new:
                    yield new, tensor
                    continue
                for part, own in zip("qkv", tensor.chunk(3), strict=True):
                    turned = own if part == "v" else _in_halves(own, num_heads)
                    yield new.replace(_JOINED, f"{part}_proj"), turned


def _renamed(name: str) -> str | None:
    for pattern, new in _RENAMED:
        found, count = re.subn(pattern, new, name)
        if count:
            return found
    return None


def _in_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of a projection whose heads turn by halves, of one whose heads turn by neighbours."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
