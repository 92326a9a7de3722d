"""Kimi-K2.5 and K2.6 as published: the language part of a model that also sees images.

Its settings are nested, its tensors lie under a prefix beside those of a vision tower, and its
experts are whole numbers of 4 bits in words of 32. All that is written here after the published
files, from a tiny random Kimi-K2, which is the reference. Its images are in `vision.test_kimi`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.families.test_families import packed_logits
from tests.engine.families.test_param_counts import PUBLISHED, only_train
from tests.engine.families.test_published_settings import KIMI
from tests.engine.model.test_packed_files import words
from tests.engine.sample.sampling_reference import (
    CPU,
    answer,
    assert_trainer_agrees,
    job_of,
    tokens_of,
    trainer_logits,
)
from tests.engine.train.training_reference import RAGGED, RELATIVE, Reference, assert_close, succeed
from tests.support.tiny_families import save_tiny
from tests.support.tiny_vision import image_chunk
from tinsmith.cli.weights.merging import merge
from tinsmith.cli.weights.peft_layout import to_peft
from tinsmith.engine.images import count_images
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.checking import check_model
from tinsmith.engine.local.model.experts.grouped_router import GroupedRouter
from tinsmith.engine.local.model.foreign.config import is_foreign
from tinsmith.engine.local.model.lora import Adapter, AdapterPool, Layout
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import read_config
from tinsmith.engine.local.model.verifying import verification
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.errors import ValidationError
from tinsmith.types import LoraConfig, ModelInput

NewAdapter = Callable[..., Adapter]
GROUP = 32
TINY = {"n_group": 1, "topk_group": 1, "moe_intermediate_size": GROUP}

QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def whole_settings(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "ignore_index": -100,
        "media_placeholder_token_id": 163_605,
        "model_type": "kimi_k25",
        "pad_token_id": 0,
        "text_config": {**text, "model_type": "kimi_k2"},
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {
            "init_pos_emb_height": 64,
            "init_pos_emb_time": 4,
            "init_pos_emb_width": 64,
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": 1152,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "text_hidden_size": 7168,
            "vt_hidden_size": 1152,
            "vt_intermediate_size": 4304,
            "vt_num_attention_heads": 16,
            "vt_num_hidden_layers": 27,
        },
    }


def packed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored of an expert's matrix, and the numbers that it stands for."""
    rows, columns = weight.shape
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(dim=2) / 7).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    stored = {
        f"{name}_packed": words((codes.flatten(1) + 8).long(), 4),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }
    return stored, (codes * scales.float()[..., None]).flatten(1)


def save_published(folder: Path, *, is_packed: bool) -> Any:
    """Such a folder, and the model that `transformers` makes of the same numbers."""
    reference = save_tiny("kimi_k2", folder, **TINY)
    text = json.loads((folder / "config.json").read_text())
    stored, plain = {}, load_file(folder / "model.safetensors")
    for name, weight in plain.items():
        if is_packed and ".experts." in name:
            parts, plain[name] = packed(f"language_model.{name}", weight)
            stored |= parts
        else:
            stored[f"language_model.{name}"] = weight
    if is_packed:
        text["quantization_config"] = QUANTIZATION
        save_file(plain, folder / "model.safetensors", {"format": "pt"})
        reference = type(reference).from_pretrained(
            folder,
            config=reference.config,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    stored["vision_tower.patch_embed.proj.weight"] = torch.randn(16, 3, 14, 14)
    stored["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.randn(48, 16)
    stored["mm_projector.proj.0.weight"] = torch.randn(64, 64)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    settings = {**whole_settings(text), "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings))
    return reference.eval()


class Whole(torch.nn.Module):
    """The reference under the names that its modules have in the whole model."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.language_model = text.model
        self.lm_head = text.lm_head

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.model.language_model(input_ids=tokens).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))


def models_of(folder: Path, **options: Any) -> BaseModels:
    return BaseModels(
        LocalEngineConfig(
            device="cpu",
            models={"tiny": str(folder)},
            cache_folder=folder.parent / "cache",
            **options,
        )
    )


@pytest.mark.parametrize("is_packed", [False, True], ids=["in full", "in 4 bits"])
def test_its_language_part_has_the_logits_and_gradients_of_transformers(
    is_packed: bool, new_adapter: NewAdapter, tmp_path: Path
) -> None:
    reference = save_published(tmp_path / "model", is_packed=is_packed)
    decoder = models_of(tmp_path / "model").get("tiny")
    assert not is_foreign(decoder.config) and decoder.config.latent is not None
    sequences = [torch.tensor(tokens_of(length, length)) for length in (9, 1, 33)]
    for sequence, found in zip(sequences, packed_logits(decoder, sequences), strict=True):
        with torch.no_grad():
            expected = reference(sequence[None]).logits[0]
        assert (found - expected).abs().max() <= RELATIVE * expected.abs().max()
    adapter = new_adapter(decoder)
    loss, _, expected = Reference(Whole(reference), adapter).run(RAGGED)
    output = succeed(decoder, RAGGED, adapter)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=RELATIVE)
    assert adapter.grad is not None
    assert_close(adapter.grad, expected, 3 * RELATIVE)
    prompt = tokens_of(20)
    response = answer(Generator(decoder, CPU), job_of("a", prompt, seed=1), adapter)
    assert_trainer_agrees(decoder, prompt, response, adapter)


def test_it_has_the_adapters_of_kimi_k2(tmp_path: Path) -> None:
    """As many numbers, by the names of the whole model's modules."""
    (tmp_path / "config.json").write_text(json.dumps(whole_settings(KIMI)))
    config = models_of(tmp_path, verify_models=False).config("tiny")
    _, _, counts = PUBLISHED["moonshotai/Kimi-K2-Thinking"]
    found = {part: Layout(config, LoraConfig(rank=1, **only_train(part))).size for part in counts}
    assert found == counts
    names = [name for each in config.projections for name in each.modules]
    assert names[0] == "model.language_model.layers.0.self_attn.q_a_proj"
    assert config.eos_token_ids == (KIMI["eos_token_id"],)
    assert config.max_context_length == 262_144


def test_an_adapter_is_merged_into_the_published_files_and_comes_back_from_pefts(
    tmp_path: Path,
) -> None:
    """Experts are merged where each has a matrix in full."""
    base, adapter, merged = (tmp_path / name for name in ("model", "adapter", "merged"))
    save_published(base, is_packed=False)
    config = models_of(base).config("tiny")
    pool = AdapterPool(config, torch.device("cpu"), torch.float32)
    own = pool.create("tiny", LoraConfig(rank=3, seed=1))
    own.flat.copy_(torch.randn(len(own.flat), generator=torch.Generator().manual_seed(2)) * 0.05)
    checkpoints.save(own, adapter, "sampler")
    to_peft(adapter, base)
    back = pool.create_empty("tiny", checkpoints.read_lora(adapter, config))
    checkpoints.load(back, adapter, "sampler")
    torch.testing.assert_close(back.flat, own.flat, rtol=1e-6, atol=0)
    merge(base, adapter, merged, lambda *facts: None)
    tokens = tokens_of(20)
    expected = trainer_logits(models_of(base).get("tiny"), tokens, own)
    found = trainer_logits(models_of(merged).get("tiny"), tokens)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_check_says_what_it_takes_before_it_is_converted(tmp_path: Path) -> None:
    save_published(tmp_path / "model", is_packed=True)
    found = check_model(tmp_path / "model", rank=4)
    assert (found.model_type, found.runs_on) == ("kimi_k25", "decoder")
    assert found.stored_as == "compressed-tensors (pack-quantized)"
    assert found.image_tokens == 0 and found.ranks == ()


def test_without_the_processors_file_images_are_refused_and_text_is_served(tmp_path: Path) -> None:
    save_published(tmp_path / "model", is_packed=False)
    info = models_of(tmp_path / "model").info("tiny")
    assert info.images is None
    with pytest.raises(
        ValidationError, match=r"'image' cannot be used: this model reads text only"
    ):
        count_images(ModelInput(chunks=[image_chunk(2, 2)]), info.images, "prompt")


def test_several_ranks_are_refused_with_the_reason(tmp_path: Path) -> None:
    save_published(tmp_path / "model", is_packed=False)
    with pytest.raises(UnsupportedModelError, match=r"divide experts.*in our own decoder only"):
        models_of(tmp_path / "model", ranks=2).config("tiny")


def test_shares_that_are_weighed_otherwise_are_found_when_it_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_published(tmp_path, is_packed=False)
    config = read_config(tmp_path)
    assert verification.compare(tmp_path, config) <= verification.TOLERANCE
    forward = GroupedRouter.forward
    monkeypatch.setattr(
        GroupedRouter, "forward", lambda self, *args: forward(replace(self, bias=-self.bias), *args)
    )
    assert verification.compare(tmp_path, config) > 100 * verification.TOLERANCE
