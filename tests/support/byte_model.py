"""A tiny random model whose tokens are bytes, for tests of text: any text can come out of it."""

from __future__ import annotations

from pathlib import Path

from tests.support import byte_tokenizer, tiny_llama

VOCAB_SIZE = 300
"""More than the tokenizer has, as models do."""

END = 0


def write(folder: Path) -> Path:
    tiny_llama.save(
        folder,
        seed=3,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=END,
        bos_token_id=1,
    )
    return byte_tokenizer.save(folder, [('"', ":"), ("{", '"'), ("a", "g")])
