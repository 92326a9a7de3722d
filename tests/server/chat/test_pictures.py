"""Images in conversations, as OpenAI's and Anthropic's clients send them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.engine.test_images import RULES, png
from tinsmith.errors import ValidationError
from tinsmith.server.chat.anthropic import read_messages
from tinsmith.server.chat.ask import Ask
from tinsmith.server.chat.openai import read_chat
from tinsmith.server.chat.pictures import with_images
from tinsmith.types import EncodedTextChunk, ImageChunk

DATA = base64.b64encode(png(640, 480)).decode()
URI = f"data:image/png;base64,{DATA}"


def openai_part(url: Any = URI, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def anthropic_part(**source: Any) -> dict[str, Any]:
    told = {"type": "base64", "media_type": "image/png", "data": DATA, **source}
    return {"type": "image", "source": told}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def ask_openai(*parts: Any, role: str = "user") -> Ask:
    return read_chat({"model": "m", "messages": [{"role": role, "content": list(parts)}]})


def ask_anthropic(*parts: Any, role: str = "user") -> Ask:
    messages = [{"role": role, "content": list(parts)}]
    return read_messages({"model": "m", "max_tokens": 4, "messages": messages})


@pytest.mark.parametrize(
    "ask",
    [
        ask_openai(text("a"), text("b"), openai_part(), openai_part(detail="auto"), text("c")),
        ask_anthropic(text("a"), text("b"), anthropic_part(), anthropic_part(), text("c")),
    ],
    ids=["openai", "anthropic"],
)
def test_a_template_is_told_where_images_are(ask: Ask) -> None:
    mark = {"type": "image"}
    assert ask.messages[0]["content"] == [text("ab"), mark, mark, text("c")]
    assert [image.chunk for image in ask.images] == [
        ImageChunk(data=png(640, 480), format="png")
    ] * 2


def test_texts_alone_are_one_text_as_before() -> None:
    assert ask_openai(text("a"), text("b")).messages[0]["content"] == "ab"


def test_images_take_the_places_of_their_marks() -> None:
    ask = ask_openai(openai_part(), openai_part())
    found = with_images([5, 90, 6, 7, 90], ask.images, RULES).chunks
    assert [chunk.length for chunk in found] == [1, 300, 2, 300]
    assert found[2] == EncodedTextChunk(tokens=[6, 7])
    assert with_images([5, 90], (), RULES).to_ints() == [5, 90], "no image, no mark"


@pytest.mark.parametrize("marks", [[], [90, 90]])
def test_a_text_with_the_models_own_mark_beside_an_image_is_refused(marks: list[int]) -> None:
    ask = ask_openai(openai_part())
    problem = f"messages: have 1 images, and the chat template leaves {len(marks)} places"
    with pytest.raises(ValidationError, match=problem):
        with_images([5, *marks], ask.images, RULES)


def test_a_model_without_eyes_says_so_where_the_image_is() -> None:
    for ask, path in (
        (ask_openai(text("a"), openai_part()), r"messages\[0\].content\[1\].image_url.url"),
        (ask_anthropic(text("a"), anthropic_part()), r"messages\[0\].content\[1\].source"),
    ):
        with pytest.raises(ValidationError, match=path + ": .* this model reads text only"):
            with_images([5], ask.images, None)


def test_a_bomb_is_refused_with_its_numbers() -> None:
    uri = "data:image/png;base64," + base64.b64encode(png(60_000, 60_000)).decode()
    with pytest.raises(ValidationError, match="url: has 60000 x 60000 = 3600000000 pixels"):
        with_images([90], ask_openai(openai_part(uri)).images, RULES)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "address": (
        openai_part("https://example.org/a.png"),
        "image_url.url: this server fetches nothing; send the image itself, as data:image/png",
    ),
    "file": (openai_part("file:///etc/passwd"), "image_url.url: this server fetches nothing"),
    "format": (
        openai_part("data:image/webp;base64,AA=="),
        "image_url.url: 'image/webp' is not supported; known: image/png, image/jpeg",
    ),
    "base64": (
        openai_part("data:image/png;base64,%%%"),
        "image_url.url: the image is not in base64",
    ),
    "detail": (openai_part(detail="low"), "image_url.detail: images are read in the size that"),
    "nothing": ({"type": "image_url"}, "image_url: expected an object with a url"),
    "sound": ({"type": "input_audio"}, ": only text parts"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_cannot_be_an_image_is_refused_by_name(name: str) -> None:
    part, message = WRONG[name]
    with pytest.raises(ValidationError) as error:
        ask_openai(part)
    joint = "" if message.startswith(":") else "."
    assert str(error.value).startswith(f"messages[0].content[0]{joint}{message}")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (anthropic_part(type="url", url="https://example.org"), "source.type: this server fetches"),
        (anthropic_part(media_type="image/gif"), "source: 'image/gif' is not supported"),
        (anthropic_part(data=7), "source.data: expected a text"),
    ],
)
def test_what_cannot_be_an_image_block_is_refused_by_name(part: Any, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        ask_anthropic(part)
    assert str(error.value).startswith(f"messages[0].content[0].{message}")


def test_only_users_show_images() -> None:
    with pytest.raises(ValidationError, match="only text parts"):
        ask_openai(openai_part(), role="system")
    with pytest.raises(ValidationError, match="blocks of type 'image' are not supported here"):
        ask_anthropic(anthropic_part(), role="assistant")
