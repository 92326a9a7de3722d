"""Tiny random models of every family, as folders that `transformers` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tinsmith.engine.local.config import EMBEDDED_SOURCE, LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.types import LoraConfig

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Name of the variant: class of the configuration, and what differs from TINY.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"head_dim": None}),
    "qwen2_sliding": (
        "Qwen2Config",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2_yarn": (
        "Qwen2Config",
        {
            "head_dim": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
}


def build_reference(variant: str, **changes: Any) -> Any:
    """A `transformers` model of the variant with random weights, norms and biases included."""
    import transformers

    class_name, differences = VARIANTS[variant]
    settings = {k: v for k, v in {**TINY, **differences, **changes}.items() if v is not None}
    config = getattr(transformers, class_name)(**settings)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                offset = 1.0 if "norm" in name and "gemma" not in variant else 0.0
                parameter.normal_(offset, 0.2)
    return model.eval()


def save_tokenizer(folder: Path, vocab_size: int = 97) -> None:
    """A tokenizer with one token per printable character, and the usual special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)][: vocab_size - 3]
    names = ["<pad>", "<bos>", "<eos>", *letters]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the variant's configuration, weights and tokenizer; made once."""
    folders: dict[str, Path] = {}

    def folder_of(variant: str) -> Path:
        if variant not in folders:
            folder = tmp_path_factory.mktemp(variant)
            build_reference(variant).save_pretrained(folder)
            save_tokenizer(folder)
            folders[variant] = folder
        return folders[variant]

    return folder_of


@pytest.fixture(scope="session")
def reference_model() -> Callable[[str], Any]:
    """The `transformers` model with the weights that `model_folder` saved."""
    return build_reference


@pytest.fixture(scope="session")
def tiny_llama_folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("llama")


@pytest.fixture(scope="session")
def tiny_decoder(tiny_llama_folder: Path) -> Decoder:
    """A two-layer Llama with 97 tokens; frozen, so that tests may share it."""
    return Decoder.load(tiny_llama_folder)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each family, and each setting of a family that changes the arithmetic."""
    return str(request.param)


def make_adapter(
    decoder: Decoder,
    *,
    fill_seed: int | None = 11,
    pool: AdapterPool | None = None,
    **lora: Any,
) -> Adapter:
    """An adapter, in a pool of its own; its B is random too unless `fill_seed` is None."""
    pool = pool or AdapterPool(decoder.config, decoder.device, decoder.dtype)
    adapter = pool.create("tiny", LoraConfig(**{"rank": 4, "seed": 1, **lora}))
    if fill_seed is not None:
        generator = torch.Generator().manual_seed(fill_seed)
        noise = torch.randn(adapter.layout.size, generator=generator) * 0.05
        adapter.flat.copy_(noise)
    return adapter


@pytest.fixture(scope="session")
def new_adapter() -> Callable[..., Adapter]:
    return make_adapter


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """The embedded SmolLM2-135M-Instruct, converted; fetched on first use."""
    from tinsmith.engine.local.model.sources import model_folder as find

    cache = os.environ.get("TINSMITH_TEST_CACHE")
    folder = {"cache_folder": Path(cache)} if cache else {}
    return find(EMBEDDED_SOURCE, LocalEngineConfig(device="cpu", **folder))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
