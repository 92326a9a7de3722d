"""Adapters that others wrote, in models whose modules are not what PEFT sees: experts, rows."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_families import save_tiny
from tinsmith.cli.weights.peft_layout import to_peft
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.adapter_files.peft_config import read_peft_config
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.errors import ValidationError
from tinsmith.types import LoraConfig

WEIGHTS = "adapter_model.safetensors"


def settings(base: Path) -> LocalEngineConfig:
    return LocalEngineConfig(models={"m": str(base)}, device="cpu", cache_folder=base.parent)


def exported(base: Path, folder: Path) -> tuple[DecoderConfig, Adapter]:
    """An adapter with random weights, and PEFT's files of it in `folder`."""
    config = BaseModels(settings(base)).config("m")
    pool = AdapterPool(config, torch.device("cpu"), torch.float32)
    adapter = pool.create("m", LoraConfig(rank=3, seed=1))
    generator = torch.Generator().manual_seed(2)
    adapter.flat.copy_(torch.randn(len(adapter.flat), generator=generator) * 0.05)
    checkpoints.save(adapter, folder, "sampler")
    to_peft(folder, base)
    return config, adapter


def loaded(config: DecoderConfig, folder: Path) -> Adapter:
    pool = AdapterPool(config, torch.device("cpu"), torch.float32)
    adapter = pool.create_empty("m", checkpoints.read_lora(folder, config))
    adapter.flat.fill_(torch.nan)
    checkpoints.load(adapter, folder, "sampler")
    return adapter


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "deepseek_v3",
        "deepseek_v3, dense",
        "gpt_oss",
        "qwen3_next, dense",
        "qwen3_5_text",
        "nemotron_h",
    ],
)
def test_what_was_exported_for_peft_comes_back(model_type: str, tmp_path: Path) -> None:
    """Matrices of experts are shared again; modules that the model has as one are several."""
    save_tiny(model_type, tmp_path / "base")
    config, adapter = exported(tmp_path / "base", tmp_path / "adapter")
    back = loaded(config, tmp_path / "adapter")
    assert back.rank == adapter.rank
    torch.testing.assert_close(back.flat, adapter.flat, rtol=1e-6, atol=0)


def test_an_adapter_of_several_modules_gives_each_its_rows(tmp_path: Path) -> None:
    """As PEFT trains it: all modules of the matrix share one A."""
    save_tiny("qwen3_5_text", tmp_path / "base")
    config, _ = exported(tmp_path / "base", tmp_path / "adapter")
    path = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(4)
    changed = {}
    for name in tensors:
        if "in_proj_qkv.lora_B" in name:
            tensors[name] = torch.randn(tensors[name].shape, generator=generator)
            stem = name.removesuffix(".lora_B.weight")
            changed[stem] = tensors[name] @ tensors[f"{stem}.lora_A.weight"]
    save_file(tensors, path)
    adapter = loaded(config, tmp_path / "adapter")
    assert adapter.rank == 9, "the rank that the matrix's adapter has"
    ours = {name.removeprefix("base_model.model."): view for name, view in adapter.named_tensors()}
    # In the file alpha / rank is 96 / 9, here 32 / 9.
    for stem, delta in changed.items():
        parts = [stem.removeprefix("base_model.model.").replace("qkv", each) for each in "qkv"]
        found = [ours[f"{part}.lora_B.weight"] @ ours[f"{part}.lora_A.weight"] for part in parts]
        torch.testing.assert_close(torch.cat(found) * (32 / 9), delta * (96 / 9))


@pytest.fixture
def experts(tmp_path: Path) -> tuple[DecoderConfig, Path]:
    save_tiny("qwen3_moe", tmp_path / "base")
    config, _ = exported(tmp_path / "base", tmp_path / "adapter")
    return config, tmp_path / "adapter"


EXPERT = "base_model.model.model.layers.0.mlp.experts.{}.{}_proj.lora_{}.weight"


def without_expert_2(tensors: dict[str, Tensor]) -> None:
    for name in [each for each in tensors if ".layers.0.mlp.experts.2." in each]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: t[EXPERT.format(1, "gate", "A")].add_(1),
            "the experts have different matrices .*w1.lora_A.weight",
        ),
        (
            lambda t: t[EXPERT.format(1, "down", "B")].add_(1),
            "the experts have different matrices .*w2.lora_B.weight",
        ),
        (without_expert_2, "expert 2 of .* is missing"),
        (
            lambda t: t.update({EXPERT.format(6, "up", "B"): t[EXPERT.format(5, "up", "B")]}),
            "experts.6.up_proj.lora_B.weight' is not expected",
        ),
        (
            lambda t: t.update({EXPERT.format("05", "up", "B"): t[EXPERT.format(5, "up", "B")]}),
            r"experts.0?5.up_proj.lora_B.weight' is not expected",
        ),
    ],
    ids=["A differs", "B differs", "missing", "no such expert", "twice"],
)
def test_experts_that_cannot_be_held_are_refused_by_name(
    experts: tuple[DecoderConfig, Path], change: Callable[[dict[str, Tensor]], None], reason: str
) -> None:
    config, folder = experts
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(ValidationError, match=reason):
        loaded(config, folder)


def test_rows_that_have_no_adapter_here_must_do_nothing(tmp_path: Path) -> None:
    save_tiny("nemotron_h", tmp_path / "base")
    config, _ = exported(tmp_path / "base", tmp_path / "adapter")
    path = tmp_path / "adapter" / WEIGHTS
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("in_proj.lora_B.weight"))
    tensors[name][-1] = 1.0
    save_file(tensors, path)
    with pytest.raises(ValidationError, match=r"in_proj.lora_B.weight' changes rows after"):
        loaded(config, tmp_path / "adapter")


def file_of(header: object) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(64)


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 2**40),
        struct.pack("<Q", 2**25) + bytes(2**25),
        file_of(b"[" * 100_000),
        file_of([]),
        file_of({NAME: {"dtype": "F32", "shape": ["a", 32], "data_offsets": [0, 64]}}),
        file_of({NAME: {"dtype": "F32", "shape": [-4, 32], "data_offsets": [0, 64]}}),
        file_of({NAME: {"dtype": "F32", "shape": [3, 32], "data_offsets": [0, 64]}}),
        file_of({NAME: {"dtype": ["F32"], "shape": [3, 32], "data_offsets": [0, 64]}}),
        file_of({NAME: {"dtype": "F32", "shape": [3, 32], "data_offsets": [0, 2**60]}}),
        file_of({NAME: {"dtype": "F32", "shape": 7, "data_offsets": [0, 64]}}),
    ],
    ids=range(12),
)
def test_a_hostile_file_is_a_mistake_of_the_user_and_nothing_else(
    experts: tuple[DecoderConfig, Path], content: bytes, tmp_path: Path
) -> None:
    _, folder = experts
    (folder / WEIGHTS).write_bytes(content)
    core = EngineCore(settings(tmp_path / "base"))
    result = core.import_adapter("m", folder, tmp_path / "imported", "training")
    assert getattr(result, "category", None) == "user", result
    assert not (tmp_path / "imported").exists()


HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout"),
    *("lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    "target_modules",
}
"""Settings of how an adapter was made, which do not say what it computes."""

UNDERSTOOD = {
    *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r"),
    *("rank_pattern", "task_type", "use_rslora"),
}


def test_every_setting_that_peft_has_is_understood_or_harmless_or_refused(tmp_path: Path) -> None:
    """One that PEFT adds later fails here, before somebody's adapter is read wrongly."""
    from peft import LoraConfig as PeftLoraConfig

    path = tmp_path / "adapter_config.json"
    plain = PeftLoraConfig(r=4, task_type="CAUSAL_LM").to_dict()
    for name in plain.keys() - HARMLESS - UNDERSTOOD:
        path.write_text(json.dumps({**plain, name: {"some": "thing"}}, default=str))
        with pytest.raises(ValidationError) as caught:
            read_peft_config(path)
        assert caught.value.path == f"adapter_config.json.{name}"
