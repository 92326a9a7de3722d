"""A tiny random model whose tokens are bytes, for tests of text: any text can come out of it."""

from __future__ import annotations

from pathlib import Path

from tests.support import byte_tokenizer

VOCAB_SIZE = 300
"""More than the tokenizer has, as models do."""

END = 0


def write(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=END,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return byte_tokenizer.save(folder, [('"', ":"), ("{", '"'), ("a", "g")])
