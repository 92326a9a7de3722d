"""A model as a GGUF file computes and encodes what its folder does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, LlamaFileType
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support import byte_tokenizer
from tinsmith.cli.weights import gguf_file, gguf_tokenizer, k_quants
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.sources import model_folder
from tinsmith.errors import ValidationError

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 128}),
}
TOKENS = torch.arange(3, 40)[None]
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def build(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model with every number other than zero and one, biases and norms too."""
    config_class, model_class, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**{**SHAPE, **settings, **changes})
    model = model_class(config)  # type: ignore[arg-type]  # they belong together
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    model = model.to(dtype)
    model.save_pretrained(folder)
    # Readers want a file with some merges.
    byte_tokenizer.save(folder, merges=[("i", "t"), ("Ġ", "it")])
    return model


def write(folder: Path, target: Path) -> list[str]:
    told: list[str] = []
    gguf_file.write(folder, target, "tiny", lambda done, total, name: told.append(name))
    return told


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in FAMILIES]
    + [("llama", torch.bfloat16), ("qwen3", torch.float16)],
    ids=str,
)
def test_a_gguf_file_has_the_logits_of_its_folder(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    build(tmp_path / "model", family, dtype)
    wanted = logits(load(tmp_path / "model"))
    told = write(tmp_path / "model", tmp_path / "tiny.gguf")
    assert len(told) == len(set(told)) >= 20
    # Back through our own reader, which knows nothing of the writer.
    folder = model_folder(
        str(tmp_path / "tiny.gguf"), LocalEngineConfig(cache_folder=tmp_path / "cache")
    )
    have = logits(load(folder))
    # Every number is stored exactly, whatever its type.
    assert torch.allclose(have, wanted, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_quantized_file_has_every_number_within_half_a_step(family: str, tmp_path: Path) -> None:
    """Also after the rows of the llama family have changed places."""
    build(tmp_path / "model", family)
    file = tmp_path / "tiny.gguf"
    gguf_file.write(tmp_path / "model", file, "tiny", lambda *facts: None, quantization="q8_0")
    kinds = {each.name: each.tensor_type.name for each in GGUFReader(file).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "Q8_0"
    # 48 numbers do not divide into blocks of 32.
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.attn_norm.weight"]) == ("F32", "F32")
    folder = model_folder(str(file), LocalEngineConfig(cache_folder=tmp_path / "cache"))
    wanted, have = load(tmp_path / "model").state_dict(), load(folder).state_dict()
    assert wanted.keys() == have.keys()
    for name, values in wanted.items():
        is_kept = values.ndim == 1 or values.shape[-1] % 32
        blocks = values if is_kept else values.reshape(-1, 32)
        step = 0.0 if is_kept else blocks.abs().amax(1, keepdim=True) / 127
        # A scale has 16 bits, and so half a step and a little more.
        off = (have[name].reshape(blocks.shape) - blocks).abs()
        assert (off <= 0.6 * step + 1e-6).all(), name


def test_llama_cpp_s_mix_gives_more_bits_to_what_decides_more() -> None:
    def kinds(name: str, row_length: int = 512) -> str:
        found = [
            k_quants.kind_of(name.format(layer), row_length, 16, is_tied=False).name
            for layer in range(16)
        ]
        return "".join({"Q4_K": ".", "Q6_K": "+", "Q5_0": "-", "Q8_0": "="}[each] for each in found)

    assert kinds("blk.{}.attn_v.weight") == kinds("blk.{}.ffn_down.weight") == "++..+..+..+..+++"
    assert kinds("blk.{}.ffn_down.weight", 576) == "==--=--=--=--==="
    assert set(kinds("blk.{}.attn_q.weight")) == set(kinds("token_embd.weight")) == {"."}
    assert set(kinds("output.weight")) == {"+"}
    assert k_quants.kind_of("token_embd.weight", 512, 16, is_tied=True).name == "Q6_K"


def test_a_file_of_k_types_is_read_back(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    build(tmp_path / "model", "llama", **sizes)
    file = tmp_path / "tiny.gguf"
    gguf_file.write(tmp_path / "model", file, "tiny", lambda *facts: None, quantization="q4_k_m")
    reader = GGUFReader(file)
    assert reader.fields["general.file_type"].contents() == LlamaFileType.MOSTLY_Q4_K_M
    kinds = {each.name: each.tensor_type.name for each in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.0.attn_v.weight"] == "Q4_K"
    assert kinds["blk.1.attn_v.weight"] == kinds["blk.1.ffn_down.weight"] == "Q6_K"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    folder = model_folder(str(file), LocalEngineConfig(cache_folder=tmp_path / "cache"))
    wanted, have = load(tmp_path / "model").state_dict(), load(folder).state_dict()
    assert wanted.keys() == have.keys()
    for name, values in wanted.items():
        off = (have[name] - values).abs()
        if values.ndim == 1:
            assert not off.any(), name
        else:
            # 32 numbers have 16 steps between their smallest and largest.
            blocks = values.reshape(-1, 32)
            step = (blocks.amax(1) - blocks.amin(1)).clamp(min=0) / 15
            assert (off.reshape(blocks.shape) <= 1.1 * step[:, None]).all(), name
            assert off.mean() < 0.1 * values.abs().mean(), name


def said_by_llama_cpp(file: Path, prompt: str) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens after a text, as llama.cpp computes them."""
    llama = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    params = llama.CommonParams()
    params.model.path = str(file)
    params.n_parallel = params.cpuparams.n_threads = 1
    server = llama.Server(params)
    ask = {"prompt": prompt, "n_predict": 1, "n_probs": 8, "temperature": 0.0}
    (answer,) = server.handle_completions(ask)["choices"]
    (token,) = answer["logprobs"]["content"]
    return {each["id"]: each["logprob"] for each in token["top_logprobs"]}


@pytest.mark.parametrize(
    ("family", "changes", "quantization", "tolerance"),
    [(family, {}, None, 0.01) for family in FAMILIES]
    # The reader in `transformers` does not scale rotations: this is the one that can tell.
    + [("llama", {"rope_parameters": SCALED}, None, 0.01)]
    + [("llama", {}, "q8_0", 0.2), ("llama", {"hidden_size": 256}, "q4_k_m", 0.6)],
    ids=str,
)
def test_llama_cpp_computes_the_same_for_the_same_text(
    family: str,
    changes: dict[str, Any],
    quantization: str | None,
    tolerance: float,
    tmp_path: Path,
) -> None:
    """Its own reader, of the tokenizer too."""
    build(tmp_path / "model", family, **changes)
    file = tmp_path / "tiny.gguf"
    text = "So it is what it was: 2026, and 34 tokens."
    if quantization == "q4_k_m":
        pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    gguf_file.write(
        tmp_path / "model", file, "tiny", lambda *facts: None, quantization=quantization
    )
    found = said_by_llama_cpp(file, text)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model").encode(text)
    folder = tmp_path / "model"
    if quantization is not None:  # the numbers that the file has
        folder = model_folder(str(file), LocalEngineConfig(cache_folder=tmp_path / "cache"))
    with torch.no_grad():
        wanted = load(folder)(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    assert len(found) == 8
    for token, logprob in found.items():
        assert logprob == pytest.approx(float(wanted[token]), abs=tolerance)
    if quantization is None:
        assert set(found) == set(wanted.topk(8).indices.tolist())


def test_reading_a_gguf_file_shows_no_progress_bar_of_a_library(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "model", "llama")
    write(tmp_path / "model", tmp_path / "tiny.gguf")
    capfd.readouterr()
    model_folder(str(tmp_path / "tiny.gguf"), LocalEngineConfig(cache_folder=tmp_path / "cache"))
    assert capfd.readouterr() == ("", "")


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    build(tmp_path / "model", "llama")
    write(tmp_path / "model", tmp_path / "tiny.gguf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    text = "Ahoy, 2026!  So it's naïve…\n"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert 257 in ours.encode(text)
    fields = GGUFReader(tmp_path / "tiny.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == byte_tokenizer.TEMPLATE
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert [kinds[0], kinds[1], kinds[259]] == [3, 1, 5]
    assert fields["general.name"].contents() == "tiny"


def test_llama_3_frequencies_are_written_as_factors(tmp_path: Path) -> None:
    model = build(tmp_path / "model", "llama", rope_parameters=SCALED)
    write(tmp_path / "model", tmp_path / "tiny.gguf")
    reader = GGUFReader(tmp_path / "tiny.gguf")
    factors = next(each for each in reader.tensors if each.name == "rope_freqs.weight").data
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 8, 2) / 8)
    assert torch.allclose(plain / torch.tensor(factors), model.model.rotary_emb.inv_freq)
    assert factors.max() == 8.0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"attention_bias": True}, "bias"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "'yarn'",
        ),
    ],
    ids=["family", "bias", "rope"],
)
def test_what_gguf_would_compute_differently_is_refused_by_name(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    build(tmp_path / "model", "llama")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValidationError, match=complaint):
        write(tmp_path / "model", tmp_path / "tiny.gguf")


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def test_ways_to_split_text_have_the_names_that_readers_know() -> None:
    assert gguf_tokenizer.splitting(split_by(LLAMA_3)) == "llama-bpe"
    assert gguf_tokenizer.splitting(split_by(LLAMA_3.replace("{1,3}", ""))) == "qwen2"
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, level]}
    assert gguf_tokenizer.splitting(steps) == "smollm"
    with pytest.raises(ValidationError, match="no GGUF name"):
        gguf_tokenizer.splitting(split_by(r"\w+"))
