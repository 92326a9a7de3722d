"""Streamed text against the tokenizer's own text of the whole list, with real tokenizers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.tiny_tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
)
from tinsmith.detokenizer import Detokenize, Detokenizer

TEXT = "Grüße, 日本語 und 😀😀! " * 8


def _detokenize(tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> Detokenize:
    def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    return text_of


def _streamed(detokenize: Detokenize, parts: list[list[int]]) -> str:
    detokenizer = Detokenizer(detokenize)
    return "".join(map(detokenizer.push, parts)) + detokenizer.finish()


def _one_by_one(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


@pytest.mark.parametrize("skip_special_tokens", [False, True])
@pytest.mark.parametrize("make", [byte_level_tokenizer, metaspace_tokenizer])
def test_random_tokens_stream_as_the_text_of_the_whole(
    make: Callable[[], Tokenizer], skip_special_tokens: bool
) -> None:
    tokenizer, rng = make(), random.Random(7)
    detokenize = _detokenize(tokenizer, skip_special_tokens=skip_special_tokens)
    for _ in range(300):
        tokens = rng.choices(range(tokenizer.get_vocab_size()), k=rng.randrange(1, 90))
        cut = rng.randrange(len(tokens))
        whole = detokenize(tokens)
        assert _streamed(detokenize, _one_by_one(tokens)) == whole, tokens
        assert _streamed(detokenize, [tokens[:cut], [], tokens[cut:]]) == whole, tokens


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_characters_of_many_bytes_are_given_whole(make: Callable[[], Tokenizer]) -> None:
    detokenize = _detokenize(make())
    tokens: list[int] = make().encode(TEXT.replace(" ", "")).ids
    detokenizer = Detokenizer(detokenize)
    pieces = [detokenizer.push([token]) for token in tokens]
    assert "".join(pieces) == TEXT.replace(" ", "") and detokenizer.finish() == ""


def test_a_byte_that_is_no_text_does_not_change_what_was_given() -> None:
    """`DecodeStream` raises here: the tokenizer rewrites the character before the bad byte."""
    tokenizer = byte_fallback_tokenizer()
    tokens = [0x41, 0xFF, *tokenizer.encode("b").ids]
    assert _streamed(_detokenize(tokenizer), _one_by_one(tokens)) == "A�b"


def test_text_before_an_incomplete_character_is_given_at_once() -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer = Detokenizer(_detokenize(tokenizer))
    first, *rest = tokenizer.encode("x😀").ids
    assert detokenizer.push([first, rest[0]]) == "x"
    assert detokenizer.push(rest[1:]) == "😀"


def test_special_tokens_between_words_do_not_cost_a_space() -> None:
    tokenizer = metaspace_tokenizer()
    vocab: dict[str, int] = tokenizer.get_vocab()
    skipping = _detokenize(tokenizer, skip_special_tokens=True)
    tokens = [vocab["▁Hello"], *[vocab["<s>"]] * 100, vocab["▁world"]]
    assert _streamed(skipping, _one_by_one(tokens)) == "Hello world"


def test_the_first_piece_after_a_prompt_keeps_its_space() -> None:
    tokenizer = metaspace_tokenizer()
    vocab: dict[str, int] = tokenizer.get_vocab()
    detokenizer = Detokenizer(_detokenize(tokenizer), [vocab["▁Hello"]])
    assert detokenizer.push([vocab["▁world"]]) == " world"


@pytest.mark.parametrize("byte", [b"a", b"\xff", b"\xf0"])
def test_the_work_of_a_token_does_not_grow_with_the_text(byte: bytes) -> None:
    sizes: list[int] = []

    def detokenize(tokens: list[int]) -> str:
        sizes.append(len(tokens))
        return bytes(tokens).decode(errors="replace")

    text = _streamed(detokenize, _one_by_one(list(byte * 1000)))
    assert text == (byte * 1000).decode(errors="replace")
    assert max(sizes) < 50


def test_every_cut_of_a_text_streams_the_same_characters() -> None:
    tokenizer = byte_level_tokenizer()
    tokens: list[int] = tokenizer.encode("aé日😀 b").ids
    whole: Any = tokenizer.decode(tokens)
    for first, second in itertools.combinations(range(len(tokens) + 1), 2):
        parts = [tokens[:first], tokens[first:second], tokens[second:]]
        assert _streamed(_detokenize(tokenizer), parts) == whole
