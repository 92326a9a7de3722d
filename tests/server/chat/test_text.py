"""Text as it streams: whole characters, and nothing from a stop string on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.support.tiny_tokenizers import byte_fallback_tokenizer
from tinsmith.engine.base import Shaping
from tinsmith.errors import ValidationError
from tinsmith.server.chat.openai import read_chat, read_completion
from tinsmith.server.chat.text import TextStream
from tinsmith.text_model import TextModel

if TYPE_CHECKING:
    from collections.abc import Sequence


class Bytes:
    """One token per byte."""

    most_decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.most_decoded = max(self.most_decoded, len(tokens))
        return bytes(tokens).decode(errors="replace")


def _stream(*stops: str) -> TextStream:
    return TextStream(cast(TextModel, Bytes()), stops)


@pytest.mark.parametrize("text", ["plain", "ünïcödé ✓ done", "日本語"])
def test_every_way_to_cut_a_text_streams_the_same_characters(text: str) -> None:
    """S91."""
    data = text.encode()
    for first, second in itertools.combinations(range(len(data) + 1), 2):
        stream = _stream()
        parts = [data[:first], data[first:second], data[second:]]
        pieces = [stream.add(list(part)) for part in parts]
        assert "".join(pieces) + stream.finish() == text
        assert all("\ufffd" not in piece for piece in pieces)


def test_nothing_of_a_stop_string_is_ever_sent() -> None:
    data = b"one two END three"
    for cut in range(len(data)):
        stream = _stream("END", "TWO")
        pieces = stream.add(list(data[:cut])) + stream.add(list(data[cut:])) + stream.finish()
        assert pieces == "one two "


def test_what_only_looked_like_a_stop_string_is_sent_after_all() -> None:
    stream = _stream("END")
    assert stream.add(list(b"an E")) == "an "
    assert stream.add(list(b"N")) == ""
    assert stream.add(list(b"gine")) == "ENgine"
    stream = _stream("END")
    assert stream.add(list(b"EN")) + stream.finish() == "EN"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65])
def test_a_long_text_streams_whole_and_is_decoded_in_pieces(size: int) -> None:
    text = "ünïcödé ✓ 日本語 plain text " * 400
    data, model = text.encode(), Bytes()
    stream = TextStream(cast(TextModel, model), ("never",))
    parts = [list(data[start : start + size]) for start in range(0, len(data), size)]
    pieces = [stream.add(part) for part in parts]
    assert "".join(pieces) + stream.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert model.most_decoded < 1000, "the work of a token does not grow with the text"


def test_a_stop_string_is_found_wherever_a_long_text_is_cut() -> None:
    data = b"word " * 60 + b"STOP" + b" more"
    for size in (1, 3, 64, 100):
        stream = _stream("STOP")
        parts = [list(data[start : start + size]) for start in range(0, len(data), size)]
        assert "".join(stream.add(part) for part in parts) + stream.finish() == "word " * 60


def test_a_long_text_of_byte_tokens_streams_whole() -> None:
    """Byte-fallback tokenizers (Llama 2, Mistral) garble bytes that are cut within a character."""
    tokenizer, text = byte_fallback_tokenizer(), "日本語" * 40
    stream = TextStream(tokenizer)
    pieces = [stream.add([token]) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.finish() == text


def test_of_two_stop_strings_the_one_that_begins_first_ends_the_text() -> None:
    stream = _stream("END", "n E")
    assert stream.add(list(b"an END")) == "a"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias: expected the ids of tokens"),
        ({"prompt": "a", "logit_bias": {str(t): 1 for t in range(1025)}}, "at most 1024 tokens"),
        ({"prompt": "a", "min_p": "low"}, "min_p"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "n": 0}, "n:"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "stop": ["b", ""]}, r"stop\[1\]: an empty text would stop at once"),
        ({"prompt": "a", "modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        read_completion({"model": "m", **fields})


def test_settings_that_ask_for_nothing_are_accepted() -> None:
    ask = read_completion(
        {"model": "m", "prompt": ["a", "b"], "presence_penalty": 0, "best_of": 1, "suffix": None}
    )
    assert ask.prompts == ("a", "b") and ask.params.max_tokens == 16
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    of_no_effect = {
        "service_tier": "auto",
        "modalities": ["text"],
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "prompt_cache_retention": "24h",
        "store": False,
        "user": "x",
        "metadata": {"a": "b"},
    }
    assert read_chat({**chat, **of_no_effect}) == read_chat(chat)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_completion_tokens": 0, "max_tokens": 5}, 0),
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({}, None),
    ],
)
def test_the_newer_name_for_the_most_tokens_counts(fields: dict[str, Any], most: int) -> None:
    """Zero was taken for nothing, and the model went on to its context's end."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    assert read_chat({**chat, **fields}).params.max_tokens == most


def test_penalties_and_biases_are_read_for_the_engine() -> None:
    said = {"min_p": 0.1, "presence_penalty": 1, "logit_bias": {"7": -3}, "temperature": 0}
    ask = read_completion({"model": "m", "prompt": "a", **said})
    assert ask.shaping == Shaping(min_p=0.1, presence_penalty=1.0, logit_bias={7: -3.0})
    neutral = {"min_p": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}}
    assert read_completion({"model": "m", "prompt": "a", **neutral}).shaping is None


def test_chat_messages_may_be_texts_or_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = read_chat({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert ask.messages == ({"role": "user", "content": "ab"},)
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ValidationError, match=r"messages\[0\]"):
        read_chat({"model": "m", "messages": [{"role": "user", "content": image}]})
