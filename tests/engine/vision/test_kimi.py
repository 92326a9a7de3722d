"""Images of Kimi-K2.5 and K2.6: counted, cut and seen as by the published processor and tower.

A tiny model of `transformers` is written in the published layout by plain loops; that the layout is
the one which `transformers` reads as this model is a test of its own.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.families.test_kimi import whole_settings
from tests.engine.sample.sampling_reference import CPU, answers, tokens_of
from tests.engine.train.training_reference import RELATIVE, assert_close, succeed
from tests.engine.vision.test_models import (
    VisionReference,
    assert_trainer_agrees,
    datum_of,
    job_of,
    tokens_in,
)
from tests.engine.vision.test_vision import Largest, vision_of
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_vision import IMAGE_TOKEN, image_bytes, with_images
from tinsmith.engine.image_headers import ImageSize
from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.images.pixels import read_patches
from tinsmith.engine.local.model.images.settings import read_image_rules
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.model.model_types import needed_transformers
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import ImageChunk, ModelInput

pytestmark = pytest.mark.skipif(
    needed_transformers("qwen3_vl") is not None, reason="needs a transformers with its tower"
)

NewAdapter = Callable[..., Adapter]
PATCH, MERGE, HEADS, WIDTH = 4, 2, 2, 16
LIMITS = {"in_patch_limit": 64, "patch_limit_on_one_side": 20}

PROCESSOR: dict[str, Any] = {
    "auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"},
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        **LIMITS,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.4, 0.3],
        "in_patch_limit_each_frame": 4096,
        "merge_kernel_size": MERGE,
        "patch_size": PATCH,
        "temporal_merge_kernel_size": 4,
    },
}
VISION = {
    "init_pos_emb_height": 6,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 6,
    "merge_kernel_size": [MERGE, MERGE],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": WIDTH,
    "mm_projector_type": "patchmerger",
    "patch_size": PATCH,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 32,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": WIDTH,
    "vt_intermediate_size": 24,
    "vt_num_attention_heads": HEADS,
    "vt_num_hidden_layers": 2,
}


def build() -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text = {
        **TINY_FAMILIES["deepseek_v3"],
        "model_type": "deepseek_v3",
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "patch_size": PATCH,
        "pos_emb_height": 6,
        "pos_emb_width": 6,
        "initializer_range": 0.3,
    }
    config = CONFIG_MAPPING["kimi_k25"](
        text_config=text,
        vision_config=vision,
        projection_hidden_size=WIDTH,
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            if "position_embeddings" in name:
                tensor.normal_()
    return model.eval()


def by_neighbours(rows: Tensor) -> Tensor:
    """Rows whose heads turn by halves, in the order in which neighbours turn."""
    size = len(rows) // HEADS
    order = [
        head * size + pair + half * (size // 2)
        for head in range(HEADS)
        for pair in range(size // 2)
        for half in range(2)
    ]
    return rows[order]


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of such a model by their published names."""
    found: dict[str, Tensor] = {}
    renamed = {
        "model.mm_projector.in_proj": "mm_projector.proj.0",
        "model.mm_projector.out_proj": "mm_projector.proj.2",
        "model.mm_projector.pre_norm": "mm_projector.pre_norm",
        "model.vision_tower.patch_embed.pos_emb.position_embeddings": (
            "vision_tower.patch_embed.pos_emb.weight"
        ),
        "model.vision_tower.patch_embed": "vision_tower.patch_embed",
        "model.vision_tower.layers": "vision_tower.encoder.blocks",
        "model.vision_tower.final_layernorm": "vision_tower.encoder.final_layernorm",
        "model.language_model": "language_model.model",
        "lm_head": "language_model.lm_head",
    }
    of_tower = {"norm1": "norm0", "norm2": "norm1", "mlp.fc1": "mlp.fc0", "mlp.fc2": "mlp.fc1"}
    for name, tensor in state.items():
        start = next(start for start in renamed if name.startswith(start))
        new = renamed[start] + name.removeprefix(start)
        if ".experts." in name:
            stem = new.rpartition(".")[0]
            for expert, matrix in enumerate(tensor):
                parts = {"down_proj": matrix}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                found |= {f"{stem}.{expert}.{each}.weight": m for each, m in parts.items()}
        elif ".attn.proj." in new:
            found[new.replace("attn.proj", "wo")] = tensor
        elif ".attn.q_proj." in new:
            k, v = (state[name.replace("q_proj", f"{each}_proj")] for each in "kv")
            joined = torch.cat([by_neighbours(tensor), by_neighbours(k), v])
            found[new.replace("attn.q_proj", "wqkv")] = joined
        elif "vision_tower.encoder.blocks" in new and ".attn." not in new:
            old = next(each for each in of_tower if f".{each}." in new)
            found[new.replace(f".{old}.", f".{of_tower[old]}.")] = tensor
        elif ".attn.k_proj." not in new and ".attn.v_proj." not in new:
            found[new] = tensor
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def save(folder: Path) -> Any:
    model = build()
    folder.mkdir(exist_ok=True)
    save_file(published(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    text = model.config.text_config.to_dict()
    settings = whole_settings(text) | {
        "dtype": "float32",
        "media_placeholder_token_id": IMAGE_TOKEN,
        "vision_config": VISION,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder, Path]:
    folder = tmp_path_factory.mktemp("kimi")
    model = save(folder)
    config = LocalEngineConfig(device="cpu", models={"tiny": str(folder)})
    return model, BaseModels(config).get("tiny"), folder


def sizes_of(width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """As the published processor has it: what an image is scaled to, and what it is padded to."""
    most, side = LIMITS["in_patch_limit"], LIMITS["patch_limit_on_one_side"]
    patches = max(1.0, width // PATCH) * max(1.0, height // PATCH)
    scale = min(1.0, math.sqrt(most / patches), side * PATCH / width, side * PATCH / height)
    drawn = [min(max(1, int(each * scale)), side * PATCH) for each in (width, height)]
    cell = PATCH * MERGE
    whole = [each + (cell - each % cell) % cell for each in drawn]
    return (drawn[0], drawn[1]), (whole[0], whole[1])


def patches_of(data: bytes) -> tuple[Tensor, tuple[int, int]]:
    """(patches, 3, size, size), row by row of the image, and how many rows and columns."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    drawn, (width, height) = sizes_of(*image.size)
    pixels = np.zeros((height, width, 3), np.float32)
    pixels[: drawn[1], : drawn[0]] = np.asarray(image.resize(drawn, Image.Resampling.BICUBIC))
    values = (pixels / 255 - np.float32([0.5, 0.5, 0.5])) / np.float32([0.5, 0.4, 0.3])
    found = [
        values[top : top + PATCH, left : left + PATCH].transpose(2, 0, 1)
        for top in range(0, height, PATCH)
        for left in range(0, width, PATCH)
    ]
    return torch.from_numpy(np.stack(found)), (height // PATCH, width // PATCH)


def chunk(width: int, height: int, seed: int) -> ImageChunk:
    _, (columns, rows) = sizes_of(width, height)
    cell = PATCH * MERGE
    count = (columns // cell) * (rows // cell)
    return ImageChunk(data=image_bytes(width, height, seed), format="png", expected_tokens=count)


INPUTS = [
    with_images(tokens_of(4, 1), chunk(24, 16, 1), tokens_of(5, 2)),
    with_images(chunk(13, 30, 2), tokens_of(3, 3), chunk(70, 33, 3), tokens_of(6, 4)),
    with_images(tokens_of(7, 5)),
    with_images(tokens_of(2, 6), chunk(300, 5, 4), tokens_of(1, 7)),
]


def given(model_input: ModelInput) -> dict[str, Tensor]:
    """What the model of `transformers` is given."""
    tokens = torch.tensor([tokens_in(model_input)])
    files = [each.data for each in model_input.chunks if isinstance(each, ImageChunk)]
    if not files:
        return {"input_ids": tokens}
    patches, grids = zip(*(patches_of(file) for file in files), strict=True)
    return {
        "input_ids": tokens,
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in grids]),
    }


def test_losses_and_gradients_are_those_of_transformers(
    family: tuple[Any, Decoder, Path], new_adapter: NewAdapter
) -> None:
    """Of images that fill their cells, that do not, and that are too large; packed together."""
    model, decoder, _ = family
    adapter = new_adapter(decoder)
    data = [datum_of(each, seed) for seed, each in enumerate(INPUTS)]
    reference = VisionReference(model, adapter)
    reference.given = {each.length: given(each) for each in INPUTS}
    loss, _, expected = reference.run(data)
    output = succeed(decoder, data, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    assert adapter.grad is not None
    assert_close(adapter.grad, expected, 3 * RELATIVE)


def test_sampled_tokens_have_the_logprobs_of_the_trainer(
    family: tuple[Any, Decoder, Path], new_adapter: NewAdapter
) -> None:
    """Also where prompts are read in small parts."""
    _, decoder, _ = family
    adapter = new_adapter(decoder)
    jobs = [
        (job_of(str(n), prompt, num_samples=2, scope=str(n)), adapter)
        for n, prompt in enumerate(INPUTS[:2])
    ]
    for prefill_tokens in (None, 4):
        generator = Generator(decoder, CPU, prefill_tokens=prefill_tokens)
        for name, response in answers(generator, jobs).items():
            assert_trainer_agrees(decoder, INPUTS[int(name)], response, adapter)


def test_transformers_reads_the_published_layout_as_this_model(
    family: tuple[Any, Decoder, Path],
) -> None:
    model, _, folder = family
    read = type(model).from_pretrained(
        folder, config=model.config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        found, expected = (each(**given(INPUTS[1])).logits for each in (read, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "height"), [(24, 16), (9, 9), (70, 33), (5, 300), (1, 1)])
def test_patches_are_those_of_the_published_processor(
    family: tuple[Any, Decoder, Path], width: int, height: int
) -> None:
    rules = family[1].config.images
    assert rules is not None
    data = image_bytes(width, height)
    found, (rows, columns) = read_patches(ImageChunk(data=data, format="png"), rules)
    expected, grid = patches_of(data)
    assert grid == (rows * MERGE, columns * MERGE)
    by_token = (
        expected.reshape(rows, MERGE, columns, MERGE, -1).transpose(1, 2).reshape(found.shape)
    )
    np.testing.assert_allclose(found, by_token, atol=1e-6)


def test_an_image_takes_memory_by_its_size_and_not_by_the_square(
    family: tuple[Any, Decoder, Path],
) -> None:
    """Written out, the scores of 16,384 patches take 17 GB for 16 heads."""
    vision, grid = vision_of(family[1]), (32, 32)
    num_patches, patch = MERGE**2 * grid[0] * grid[1], 3 * PATCH**2
    with Largest() as largest:
        vision.look(torch.zeros(num_patches, patch), grid)
    assert num_patches * patch <= largest.numel < num_patches**2 // 8


def test_no_image_has_more_tokens_than_a_check_says(family: tuple[Any, Decoder, Path]) -> None:
    rules = family[1].config.images
    assert rules is not None
    draw, largest = random.Random(1), 0
    for _ in range(3000):
        size = ImageSize(draw.randint(1, 200), draw.randint(1, 200))
        _, (width, height) = sizes_of(*size)
        cell = PATCH * MERGE
        assert rules.grid(size) == (height // cell, width // cell)
        largest = max(largest, math.prod(rules.grid(size)))
    assert largest <= rules.max_tokens <= 1.2 * largest
    published = ImageRules(
        token_id=0,
        patch_size=14,
        merge_size=2,
        frames=1,
        min_pixels=0,
        max_pixels=16_384 * 14**2,
        max_side=512 * 14,
        is_in_line=True,
        scale=1 / 255,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    assert 4096 <= published.max_tokens <= 4400


def test_settings_of_transformers_processor_are_read_as_well(
    family: tuple[Any, Decoder, Path], tmp_path: Path
) -> None:
    _, decoder, folder = family
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    processor = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Kimi_K25ImageProcessor",
        "image_std": [0.5, 0.4, 0.3],
        "max_patches": 64,
        "merge_size": MERGE,
        "patch_size": PATCH,
        "size": {"max_height": 20, "max_width": 20},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert read_image_rules(tmp_path) == decoder.config.images


@pytest.mark.parametrize(
    ("of_vision", "of_processor", "reason"),
    [
        ({"merge_type": "other"}, {}, "vision_config has merge_type = 'other'"),
        ({"patch_size": 7}, {}, "vision_config has patch_size = 7"),
        ({}, {"fixed_output_tokens": 64}, "has fixed_output_tokens"),
        ({}, {"in_patch_limit": None}, "have no 'in_patch_limit'"),
        ({"patch_size": 0}, {"patch_size": 0}, "patch_size"),
        ({"patch_size": "x"}, {"patch_size": "x"}, "patch_size"),
        (
            {"patch_size": 16, "merge_kernel_size": [1000, 1000]},
            {"patch_size": 16, "merge_kernel_size": 1000},
            "cells of 16000 x 16000",
        ),
        ({}, {"merge_kernel_size": [2, 2]}, "merge_kernel_size"),
        ({}, {"in_patch_limit": 0}, "in_patch_limit"),
        ({}, {"in_patch_limit": 10**30}, "in_patch_limit"),
        ({}, {"patch_limit_on_one_side": 0}, "patch_limit_on_one_side"),
        ({}, {"patch_limit_on_one_side": 10**6}, "patch_limit_on_one_side"),
        ({}, {"image_mean": "abc"}, "image_mean"),
        ({}, {"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({}, {"image_std": [0.5, 0.5, float("nan")]}, "image_std"),
    ],
)
def test_settings_that_are_not_known_are_refused_by_name(
    of_vision: dict[str, Any], of_processor: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    settings = whole_settings({}) | {"vision_config": {**VISION, **of_vision}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    numbers = {**PROCESSOR["media_proc_cfg"], **of_processor}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**PROCESSOR, "media_proc_cfg": numbers}))
    with pytest.raises(UnsupportedModelError, match=reason):
        read_image_rules(tmp_path)


@pytest.mark.parametrize("token", [-1, 97, 10**30, "x"])
def test_the_token_of_images_is_one_of_the_vocabulary(token: object, tmp_path: Path) -> None:
    settings = whole_settings({"vocab_size": 97}) | {"vision_config": VISION}
    settings["media_placeholder_token_id"] = token
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.raises(UnsupportedModelError, match="media_placeholder_token_id"):
        read_image_rules(tmp_path)
