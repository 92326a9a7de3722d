"""The compact decoder gives the logits that `transformers` gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinsmith.engine.local import kernels
from tinsmith.engine.local.model.batch import PackedAttention
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import AdapterSegments
from tinsmith.engine.local.model.rope import UnsupportedModelError
from tinsmith.engine.local.model.settings import decoder_config
from tinsmith.errors import EngineError

TOLERANCE = 1e-5
LENGTHS = (23, 1, 40, 8)


def packed_logits(decoder: Decoder, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    adapters = AdapterSegments.whole(sum(lengths))
    with torch.no_grad():
        attention = PackedAttention(decoder.config, lengths)
        hidden = decoder.hidden(torch.cat(sequences), positions, attention, adapters)
        return list(decoder.unembed(hidden, adapters).split(lengths))


def random_sequences(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (length,), generator=generator) for length in lengths]


def test_packed_logits_equal_those_of_transformers_on_each_sequence(
    variant: str, model_folder: Callable[[str], Path], reference_model: Callable[[str], Any]
) -> None:
    decoder = Decoder.load(model_folder(variant))
    reference = reference_model(variant)
    sequences = random_sequences()
    for sequence, logits in zip(sequences, packed_logits(decoder, sequences), strict=True):
        with torch.no_grad():
            expected = reference(sequence[None]).logits[0]
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_sequence_has_the_same_logits_whatever_is_packed_beside_it(
    tiny_decoder: Decoder,
) -> None:
    """Within 1e-5: matrix products over more rows may round differently."""
    sequences = random_sequences()
    together = packed_logits(tiny_decoder, sequences)
    for sequence, logits in zip(sequences, together, strict=True):
        (alone,) = packed_logits(tiny_decoder, [sequence])
        torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-6)


def test_weights_split_over_files_and_under_another_prefix_are_found(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_llama_folder / "config.json", tmp_path)
    weights = load_file(tiny_llama_folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    names = sorted(renamed)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: renamed[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    sequences = random_sequences()
    expected = packed_logits(Decoder.load(tiny_llama_folder), sequences)
    found = packed_logits(Decoder.load(tmp_path), sequences)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_older_files_spell_rope_settings_otherwise_and_mean_the_same() -> None:
    base = {"model_type": "llama", "num_hidden_layers": 2, **_SHAPE}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = {
        **base,
        "rope_theta": 5e5,
        "rope_scaling": {**scaling, "rope_type": "llama3", "original_max_position_embeddings": 64},
    }
    new = {
        **base,
        "rope_parameters": {
            **scaling,
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "original_max_position_embeddings": 64,
        },
    }
    assert decoder_config(old) == decoder_config(new)


def test_gemma_3_takes_its_local_layers_from_the_pattern_of_older_files() -> None:
    config = decoder_config(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 7,
                "sliding_window": 16,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        }
    )
    assert [spec.window for spec in config.layers] == [16] * 5 + [None, 16]
    local, total = config.layers[0].rope, config.layers[5].rope
    assert local is not None and (local.theta, local.kind) == (10_000.0, "default")
    assert total is not None and (total.theta, total.kind, total.factor) == (1e6, "linear", 8.0)
    assert config.is_tied and config.num_heads == 8 and config.head_dim == 256


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]},
            "chunked_attention",
        ),
    ],
)
def test_what_the_decoder_does_not_know_is_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    settings = {"model_type": "llama", "num_hidden_layers": 2, **_SHAPE, **change}
    with pytest.raises(UnsupportedModelError, match=named):
        decoder_config(settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_kernels_the_residual_stream_and_logits_are_rounded_as_the_weights_are(
    dtype: torch.dtype, tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no product that would be left in float32."""
    monkeypatch.setattr(kernels, "are_usable", lambda x: False)
    decoder = Decoder.load(tiny_llama_folder, dtype=dtype)
    assert decoder.stream_dtype == dtype
    segments = AdapterSegments.whole(3)
    hidden = torch.randn(3, decoder.config.hidden_size).to(dtype)
    assert decoder.raw_logits(hidden, segments).dtype == dtype


def test_a_missing_tensor_is_named(tiny_llama_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_llama_folder / "config.json", tmp_path)
    weights = load_file(tiny_llama_folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        Decoder.load(tmp_path)


_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


@pytest.mark.real_model
@pytest.mark.parametrize("packs", [False, True])
def test_smollm2_has_the_logits_of_transformers(real_model_folder: Path, packs: bool) -> None:
    import transformers

    decoder = Decoder.load(real_model_folder)
    if packs:
        decoder.allow_packing()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        real_model_folder, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model_folder)
    texts = ["The capital of France is Paris.", "def add(a, b):\n    return a + b\n" * 8]
    sequences = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    for sequence, logits in zip(sequences, packed_logits(decoder, sequences), strict=True):
        with torch.no_grad():
            expected = reference(sequence[None]).logits[0]
        # Logits reach 40 here; the two attention kernels of transformers are 5e-5 apart themselves.
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
        difference = logits.log_softmax(-1) - expected.log_softmax(-1)
        assert difference.abs().mean() < 1e-5
