"""The three ways tokenizers put text together, each with a small vocabulary."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level_tokenizer() -> Tokenizer:
    """A token per byte, and some of several: characters are spread over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("a", "b"), ("Ã", "¼"), ("ð", "Ł")]
    pieces = alphabet + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Pieces that carry their space in front; the one before the first piece is dropped."""
    pieces = ["▁", "▁Hello", "▁world", "wor", "ld", "!", "▁▁", "é", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2: Metaspace, and a token per byte for characters without a piece."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁a", "b", "<unk>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer
