"""Checkpoints in few bits: what other programs store is read as the numbers that it stands for.

The files here are written by plain loops after the published layouts. Where `transformers` reads a
layout without a GPU, its reading is the reference; elsewhere the numbers are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_families import build_tiny, save_tiny
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.checking import check_model
from tinsmith.engine.local.model.packed_files.conversion import VERSION, PackedFiles
from tinsmith.engine.local.model.sources import model_folder
from tinsmith.engine.local.model.verifying.comparison import our_logits, own_logits
from tinsmith.engine.stored_tensors import weight_files
from tinsmith.errors import EngineError

Tensors = dict[str, Tensor]


def rewrite(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> None:
    """Leave a checkpoint with these tensors, whose settings name their layout."""
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), "quantization_config": quantization}
    path.write_text(json.dumps(settings))
    for file in weight_files(folder):
        file.unlink()
    # In two files, a weight's parts in different ones.
    names = sorted(tensors)
    files = {"model-1.safetensors": names[0::2], "model-2.safetensors": names[1::2]}
    for name, members in files.items():
        save_file({each: tensors[each].contiguous() for each in members}, folder / name)
    places = {each: name for name, members in files.items() for each in members}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )


def stored(folder: Path) -> Tensors:
    return {name: each for file in weight_files(folder) for name, each in load_file(file).items()}


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def words(numbers: Tensor, bits: int) -> Tensor:
    """(rows, columns) whole numbers from zero on, packed along rows; the first is the lowest."""
    per_word = 32 // bits
    rows = []
    for row in numbers.tolist():
        row += [0] * (-len(row) % per_word)
        packed = [
            sum(
                number << bits * place for place, number in enumerate(row[start : start + per_word])
            )
            for start in range(0, len(row), per_word)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def random_codes(bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 1 << bits, shape)


def scales_of(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.02 + 0.01


def fp8_blocks(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    codes = (weight * 100).to(torch.float8_e4m3fn)
    scales = scales_of(-(-rows // 16), -(-columns // 16))
    plain = codes.float().clone()
    for row in range(rows):
        for column in range(columns):
            plain[row, column] *= scales[row // 16, column // 16]
    return {name: codes, f"{name}_scale_inv": scales}, plain


def fp8_rows(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scales = (weight * 100).to(torch.float8_e4m3fn), scales_of(len(weight), 1)
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales


def int4_groups(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    codes, scales = random_codes(4, rows, columns), scales_of(rows, columns // 4)
    parts = {
        f"{name}_packed": words(codes, 4),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor([rows, columns]),
    }
    if "down_proj" in name:  # as of an expert that no text reached when the others were ordered
        parts[f"{name}_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    return parts, (codes - 8) * scales.repeat_interleave(4, dim=1)


def int8_with_zeros(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    codes, scales = random_codes(8, rows, columns), scales_of(rows, 2) / 16
    zeros = random_codes(8, rows, 2)
    group = torch.randint(0, 2, (columns,))
    parts = {
        f"{name}_packed": words(codes, 8),
        f"{name}_scale": scales,
        f"{name}_zero_point": words(zeros.t(), 8).t(),
        f"{name}_g_idx": group.int(),
        f"{name}_shape": torch.tensor([rows, columns]),
    }
    return parts, (codes - zeros[:, group]) * scales[:, group]


def gptq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    module = name.removesuffix(".weight")
    codes, scales = random_codes(4, rows, columns), scales_of(columns // 8, rows)
    zeros = random_codes(4, columns // 8, rows)
    group = torch.randint(0, columns // 8, (columns,))
    parts = {
        f"{module}.qweight": words(codes, 4).t(),
        f"{module}.qzeros": words((zeros - 1) % 16, 4),
        f"{module}.scales": scales,
        f"{module}.g_idx": group.int(),
    }
    return parts, (codes - zeros.t()[:, group]) * scales.t()[:, group]


def awq(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    module = name.removesuffix(".weight")
    codes, scales = random_codes(4, rows, columns), scales_of(columns // 8, rows)
    zeros = random_codes(4, columns // 8, rows)

    def interleaved(numbers: Tensor) -> Tensor:
        """Of eight neighbours the even ones come first."""
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        return numbers.unflatten(1, (-1, 8))[..., order].flatten(1)

    parts = {
        f"{module}.qweight": words(interleaved(codes.t()), 4),
        f"{module}.qzeros": words(interleaved(zeros), 4),
        f"{module}.scales": scales,
    }
    spread = (each.t().repeat_interleave(8, dim=1) for each in (zeros, scales))
    zero, scale = spread
    return parts, (codes - zero) * scale


LAYOUTS: dict[str, tuple[Callable[[str, Tensor], tuple[Tensors, Tensor]], dict[str, Any]]] = {
    "fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "fp8 rows": (
        fp8_rows,
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    ),
    "int4": (int4_groups, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "int8": (int8_with_zeros, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 8}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
}


def load(folder: Path, cache: Path) -> Any:
    config = LocalEngineConfig(
        device="cpu", models={"tiny": str(folder)}, cache_folder=cache, verify_models=True
    )
    return BaseModels(config).get("tiny")


@pytest.mark.parametrize(
    ("layout", "model_type"),
    [*((layout, "llama") for layout in LAYOUTS), ("fp8", "deepseek_v3"), ("int4", "deepseek_v3")],
)
def test_a_checkpoint_in_few_bits_is_the_model_of_the_numbers_it_stands_for(
    layout: str, model_type: str, tmp_path: Path
) -> None:
    """On our decoder and on `transformers`' modules, with scales of activations beside."""
    folder = tmp_path / "model"
    if model_type == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(3)
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        reference = LlamaForCausalLM(
            LlamaConfig(vocab_size=97, num_hidden_layers=2, **shape)
        ).eval()
        reference.save_pretrained(folder)
    else:
        reference = save_tiny(model_type, folder)
    pack, quantization = LAYOUTS[layout]
    tensors, plain = {}, {}
    for name, tensor in stored(folder).items():
        if is_projection(name):
            parts, plain[name] = pack(name, tensor)
            tensors |= {**parts, name.replace(".weight", ".input_scale"): torch.ones(1)}
        else:
            tensors[name] = plain[name] = tensor
    rewrite(folder, tensors, quantization)
    found = check_model(folder, rank=4)
    assert found.stored_as is not None and found.stored_as.startswith(quantization["quant_method"])
    numbers = sum(tensor.numel() for tensor in plain.values())
    assert (found.num_parameters, found.converted_bytes) == (numbers, 4 * numbers)
    assert not (tmp_path / "cache").exists()

    decoder = load(folder, tmp_path / "cache")
    place = model_folder(str(folder), LocalEngineConfig(cache_folder=tmp_path / "cache"))
    written = stored(place)
    assert written.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(written[name], tensor.float(), rtol=1e-6, atol=0)
    expected = type(reference).from_pretrained(place, attn_implementation="eager").eval()
    logits = own_logits(expected, decoder.config)
    assert (our_logits(decoder) - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers import Mxfp4Config

    folder = tmp_path / "model"
    model = build_tiny("gpt_oss", hidden_size=64, intermediate_size=32, head_dim=16)
    model.bfloat16().save_pretrained(folder)
    tensors = stored(folder)
    for name in [each for each in tensors if each.endswith("experts.down_proj")] + [
        each for each in tensors if each.endswith("experts.gate_up_proj")
    ]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8
        )
    rewrite(folder, tensors, {"quant_method": "mxfp4"})
    reference = (
        type(model)
        .from_pretrained(
            folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
        )
        .eval()
    )
    place = model_folder(str(folder), LocalEngineConfig(cache_folder=tmp_path / "cache"))
    theirs = reference.state_dict()
    written = stored(place)
    for name in theirs:
        if "experts." in name:
            assert torch.equal(written[name], theirs[name]), name
    decoder = load(folder, tmp_path / "cache")
    logits = own_logits(reference.float(), decoder.config)
    assert (our_logits(decoder) - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, r"stored as 'bitsandbytes', which is not read; known:"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "with nvfp4-pack-quantized",
        ),
        ({"quant_method": "gptq", "bits": 3}, "with 3 bits; known: 4, 8"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "in the form 'marlin'"),
    ],
)
def test_other_layouts_are_refused_by_their_names(
    quantization: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_tiny("qwen3_moe", tmp_path)
    rewrite(tmp_path, stored(tmp_path), quantization)
    with pytest.raises(EngineError, match=reason):
        check_model(tmp_path, rank=4)
    with pytest.raises(EngineError, match=reason):
        load(tmp_path, tmp_path / "cache")


def test_codes_without_their_scales_are_refused(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    tensors = stored(tmp_path)
    name = next(each for each in tensors if is_projection(each))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    rewrite(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(EngineError, match=f"has '{name}' and no '{name}_scale_inv'"):
        load(tmp_path, tmp_path / "cache")
    tensors[f"{name}_scale_inv"] = torch.ones(9, 9)
    rewrite(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(EngineError, match=r"beside scales of shape \[9, 9\]"):
        load(tmp_path, tmp_path / "cache")


Change = Callable[[Tensor], Tensor]

LIES: dict[str, tuple[str, str, Change]] = {
    "scales of another shape": ("int4", "_scale", lambda scales: scales.t()),
    "scales of fewer rows": ("int4", "_scale", lambda scales: scales[:16]),
    "no scales at all": ("int8", "_scale", lambda scales: scales[:0]),
    "codes that are no words": ("int4", "_packed", lambda codes: codes.float()),
    "zero points of more rows": ("int8", "_zero_point", lambda zeros: torch.cat([zeros, zeros])),
    "groups that are not there": ("int8", "_g_idx", lambda groups: groups + 2**30),
    "some groups below zero": ("int8", "_g_idx", lambda groups: groups - 1),
    "groups of fewer inputs": ("gptq", "g_idx", lambda groups: groups[:16]),
    "zero points that are no words": ("gptq", "qzeros", lambda zeros: zeros.to(torch.int8)),
    "another group size": ("gptq", "scales", lambda scales: scales[:2]),
    "half of the zero points": ("awq", "qzeros", lambda zeros: zeros[:2]),
    "codes in one row": ("fp8", "weight", lambda codes: codes.flatten()),
}


@pytest.mark.parametrize("lie", LIES)
def test_parts_that_do_not_fit_each_other_are_refused_by_the_weights_name(
    lie: str, tmp_path: Path
) -> None:
    layout, ending, change = LIES[lie]
    folder = tmp_path / "model"
    save_tiny("qwen3_moe", folder, head_dim=16)
    pack, quantization = LAYOUTS[layout]
    tensors: Tensors = {}
    for name, tensor in stored(folder).items():
        tensors |= pack(name, tensor)[0] if is_projection(name) else {name: tensor}
    name = next(each for each in tensors if "self_attn.q_proj" in each and each.endswith(ending))
    rewrite(folder, {**tensors, name: change(tensors[name])}, quantization)
    with pytest.raises(EngineError, match=r"self_attn.q_proj|quantization_config has"):
        load(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    "changes",
    [{"config_groups": 7}, {"sparsity_config": "x"}, {"transform_config": [1]}, {"bits": 10**30}],
)
def test_settings_of_the_wrong_kind_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny("qwen3_moe", folder)
    layout = "gptq" if "bits" in changes else "int4"
    rewrite(folder, stored(folder), {**LAYOUTS[layout][1], **changes})
    with pytest.raises(EngineError, match=r"quantization_config has a setting|known: 4, 8"):
        load(folder, tmp_path / "cache")


def test_numbers_too_large_for_the_type_of_the_model_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny("qwen3_moe", folder)
    tensors = stored(folder)
    name = next(each for each in tensors if is_projection(each))
    tensors |= {name: torch.ones_like(tensors[name]).to(torch.float8_e4m3fn)}
    tensors[f"{name}_scale"] = torch.full((len(tensors[name]), 1), 1e5)
    rewrite(folder, tensors, LAYOUTS["fp8 rows"][1])
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float16"}))
    with pytest.raises(EngineError, match=f"'{name}' has numbers that are not finite in F16"):
        load(folder, tmp_path / "cache")


def test_a_conversion_is_kept_until_the_files_change(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", LocalEngineConfig(cache_folder=tmp_path / "cache")
    save_tiny("qwen3_moe", folder)
    tensors: Tensors = {}
    for name, tensor in stored(folder).items():
        tensors |= fp8_blocks(name, tensor)[0] if is_projection(name) else {name: tensor}
    rewrite(folder, tensors, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    steps: list[float] = []
    first = model_folder(str(folder), config, lambda _, done: steps.append(done))
    assert steps == sorted(steps) and steps[-1] == 1.0
    assert model_folder(str(folder), config, lambda _, done: steps.append(-1)) == first
    assert -1 not in steps
    assert "quantization_config" not in (first / "config.json").read_text()
    rewrite(folder, tensors, {"quant_method": "fp8", "weight_block_size": [16, 16], "x": 1})
    assert model_folder(str(folder), config) != first


def test_a_conversion_that_an_earlier_converter_made_is_not_used(tmp_path: Path) -> None:
    """Models stay converted for years, and what they were converted to may have been wrong."""
    folder, config = tmp_path / "model", LocalEngineConfig(cache_folder=tmp_path / "cache")
    write_packed(folder, "gptq")
    facts = [(path.name, path.stat()) for path in (folder / "config.json", *weight_files(folder))]
    sizes = [f"{name} {fact.st_size} {fact.st_mtime_ns}" for name, fact in facts]
    known = " ".join(["1", str(folder.resolve()), *sizes])  # what it was called then
    earlier = tmp_path / "cache" / f"model-{hashlib.sha256(known.encode()).hexdigest()[:12]}"
    earlier.mkdir(parents=True)
    assert model_folder(str(folder), config) != earlier


def write_packed(folder: Path, layout: str) -> None:
    """A matrix of codes that are the same on every machine."""
    pack, quantization = LAYOUTS[layout]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    torch.manual_seed(5)
    rewrite(folder, pack("a_proj.weight", torch.arange(512.0).view(16, 32) / 512)[0], quantization)


def test_a_converter_that_writes_other_numbers_has_another_version(tmp_path: Path) -> None:
    """When this fails, raise VERSION and write down what is made now."""
    written = hashlib.sha256()
    for layout in LAYOUTS:
        folder, target = tmp_path / layout, tmp_path / f"{layout} in full"
        write_packed(folder, layout)
        target.mkdir()
        packed = PackedFiles.of(folder)
        assert packed is not None
        packed.write(target, lambda done: None)
        for name, tensor in sorted(stored(target).items()):
            written.update(name.encode() + tensor.numpy().tobytes())
    assert (VERSION, written.hexdigest()[:16]) == (2, "88e8658a3f8a2b1a")
