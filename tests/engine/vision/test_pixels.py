"""Decoding: the patches are those of the models' own processor, whatever the file looks like."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.tiny_vision import PROCESSOR, image_bytes
from tinsmith.engine.images import ImageRules
from tinsmith.engine.local.model.images.pixels import read_patches
from tinsmith.errors import ValidationError
from tinsmith.types import ImageChunk

RULES = ImageRules(
    token_id=90,
    patch_size=4,
    merge_size=2,
    frames=2,
    min_pixels=256,
    max_pixels=1024,
    scale=1 / 255,
    mean=(0.48, 0.46, 0.41),
    std=(0.27, 0.26, 0.28),
)


def theirs(data: bytes) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
    settings |= {"image_mean": list(RULES.mean), "image_std": list(RULES.std)}
    processor = Qwen2VLImageProcessorPil(**settings)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return processor(images=[shown], return_tensors="np")


def turned() -> bytes:
    """A camera's file that is to be turned by a quarter when it is shown."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return image_bytes(40, 17, format="JPEG", exif=exif)


def transparent() -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (19, 30, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, format="PNG")
    return file.getvalue()


FILES: dict[str, bytes] = {
    "png": image_bytes(24, 16),
    "scaled down": image_bytes(100, 41),
    "scaled up": image_bytes(5, 9),
    "grey": image_bytes(24, 20, mode="L"),
    "black and white": image_bytes(24, 20, mode="1"),
    "palette": image_bytes(24, 20, mode="P"),
    "cmyk": image_bytes(24, 20, mode="CMYK", format="JPEG"),
    "jpeg": image_bytes(30, 30, format="JPEG"),
    "turned": turned(),
    "transparent": transparent(),
}


@pytest.mark.parametrize("name", list(FILES))
def test_patches_are_those_of_the_models_own_processor(name: str) -> None:
    data = FILES[name]
    kind: Any = "png" if data.startswith(b"\x89PNG") else "jpeg"
    expected = theirs(data)
    found, (rows, columns) = read_patches(ImageChunk(data=data, format=kind), RULES)
    assert expected["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    np.testing.assert_allclose(found, expected["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_file_that_ends_too_early_is_refused(kind: Any) -> None:
    data = image_bytes(60, 60, format=kind.upper())
    with pytest.raises(ValidationError, match=r"^data: the image cannot be decoded: "):
        read_patches(ImageChunk(data=data[: len(data) * 2 // 3], format=kind), RULES)


def test_a_file_with_a_second_larger_size_is_refused_before_it_is_decoded() -> None:
    """The first frame header passes the bounds, and the decoder would go by the second."""
    data = image_bytes(16, 16, format="JPEG")
    start = data.index(b"\xff\xc0")
    length = int.from_bytes(data[start + 2 : start + 4])
    frame = data[start : start + 2 + length]
    larger = frame[:5] + (8000).to_bytes(2) * 2 + frame[9:]
    sent = data[:start] + frame + larger + data[start + len(frame) :]
    with pytest.raises(ValidationError, match="it has two sizes"):
        read_patches(ImageChunk(data=sent, format="jpeg"), RULES)
