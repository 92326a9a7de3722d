"""The three ways tokenizers put text together, each with a small vocabulary."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


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


_CHAT_TOKENS = (
    *("<|end|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
)
"""By which the models that people train tell messages apart."""

_FIRST_BYTE = 100


def save_chat_tokenizer(folder: Path) -> None:
    """A token per byte, and one for each mark between messages of any family; 90 to 99 are free."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(_CHAT_TOKENS)}
    vocabulary |= {piece: _FIRST_BYTE + number for number, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _CHAT_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(folder)
