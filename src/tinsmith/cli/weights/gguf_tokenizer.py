"""The tokenizer in a model's folder, in the words of a GGUF file.

GGUF names the way text is split before it is encoded instead of describing it, so only ways whose
name is known can be written; with a wrong name a reader would encode text differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from tinsmith.errors import ValidationError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}


def describe(writer: GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Write vocabulary, merges, special tokens and chat template."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    except FileNotFoundError:
        raise ValidationError(f"there is no tokenizer.json in {folder}") from None
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValidationError(
            f"the tokenizer in {folder} is not byte-level BPE; no other can be written as GGUF"
        )
    tokens, kinds = _vocabulary(tokenizer, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting(tokenizer["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    )
    settings = _settings(folder)
    ids = {token: number for number, token in enumerate(tokens)}
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            add(ids[text])
    writer.add_add_bos_token(_begins_with_special(tokenizer.get("post_processor")))
    writer.add_add_space_prefix(False)
    template = _chat_template(folder, settings)
    if template is not None:
        writer.add_chat_template(template)


def splitting(step: dict[str, Any] | None) -> str:
    """GGUF's name for a pre-tokenizer of `tokenizer.json`."""
    steps = step["pretokenizers"] if step and step["type"] == "Sequence" else [step]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if pattern in _PATTERNS:
            return _PATTERNS[pattern]
    raise ValidationError("the tokenizer splits text in a way that we have no GGUF name for")


def _vocabulary(tokenizer: dict[str, Any], size: int) -> tuple[list[str], list[TokenType]]:
    """Each token's text and kind. A model may have more rows than there are tokens."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [TokenType.UNUSED] * size
    entries = [
        (text, number, TokenType.NORMAL) for text, number in tokenizer["model"]["vocab"].items()
    ]
    entries += [
        (
            each["content"],
            each["id"],
            TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED,
        )
        for each in tokenizer["added_tokens"]
    ]
    for text, number, kind in entries:
        if number >= size:
            raise ValidationError(f"the token {text!r} has no row in the model of {size} tokens")
        tokens[number], kinds[number] = text, kind
    return tokens, kinds


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return settings


def _begins_with_special(step: dict[str, Any] | None) -> bool:
    """Whether encoding puts a token before the text, which is the beginning of a sequence."""
    if step is None:
        return False
    if step["type"] == "Sequence":
        return any(_begins_with_special(each) for each in step["processors"])
    return step["type"] == "TemplateProcessing" and "SpecialToken" in step["single"][0]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None
