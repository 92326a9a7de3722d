"""Every export is loaded back and compared, for every kind of model that we serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.train.training_reference import Reference
from tests.support.tiny_families import save_tiny
from tests.support.tiny_vision import save_tiny_vision
from tinsmith.cli.weights.merging import merge
from tinsmith.cli.weights.peft_layout import TYPES_WITH_EXPERTS, to_peft
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.adapter_files.exports import check_export
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.errors import ValidationError
from tinsmith.types import LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TEXT),
    "llama, tied": ("LlamaConfig", {**TEXT, "tie_word_embeddings": True}),
    "gemma 3 that sees images": (
        "Gemma3Config",
        {
            "text_config": {**TEXT, "num_key_value_heads": 2, "head_dim": 16},
            "vision_config": EYES,
            "mm_tokens_per_image": 4,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", TEXT),
    "gpt-neox, tied": ("GPTNeoXConfig", {**TEXT, "tie_word_embeddings": True}),
    "opt": ("OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("PhiConfig", TEXT),
}


EXPERTS = ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "mixtral", "olmoe, two sizes")
DENSE = ("deepseek_v3, dense", "qwen3_next, dense", "qwen3_moe, dense")


@pytest.fixture(params=[*MODELS, *EXPERTS, *DENSE, "qwen3_vl"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "qwen3_vl":
        save_tiny_vision(request.param, tmp_path / "base")
        return tmp_path / "base"
    if request.param not in MODELS:
        save_tiny(request.param, tmp_path / request.param)
        return tmp_path / request.param
    return save_model(request.param, tmp_path / "base")


def save_model(name: str, folder: Path) -> Path:
    import transformers

    class_name, settings = MODELS[name]
    torch.manual_seed(3)
    config = getattr(transformers, class_name)(**settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, **options: bool) -> Adapter:
    """A checkpoint of an adapter, by itself on every matrix, its B random."""
    models = {"m": str(base)}
    config = LocalEngineConfig(models=models, device="cpu", cache_folder=folder.parent)
    pool = AdapterPool(BaseModels(config).config("m"), torch.device("cpu"), torch.float32)
    adapter = pool.create("m", LoraConfig(rank=3, seed=1, **options))
    generator = torch.Generator().manual_seed(2)
    adapter.flat.copy_(torch.randn(len(adapter.flat), generator=generator) * 0.05)
    checkpoints.save(adapter, folder, "training")
    return adapter


@pytest.mark.slow
def test_peft_and_a_merged_model_do_what_the_adapter_does(base: Path, tmp_path: Path) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    save_adapter(base, adapter)
    to_peft(adapter, base)
    if base.name not in EXPERTS:
        assert (check_export("peft", base, adapter, adapter) or 1) < 1e-4
    merge(base, adapter, merged, lambda *facts: None)
    assert (check_export("merged", base, adapter, merged) or 0) < 1e-4
    with pytest.raises(ValidationError, match="logits differ"):
        check_export("merged", base, adapter, base)  # what an export without effect would be


def test_the_types_whose_projections_peft_takes_for_those_of_experts_are_known() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    patterns = _MODEL_TO_CONVERSION_PATTERN.items()
    found = {name for name, pattern in patterns if pattern == "qwen2_moe"}
    assert found & set(CONFIG_MAPPING) == TYPES_WITH_EXPERTS & set(CONFIG_MAPPING)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_moe", "olmoe", "olmoe, two sizes", "deepseek_v3", "qwen3_next", *DENSE],
)
@pytest.mark.parametrize("train_unembed", [True, False])
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_peft_joins_the_matrices_of_experts_and_finds_those_beside_them(
    model_type: str, train_unembed: bool, tmp_path: Path
) -> None:
    """Dense layers and shared experts have the names of experts' projections."""
    from peft import PeftModel

    reference = save_tiny(model_type, tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", train_unembed=train_unembed)
    to_peft(tmp_path / "adapter", tmp_path / "base")
    tokens = torch.arange(12)
    with torch.no_grad():
        expected = Reference(reference, adapter).logits(tokens)
        found = PeftModel.from_pretrained(reference, tmp_path / "adapter")(tokens[None]).logits[0]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_5_text", {}),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]}),
        ("nemotron_h, no mlp", {}),
    ],
)
def test_modules_that_are_one_matrix_of_the_model_have_one_adapter_in_peft(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Queries, keys and values of linear attention; gate and x of Mamba, beside rows of neither.

    `peft` itself takes no adapter of Mamba's output, so there the merged model has to do.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, folder, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    reference = save_tiny(model_type, base, **changes)
    adapter = save_adapter(base, folder)
    tokens = torch.arange(12)
    is_taken = "nemotron_h" not in model_type
    with torch.no_grad():
        expected = Reference(reference, adapter).logits(tokens)
        to_peft(folder, base)
        merge(base, folder, merged, lambda *facts: None)
        found = [AutoModelForCausalLM.from_pretrained(merged)(tokens[None]).logits[0]]
        assert (check_export("peft", base, folder, folder) is not None) == is_taken
        if is_taken:
            found.append(PeftModel.from_pretrained(reference, folder)(tokens[None]).logits[0])
    for logits in found:
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_an_adapter_of_mamba_layers_needs_its_base_model_to_be_exported(tmp_path: Path) -> None:
    save_tiny("nemotron_h", tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(ValidationError, match="give its folder with --base"):
        to_peft(tmp_path / "adapter")


def test_the_matrices_of_experts_are_not_merged_into_tensors_of_all(tmp_path: Path) -> None:
    save_tiny("gpt_oss", tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter")
    to_peft(tmp_path / "adapter")
    with pytest.raises(ValidationError, match="a matrix for each"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", lambda *facts: None)


def test_adapters_whose_gate_and_up_share_a_factor_are_not_exported(tmp_path: Path) -> None:
    save_tiny("inkling_text", tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(ValidationError, match="one A for gate and up together"):
        to_peft(tmp_path / "adapter")


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    """Give the tensors of a checkpoint other names, its manifest with them."""
    import hashlib

    manifest = json.loads((folder / "tinsmith.json").read_text())
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        path = folder / name
        save_file({change(k): v for k, v in load_file(path).items()}, path, {"format": "pt"})
        manifest["files"][name] = {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    del manifest["sha256"]
    encoded = json.dumps(manifest, indent=1, sort_keys=True).encode()
    manifest["sha256"] = hashlib.sha256(encoded).hexdigest()
    (folder / "tinsmith.json").write_text(json.dumps(manifest))


def test_names_that_peft_does_not_find_are_an_error(tmp_path: Path) -> None:
    """In release 0.1 the adapter of a model that sees images had the names of one that does not."""
    base = save_model("gemma 3 that sees images", tmp_path / "base")
    adapter = tmp_path / "adapter"
    save_adapter(base, adapter)
    to_peft(adapter)
    path = adapter / "adapter_model.safetensors"
    short = {k.replace(".language_model.", "."): v for k, v in load_file(path).items()}
    save_file(short, path, {"format": "pt"})
    with pytest.raises(ValidationError, match=r"'model\.layers\.0.*does not have"):
        check_export("peft", base, adapter, adapter)


@pytest.mark.parametrize("name", ["gemma 3 that sees images", "llama, tied", "gpt-neox"])
def test_a_checkpoint_of_release_0_1_still_loads(name: str, tmp_path: Path) -> None:
    base = save_model(name, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "new")
    (head,) = adapter.unembedding_modules
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    renamed(tmp_path / "old", lambda name: name.replace("model.unembed_tokens", head))
    assert f"base_model.model.{head}.lora_A.weight" in load_file(
        tmp_path / "old" / "adapter_model.safetensors"
    )
    before = adapter.flat.clone()
    adapter.flat.zero_()
    checkpoints.load(adapter, tmp_path / "old", "training")
    assert torch.equal(adapter.flat, before)


def test_a_damaged_adapter_does_not_pass_for_an_export(tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "base")
    adapter, broken = tmp_path / "adapter", tmp_path / "broken"
    save_adapter(base, adapter)
    to_peft(adapter)
    shutil.copytree(adapter, broken)
    path = broken / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 16}))
    with pytest.raises(ValidationError, match="logits differ"):
        check_export("peft", base, adapter, broken)
