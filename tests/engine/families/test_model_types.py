"""The table of model types says what the code does, and `model check` what a model will take."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shapes import SHAPES
from tests.engine.families.test_families import FAMILIES
from tests.support.tiny_families import save_tiny
from tests.support.tiny_vision import save_tiny_vision
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model import base_models, checking, settings
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.checking import ModelCheck, check_model
from tinsmith.engine.local.model.images.settings import SEEING_TYPES
from tinsmith.engine.local.model.model_types import MODEL_TYPES, nearest_type
from tinsmith.engine.local.sample.kvcache import CacheShape
from tinsmith.engine.stored_tensors import Entry, encode_header
from tinsmith.errors import EngineError

ROOT = Path(__file__).parents[3]


def test_every_type_of_the_table_is_tested_and_no_tested_one_is_missing() -> None:
    table = {each.name: each for each in MODEL_TYPES}
    own = [name for name, each in table.items() if each.runs_on == "decoder"]
    with_towers = (*SEEING_TYPES, *settings.IN_PARTS)
    assert [name for name in own if name not in with_towers] == list(settings.FAMILIES)
    assert set(table) == {*own, *FAMILIES, *SEEING_TYPES}
    assert {name for name in FAMILIES if "test_families" not in table[name].test} == set()
    assert all((ROOT / each.test).is_file() for each in MODEL_TYPES)


@pytest.mark.parametrize("model_type", [*FAMILIES, *SEEING_TYPES])
def test_the_table_names_what_is_adapted(model_type: str, tmp_path: Path) -> None:
    save = save_tiny_vision if model_type in SEEING_TYPES else save_tiny
    save(model_type, tmp_path)
    found = check_model(tmp_path, rank=4)
    (expected,) = [each for each in MODEL_TYPES if each.name == model_type]
    assert set(found.adapted) == {*expected.adapted, "lm_head"}
    assert (found.model_type, found.runs_on) == (model_type, expected.runs_on)
    assert found.image_tokens == (16 if model_type in SEEING_TYPES else 0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "qwen3_5_text", "nemotron_h"])
def test_a_check_counts_the_memory_that_the_model_takes(
    model_type: str, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    if model_type == "llama":
        folder = model_folder("llama")
    else:
        save_tiny(model_type, tmp_path)
        folder = tmp_path
    found = check_model(folder, rank=4)
    config = LocalEngineConfig(device="cpu", models={"m": str(folder)}, pack_weights=False)
    decoder = BaseModels(config).get("m")
    # The files also have buffers, such as a router's bias.
    assert decoder.nbytes <= found.weights_bytes <= 1.01 * decoder.nbytes
    assert found.fits
    shape = CacheShape.of(decoder.config, decoder.device, decoder.dtype)
    blocks = 2 * shape.zero_blocks(3).nbytes
    assert 3 * shape.block_tokens * found.token_bytes == blocks
    assert found.sequence_bytes == shape.zero_states(1).nbytes


def write_headers(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A file of tensors whose bytes are a hole in it."""
    entries = {
        name: Entry("BF16", list(shape), 2 * math.prod(shape)) for name, shape in shapes.items()
    }
    with (folder / "model.safetensors").open("wb") as file:
        start = file.write(encode_header(entries, {"format": "pt"}))
        file.truncate(start + sum(entry.num_bytes for entry in entries.values()))


def checked_without_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, rank: int
) -> ModelCheck:
    """As on a machine with so much memory."""
    monkeypatch.setattr(base_models, "verify", lambda *_: None)  # there is nothing in the hole
    monkeypatch.setattr(checking, "dtype_of", lambda _: torch.bfloat16)
    monkeypatch.setattr(checking, "machine_bytes", lambda: memory_bytes)
    return check_model(folder, rank=rank)


def test_eight_billion_parameters_train_in_12_gb_in_nf4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of Qwen3-8B, with an adapter of the rank that recipes have; in full they do not."""
    settings = {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (151_936, 4096),
        "lm_head.weight": (151_936, 4096),
    }
    for layer in range(36):
        prefix = f"model.layers.{layer}."
        for name, outputs, inputs in (
            ("self_attn.q_proj", 4096, 4096),
            ("self_attn.k_proj", 1024, 4096),
            ("self_attn.v_proj", 1024, 4096),
            ("self_attn.o_proj", 4096, 4096),
            ("mlp.gate_proj", 12_288, 4096),
            ("mlp.up_proj", 12_288, 4096),
            ("mlp.down_proj", 4096, 12_288),
        ):
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
    write_headers(tmp_path, shapes)
    found = checked_without_weights(tmp_path, monkeypatch, 12 * 10**9, rank=32)
    assert 8e9 < found.num_parameters < 8.3e9
    assert found.fits_in == ("nf4",)
    assert 6e9 < found.few_bits_bytes["nf4"] < 6.5e9
    assert found.adapter_bytes == 16 * 32 * (1_769_472 + 958_464 + 156_032)


def test_a_model_fits_where_a_fifth_is_left_beside_weights_and_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("qwen3_moe", tmp_path)
    found = check_model(tmp_path, rank=4)
    needed = (found.weights_bytes + found.adapter_bytes) / 0.8
    for memory_bytes, fits in ((math.ceil(needed), True), (math.floor(needed) - 1, False)):
        monkeypatch.setattr(checking, "machine_bytes", lambda size=memory_bytes: size)
        assert check_model(tmp_path, rank=4).fits == fits


def test_thirty_billion_parameters_train_in_24_gib_in_nf4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of Qwen3-30B-A3B, by its headers: which kinds fit, and what they take."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"]))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (151_936, 2048),
        "lm_head.weight": (151_936, 2048),
    }
    for layer in range(48):
        prefix = f"model.layers.{layer}."
        for name, outputs in (("q", 4096), ("k", 512), ("v", 512)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (outputs, 2048)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (2048, 4096)
        shapes[f"{prefix}mlp.gate.weight"] = (128, 2048)
        for expert in range(128):
            for name, shape in (("gate", (768, 2048)), ("up", (768, 2048)), ("down", (2048, 768))):
                shapes[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = shape
    write_headers(tmp_path, shapes)
    found = checked_without_weights(tmp_path, monkeypatch, 24 * 2**30, rank=8)
    assert 30e9 < found.num_parameters < 31e9
    assert found.fits_in == ("nf4",) and not found.fits
    assert 17e9 < found.few_bits_bytes["nf4"] < 19e9 < 30e9 < found.few_bits_bytes["fp8"]


def test_a_model_that_cannot_be_served_is_refused_with_the_nearest_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe_2", "vocab_size": 9}')
    with pytest.raises(EngineError, match="the nearest type that works is 'qwen3_moe'"):
        check_model(tmp_path, rank=4)
    assert nearest_type("llama4_text") == "llama"
