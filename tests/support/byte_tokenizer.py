"""A tokenizer for the fake engine, without a hub: a token is a byte, and 0 ends a message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<end>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def ids(text: str) -> list[int]:
    """The tokens of a text."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = "".join(piece for piece, _ in alphabet.pre_tokenize_str(text))
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [known.index(letter) + 1 for letter in letters]


def save(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> Path:
    """Write it into `folder`, as transformers loads it. Each merge is one more token."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: i for i, letter in enumerate(alphabet[:255], 1)}
    vocabulary |= {a + b: 256 + number for number, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder
