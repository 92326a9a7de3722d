"""When a sequence ends: tokens, strings however they are split, and lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from tests.support.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from tinsmith.engine.stopping import StopRule, StopWatch
from tinsmith.types import SamplingParams

EOS = (2,)


class ByteTokens:
    """A tokenizer whose tokens are arbitrary byte strings, numbered as they come."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = [b"<pad>", b"<bos>", b"<eos>"]

    def encode(self, pieces: list[bytes]) -> list[int]:
        self.pieces += pieces
        return list(range(len(self.pieces) - len(pieces), len(self.pieces)))

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


def splits(text: bytes) -> Iterator[list[bytes]]:
    """Every way to cut a text into pieces."""
    for count in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), count):
            edges = [0, *cuts, len(text)]
            yield [text[a:b] for a, b in itertools.pairwise(edges)]


def run(params: SamplingParams, pieces: list[bytes], room: int = 100) -> tuple[int, str | None]:
    """How many pieces are seen before the sequence ends, and why it does."""
    tokenizer = ByteTokens()
    tokens = tokenizer.encode(pieces)
    watch = StopWatch(StopRule.of(params, EOS, room), tokenizer.decode, [1])
    for count, token in enumerate(tokens, 1):
        if reason := watch.see(token):
            return count, reason
    return len(tokens), None


@pytest.mark.parametrize("text", [b"ab\n\nQ:xy", "aé—😀".encode()])
def test_a_stop_string_is_found_at_every_split(text: bytes) -> None:
    stop = text.decode()[2:5]
    end = text.index(stop.encode()) + len(stop.encode())
    for pieces in splits(text):
        lengths = list(itertools.accumulate(map(len, pieces)))
        wanted = next(i for i, length in enumerate(lengths, 1) if length >= end)
        assert run(SamplingParams(stop=[stop]), pieces) == (wanted, "stop"), pieces


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer()])
@pytest.mark.parametrize("stop", ["語。", "本語", "😀"])
def test_a_stop_string_of_many_byte_tokens_ends_the_sequence_at_its_last(
    tokenizer: Tokenizer, stop: str
) -> None:
    before, after = "日本" * 40, "語。😀日"
    text = before + after
    tokens: list[int] = tokenizer.encode(text).ids
    end = len(text[: text.index(stop) + len(stop)].encode())
    watch = StopWatch(StopRule.of(SamplingParams(stop=stop), (), 1000), tokenizer.decode, [1])
    seen = next(n for n, token in enumerate(tokens, 1) if watch.see(token))
    assert len(tokenizer.decode(tokens[:seen]).encode()) == end


def test_a_special_token_by_its_text_is_a_stop_string() -> None:
    tokenizer = byte_level_tokenizer()
    end: int = tokenizer.token_to_id("<|end|>")

    def detokenize(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    watch = StopWatch(StopRule.of(SamplingParams(stop="<|end|>"), (), 10), detokenize, [1])
    assert [watch.see(5), watch.see(end)] == [None, "stop"]


def test_a_stop_string_is_found_although_a_character_after_it_is_incomplete() -> None:
    emoji = "😀".encode()
    assert run(SamplingParams(stop=["\n"]), [b"a\n" + emoji[:2], emoji[2:]]) == (1, "stop")


def test_bytes_that_never_become_a_character_do_not_hide_a_stop_string() -> None:
    pieces = [b"\xff"] * 7 + [b"\xf0", b"EN", b"D"]
    assert run(SamplingParams(stop="END"), pieces) == (10, "stop")


def test_a_stop_string_is_not_pieced_together_with_the_prompt() -> None:
    tokenizer = ByteTokens()
    prompt = tokenizer.encode([b"EN"])
    (token,) = tokenizer.encode([b"D"])
    rule = StopRule.of(SamplingParams(stop="END"), EOS, 10)
    assert StopWatch(rule, tokenizer.decode, prompt).see(token) is None


def test_any_of_several_stop_strings_ends_the_sequence() -> None:
    assert run(SamplingParams(stop=["zzz", "c"]), [b"a", b"b", b"c", b"d"]) == (3, "stop")


def test_without_stop_the_end_of_sequence_ends_it() -> None:
    watch = StopWatch(StopRule.of(SamplingParams(), EOS, 10), None, [1])
    assert [watch.see(5), watch.see(2)] == [None, "stop"]


def test_an_empty_stop_list_means_nothing_but_length_ends_it() -> None:
    watch = StopWatch(StopRule.of(SamplingParams(stop=[], max_tokens=3), EOS, 10), None, [1])
    assert [watch.see(2), watch.see(2), watch.see(2)] == [None, None, "length"]


def test_stop_tokens_are_taken_beside_the_end_of_sequence() -> None:
    rule = StopRule.of(SamplingParams(stop=[7, 8]), EOS, 10)
    assert rule.token_ids == {2, 7, 8}
    assert StopWatch(rule, None, [1]).see(8) == "stop"


@pytest.mark.parametrize(
    ("max_tokens", "room", "wanted"), [(None, 4, 4), (3, 9, 3), (9, 3, 3), (5, 0, 0)]
)
def test_the_length_is_limited_by_request_and_context(
    max_tokens: int | None, room: int, wanted: int
) -> None:
    assert StopRule.of(SamplingParams(max_tokens=max_tokens), EOS, room).max_tokens == wanted


def test_a_stop_in_the_last_permitted_token_counts_as_stop() -> None:
    watch = StopWatch(StopRule.of(SamplingParams(max_tokens=2), EOS, 10), None, [1])
    assert [watch.see(5), watch.see(2)] == [None, "stop"]


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="without a tokenizer"):
        StopWatch(StopRule.of(SamplingParams(stop="x"), EOS, 10), None, [1])
