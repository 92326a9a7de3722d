"""Images in a conversation: read from the messages of either API, and put into the prompt.

A chat template writes the model's own mark where a message has an image; the mark's token is then
replaced by the image itself. Images come with the request: this server fetches nothing.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.engine.images import ImageRules, count_image
from tinsmith.errors import ValidationError
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput, ModelInputChunk

_FORMATS = {"image/png": "png", "image/jpeg": "jpeg", "image/jpg": "jpeg"}
_DATA_URI = re.compile(r"data:([\w/+.-]+);base64,", re.ASCII)
_DETAILS = (None, "auto", "high")


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image, and where in the request it was."""

    chunk: ImageChunk
    path: str


MARK = {"type": "image"}
"""What a chat template is told of an image."""


def openai_image(part: Mapping[str, Any], path: str) -> GivenImage:
    """A part of type `image_url`."""
    told = part.get("image_url")
    url = told.get("url") if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or not isinstance(url, str):
        raise ValidationError("expected an object with a url", f"{path}.image_url")
    if told.get("detail") not in _DETAILS:
        raise ValidationError(
            "images are read in the size that the model's own files say; leave it out",
            f"{path}.image_url.detail",
        )
    where = f"{path}.image_url.url"
    head = _DATA_URI.match(url)
    if head is None:
        raise ValidationError(
            "this server fetches nothing; send the image itself, as data:image/png;base64,…", where
        )
    return _given(head[1], url[head.end() :], where)


def anthropic_image(part: Mapping[str, Any], path: str) -> GivenImage:
    """A block of type `image`."""
    source = part.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        raise ValidationError(
            "this server fetches nothing; send the image itself, of type base64",
            f"{path}.source.type",
        )
    data = source.get("data")
    if not isinstance(data, str):
        raise ValidationError("expected a text", f"{path}.source.data")
    return _given(str(source.get("media_type")), data, f"{path}.source")


def with_images(
    tokens: Sequence[int], images: Sequence[GivenImage], rules: ImageRules | None
) -> ModelInput:
    """A rendered prompt in which images take the places of their marks."""
    if not images:
        return ModelInput.from_ints(tokens)
    counted = [_counted(image, rules) for image in images]
    assert rules is not None, "images were counted"
    marks = [index for index, token in enumerate(tokens) if token == rules.token_id]
    if len(marks) != len(images):
        raise ValidationError(
            f"have {len(images)} images, and the chat template leaves {len(marks)} places for "
            "them; texts must not have the model's own mark for an image",
            "messages",
        )
    chunks: list[ModelInputChunk] = []
    start = 0
    for mark, chunk in zip(marks, counted, strict=True):
        if mark > start:
            chunks.append(EncodedTextChunk(tokens=tokens[start:mark]))
        chunks.append(chunk)
        start = mark + 1
    if start < len(tokens):
        chunks.append(EncodedTextChunk(tokens=tokens[start:]))
    return ModelInput(chunks=chunks)


def _given(media_type: str, data: str, path: str) -> GivenImage:
    kind = _FORMATS.get(media_type)
    if kind is None:
        known = "image/png, image/jpeg"
        raise ValidationError(f"{media_type[:40]!r} is not supported; known: {known}", path)
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValidationError("the image is not in base64", path) from None
    return GivenImage(ImageChunk.model_validate({"data": decoded, "format": kind}), path)


def _counted(image: GivenImage, rules: ImageRules | None) -> ImageChunk:
    try:
        return count_image(image.chunk, rules)
    except ValidationError as error:
        raise ValidationError(error.problem, image.path) from None
