"""Settings of images that no model has are refused at start, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_vision import save_tiny_vision
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.errors import EngineError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_tiny_vision("qwen3_5", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def start(folder: Path) -> None:
    cache = folder.parent / "cache"
    models = {"m": str(folder)}
    BaseModels(LocalEngineConfig(device="cpu", models=models, cache_folder=cache)).config("m")


def change(path: Path, part: str | None, settings: dict[str, Any]) -> None:
    whole = json.loads(path.read_text())
    (whole if part is None else whole[part]).update(settings)
    path.write_text(json.dumps(whole))


NAN = float("nan")
SMALL = {"shortest_edge": 256, "longest_edge": 1024}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"patch_size": "x"}, "patch_size"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": 10**9}, "patch_size"),
        ({"merge_size": [2]}, "merge_size"),
        ({"temporal_patch_size": 1.5}, "temporal_patch_size"),
        ({"size": 7}, "shortest_edge"),
        ({"size": {**SMALL, "shortest_edge": -1}}, "shortest_edge"),
        ({"size": {**SMALL, "shortest_edge": 10**9}}, "shortest_edge"),
        ({"size": {**SMALL, "longest_edge": 10**30}}, "longest_edge"),
        ({"size": {**SMALL, "longest_edge": 63}}, "max_pixels"),
        ({"size": {**SMALL, "shortest_edge": 2048}}, "2048 to 1024 pixels"),
        ({"max_pixels": NAN}, "longest_edge"),
        ({"rescale_factor": None}, "rescale_factor"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": [0.5, 0.5, NAN]}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"image_std": ["a", "b", "c"]}, "image_std"),
    ],
)
def test_numbers_of_an_image_processor_are_what_they_can_mean(
    settings: dict[str, Any], named: str, folder: Path
) -> None:
    """Otherwise the server divides by zero as it counts, or a pixel becomes a gigabyte."""
    start(folder)
    change(folder / "preprocessor_config.json", None, settings)
    with pytest.raises(EngineError, match=named):
        start(folder)


@pytest.mark.parametrize("token", [-1, 97, 10**30, "x"])
def test_the_token_of_images_is_one_of_the_vocabulary(token: object, folder: Path) -> None:
    change(folder / "config.json", None, {"image_token_id": token})
    with pytest.raises(EngineError, match="image_token_id"):
        start(folder)


@pytest.mark.parametrize(
    "settings", [{"hidden_act": "x"}, {"hidden_size": -1}, {"num_heads": 0}, {"hidden_size": 10**9}]
)
def test_a_tower_that_cannot_be_made_is_refused_at_start(
    settings: dict[str, Any], folder: Path
) -> None:
    change(folder / "config.json", "vision_config", settings)
    with pytest.raises(EngineError, match="vision_config"):
        start(folder)


@pytest.mark.parametrize("fault", ["not there", "of shape"])
def test_a_tower_whose_files_lack_something_is_refused_at_start(fault: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.visual.merger.linear_fc2.bias"
    bias = tensors.pop(name)
    if fault == "of shape":
        tensors[name] = torch.cat([bias, bias])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(EngineError, match=f"visual.merger.linear_fc2.bias is {fault}"):
        start(folder)
