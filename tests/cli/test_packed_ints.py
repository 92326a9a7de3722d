"""A model in integers of 8 or 4 bits: near its folder, and read by compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support import tiny_llama
from tinsmith.cli.weights import packed_ints
from tinsmith.engine.local.adapter_files.exports import check_packed
from tinsmith.errors import ValidationError

NAME = "model.layers.1.mlp.down_proj.weight"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def build(folder: Path, dtype: str, **changes: Any) -> Path:
    """A random model, whose rows of 64 and 192 numbers divide into groups of 32."""
    size = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 97}
    tiny_llama.save(folder, seed=1, **{**size, **changes})
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(file).items()}
    if NAME in tensors:
        tensors[NAME][0] = 0  # a row without a scale
    save_file(tensors, file, {"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def pack(folder: Path, target: Path, quantization: str) -> dict[str, torch.Tensor]:
    told: list[str] = []
    packed_ints.write(folder, target, quantization, lambda done, total, name: told.append(name))
    assert len(told) == len(set(told)) == len(load_file(folder / "model.safetensors"))
    assert (target / "tokenizer.json").exists()
    return load_file(target / "model.safetensors")


def unpacked(tensors: dict[str, torch.Tensor], name: str, bits: int) -> tuple[Any, torch.Tensor]:
    """The numbers as the layout's description has them, and the scale of each."""
    words, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"].float()
    rows, length = tensors[f"{name}_shape"].tolist()
    numbers = torch.stack([(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)], -1)
    numbers = numbers.reshape(rows, length) - 2 ** (bits - 1)
    steps = scale.repeat_interleave(length // scale.shape[1], 1)
    return numbers * steps, steps


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "BF16"), ("int4", "F32")])
def test_every_number_is_near(quantization: str, dtype: str, tmp_path: Path) -> None:
    base = build(tmp_path / "base", dtype)
    tensors = pack(base, tmp_path / "packed", quantization)
    bits = packed_ints.NUM_BITS[quantization]
    given = load_file(base / "model.safetensors")
    packed = {name for name in given if f"{name}_packed" in tensors}
    assert len(packed) == 2 * 7
    for name in given.keys() - packed:
        assert torch.equal(tensors[name], given[name])
    for name in packed:
        wanted = given[name].float()
        found, steps = unpacked(tensors, name, bits)
        # To the nearest; the largest of a group may be cut.
        assert ((found - wanted).abs() / steps).quantile(0.9) <= 0.5 + 1e-3
        limit = 0.009 if bits == 4 else 1e-4
        assert (found - wanted).square().mean() < limit * wanted.var()
    assert tensors[f"{NAME}_scale"].shape == (64, 6)
    assert not unpacked(tensors, NAME, bits)[0][0].any()
    numbers = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    (group,) = numbers["config_groups"].values()
    assert group["weights"]["num_bits"] == bits
    assert group["weights"]["group_size"] == 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.02), ("int4", 0.3)])
def test_transformers_reads_it(quantization: str, limit: float, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    base = build(tmp_path / "base", dtype, tie_word_embeddings=dtype == "BF16")
    tensors = pack(base, tmp_path / "packed", quantization)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        found, wanted = model(tokens).logits, plain(tokens).logits
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    assert 0 < difference < limit
    # The reader has the very numbers that the layout's description gives.
    values = unpacked(tensors, NAME, packed_ints.NUM_BITS[quantization])[0]
    loaded = model.get_parameter(NAME)
    assert torch.allclose(loaded, values, atol=1e-6)


def test_an_export_that_is_written_wrongly_is_told(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    base, packed, adapter = (tmp_path / name for name in ("base", "packed", "adapter"))
    build(base, "F32")
    tensors = pack(base, packed, "int4")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    nothing = {f"{stem}A.weight": torch.zeros(1, 64), f"{stem}B.weight": torch.zeros(64, 1)}
    save_file(nothing, adapter / "adapter_model.safetensors")
    assert 0 < check_packed(base, adapter, base, packed, "int4") < 0.3
    words = tensors[f"{NAME}_packed"]
    tensors[f"{NAME}_packed"] = (words >> 4) | (words << 28)  # a number further
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValidationError, match=r"down_proj.*it has not been kept"):
        check_packed(base, adapter, base, packed, "int4")


def test_rows_that_do_not_divide_stay_as_they_are(tmp_path: Path) -> None:
    base = build(tmp_path / "base", "F32", intermediate_size=48)
    tensors = pack(base, tmp_path / "packed", "int4")
    assert torch.equal(tensors[NAME], load_file(base / "model.safetensors")[NAME])
    settings = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    left = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert settings["ignore"] == ["lm_head", *left]


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("model.layers.0.mlp.down_proj.weight", 40, "rows of 40 numbers; .* multiples of 32"),
        (
            "model.layers.0.mlp.experts.0.up_proj.weight",
            64,
            r"'model.*experts.*', which cannot be packed",
        ),
        ("visual.patch.weight", 64, "'visual.patch.weight', which cannot be packed"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(
    name: str, length: int, message: str, tmp_path: Path
) -> None:
    save_file({name: torch.zeros(32, length)}, tmp_path / "model.safetensors")
    with pytest.raises(ValidationError, match=message):
        packed_ints.check(tmp_path)
