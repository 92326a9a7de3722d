"""Images before they are decoded: what headers say, how tokens are counted, what is refused."""

from __future__ import annotations

import struct
import time
import zlib
from typing import Any

import pytest

from tests.support.tiny_vision import image_bytes
from tinsmith.engine.image_headers import MAX_PIXELS, ImageSize, image_size
from tinsmith.engine.images import ImageRules, count_images, with_joined_texts
from tinsmith.engine.local.boundary.frames import encode
from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
)

RULES = ImageRules(
    token_id=90,
    patch_size=16,
    merge_size=2,
    frames=2,
    min_pixels=65_536,
    max_pixels=1_048_576,
    scale=1 / 255,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def png(width: int, height: int, *, depth: int = 8, before: bytes = b"") -> bytes:
    """A PNG file that claims a size, and has no pixels to show for it."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + _piece(b"IHDR", header)
    return start + before + _piece(b"IDAT", b"") + _piece(b"IEND", b"")


def _piece(kind: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def chunk(data: bytes, kind: Any = "png", **fields: Any) -> ImageChunk:
    return ImageChunk(data=data, format=kind, **fields)


def counted(*chunks: Any, rules: ImageRules | None = RULES) -> ModelInput:
    return count_images(ModelInput(chunks=chunks), rules, "prompt")


def test_texts_beside_each_other_become_one_chunk() -> None:
    texts = [EncodedTextChunk(tokens=tokens) for tokens in ([1], [2, 3], [], [4])]
    image = chunk(png(64, 64), expected_tokens=4)
    joined = with_joined_texts(ModelInput(chunks=[*texts, image, image, *texts]))
    text = EncodedTextChunk(tokens=[1, 2, 3, 4])
    assert joined == ModelInput(chunks=[text, image, image, text])
    assert with_joined_texts(ModelInput.empty()) == ModelInput.empty()


def test_a_prompt_of_very_many_chunks_is_sent_to_an_engine_quickly_once_they_are_joined() -> None:
    prompt = with_joined_texts(ModelInput(chunks=[EncodedTextChunk(tokens=[1])] * 65_000))
    began = time.thread_time()
    encode(prompt)
    assert time.thread_time() - began < 0.02, "0.3 s chunk by chunk"


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_size_is_read_from_the_header(kind: Any, mode: str) -> None:
    data = image_bytes(37, 21, format=kind, mode=mode)
    assert image_size(data, kind.lower()) == ImageSize(37, 21)


def test_the_size_of_a_progressive_jpeg_with_a_comment_is_read() -> None:
    options: dict[str, Any] = {"format": "JPEG", "progressive": True, "comment": b"x" * 300}
    assert image_size(image_bytes(70, 30, **options), "jpeg") == ImageSize(70, 30)


@pytest.mark.parametrize(
    ("width", "height"),
    [(1, 1), (640, 480), (31, 33), (15, 3000), (4000, 3000), (1024, 1024), (5, 900), (6000, 40)],
)
def test_tokens_are_counted_as_the_models_own_processor_counts(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    expected = smart_resize(height, width, 32, RULES.min_pixels, RULES.max_pixels)
    rows, columns = RULES.grid(ImageSize(width, height))
    assert (rows * 32, columns * 32) == expected
    (found,) = counted(chunk(png(width, height))).chunks
    assert found.length == rows * columns


def test_what_the_sender_expects_is_compared() -> None:
    (same,) = counted(chunk(png(640, 480), expected_tokens=300)).chunks
    assert same.length == 300
    with pytest.raises(ValidationError) as error:
        counted(EncodedTextChunk(tokens=[1]), chunk(png(640, 480), expected_tokens=299))
    assert str(error.value) == (
        "prompt.chunks[1].expected_tokens: says 299, and this model makes 300 tokens of an image "
        "of 640 x 480 pixels"
    )


ANIMATED = _piece(b"acTL", struct.pack(">II", 2, 0))
REFUSED: dict[str, tuple[ImageChunk, str]] = {
    "bomb": (
        chunk(png(60_000, 60_000)),
        f"data: has 60000 x 60000 = 3600000000 pixels; at most {MAX_PIXELS} are taken, so scale "
        "it down",
    ),
    "long": (chunk(png(2010, 10)), "data: is 2010 x 10; one side may be at most 200 times the"),
    "empty": (chunk(png(0, 10)), "data: has no pixels: 0 x 10"),
    "deep": (chunk(png(40, 40, depth=16)), "data: has 16 bits a channel; at most 8 are taken"),
    "animated": (
        chunk(png(40, 40, before=ANIMATED)),
        "data: is animated; send one of its frames",
    ),
    "cut png": (chunk(png(40, 40)[:30]), "data: the PNG file ends, or is broken, before its"),
    "cut jpeg": (
        chunk(image_bytes(40, 40, format="JPEG")[:100], "jpeg"),
        "data: the JPEG file ends, or is broken, before its first pixel",
    ),
    "many parts": (
        chunk(png(40, 40, before=_piece(b"tEXt", b"") * 1000)),
        "data: the PNG file ends, or is broken, before its first pixel, or has more than 1000",
    ),
    "much padding": (
        chunk(b"\xff\xd8" + b"\xff" * 100_000, "jpeg"),
        "data: the JPEG file ends, or is broken, before its first pixel, or has more than 1000",
    ),
    "jpeg as png": (
        chunk(image_bytes(40, 40, format="JPEG")),
        "format: says 'png', and the data is a jpeg file",
    ),
    "webp": (chunk(b"RIFF0000WEBPVP8 "), "format: says 'png', and the data is a webp file"),
    "gif": (chunk(b"GIF89a", "jpeg"), "format: says 'jpeg', and the data is a gif file"),
    "noise": (chunk(b"12345"), "format: says 'png', and the data is not a PNG or JPEG file"),
    "nothing": (chunk(b""), "format: says 'png', and the data is not a PNG or JPEG file"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_file_that_is_not_taken_is_refused_with_the_numbers(name: str) -> None:
    refused, message = REFUSED[name]
    with pytest.raises(ValidationError) as error:
        counted(refused)
    assert str(error.value).startswith(f"prompt.chunks[0].{message}")
    assert isinstance(error.value, TooLargeError) == (name == "bomb")


def test_an_image_may_have_just_as_many_pixels_as_are_taken() -> None:
    assert image_size(png(8192, 4096), "png") == ImageSize(8192, 4096)
    assert MAX_PIXELS == 8192 * 4096
    with pytest.raises(TooLargeError, match=f"has 8192 x 4097 = {MAX_PIXELS + 8192} pixels"):
        image_size(png(8192, 4097), "png")


def test_a_header_cut_anywhere_is_an_error_that_names_the_data() -> None:
    for kind in ("png", "jpeg"):
        whole = image_bytes(40, 24, format=kind.upper())
        for stop in range(len(whole)):
            try:
                found = image_size(whole[:stop], kind)  # type: ignore[arg-type]  # one of both
            except ValidationError as error:
                assert error.path in ("data", "format")
            else:
                assert found == ImageSize(40, 24)


def test_a_model_without_eyes_reads_text_only() -> None:
    with pytest.raises(ValidationError, match="this model reads text only"):
        counted(chunk(png(40, 40)), rules=None)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ImageAssetPointerChunk(format="png", location="s3://a/b", expected_tokens=4),
            "prompt.chunks[0]: this server keeps no assets; send the file itself",
        ),
        (DmelChunk(dmel=b"\x00\x01\x04"), "prompt.chunks[0]: a chunk of type 'dmel' cannot be"),
    ],
)
def test_other_chunks_are_refused_by_name(other: Any, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        counted(other)
    assert str(error.value).startswith(message)


def test_an_input_of_text_is_returned_as_it_is() -> None:
    text = ModelInput.from_ints([1, 2, 3])
    assert count_images(text, None, "prompt") is text
