"""A random two-layer Llama for tests: small, seeded, and on disk as transformers loads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save(folder: Path, *, seed: int, **settings: Any) -> Path:
    """Write the weights into `folder`. `settings` are those of its `LlamaConfig` that matter to
    the test: `vocab_size`, `max_position_embeddings` and special tokens above all."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    size = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(**{**size, **settings})).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, characters: Sequence[str]) -> Path:
    """One token per character, after those for padding, begin and end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *characters]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder
