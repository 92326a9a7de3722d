"""From an image's file to the patches that a vision tower reads.

Pillow decodes, after `image_headers` has seen what the file claims to be. What comes out is what
the processor of `transformers` gives for the same file.
"""

from __future__ import annotations

import io

import numpy as np

from tinsmith.engine.image_headers import ImageSize, image_size
from tinsmith.engine.images import ImageRules
from tinsmith.errors import EngineError, ValidationError
from tinsmith.types import ImageChunk

_FORMATS = {"png": ("PNG",), "jpeg": ("JPEG", "MPO")}
"""By the protocol's name: what Pillow may read it as. Some cameras append further images."""


def read_patches(chunk: ImageChunk, rules: ImageRules) -> tuple[np.ndarray, tuple[int, int]]:
    """The patches (P, 3 · frames · size · size) of an image, and its rows and columns of tokens.

    Patches of one token follow each other. The image lies as its file says it is to be shown, on
    white where it is transparent.
    """
    pixels = _decode(chunk, rules)
    size, merge = rules.patch_size, rules.merge_size
    rows, columns = pixels.shape[0] // rules.cell, pixels.shape[1] // rules.cell
    mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
    values = (pixels * np.float32(rules.scale) - mean) / std
    # (rows, merge, size, columns, merge, size, 3) to (rows, columns, merge, merge, 3, size, size).
    cut = values.reshape(rows, merge, size, columns, merge, size, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    repeated = np.repeat(cut[:, :, :, :, :, None], rules.frames, axis=5)
    return repeated.reshape(rows * columns * merge * merge, -1), (rows, columns)


def _decode(chunk: ImageChunk, rules: ImageRules) -> np.ndarray:
    """The scaled image (height, width, 3), of bytes."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise EngineError("images need Pillow; install tinsmith[engine]") from error
    size = image_size(chunk.data, chunk.format)
    try:
        with Image.open(io.BytesIO(chunk.data), formats=_FORMATS[chunk.format]) as file:
            # A second header behind the first would have gone past the bounds.
            if file.size != size:
                raise ValueError(f"it has two sizes, {size} and {file.size}")
            image = ImageOps.exif_transpose(file)
        if "A" in image.getbands() or "transparency" in image.info:
            above = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, above)
        image = image.convert("RGB")
    except Exception as error:  # whatever a decoder says of bytes from anywhere
        raise ValidationError(f"the image cannot be decoded: {error}", "data") from error
    whole = rules.scaled(ImageSize(*image.size))
    drawn = image.resize(rules.drawn(ImageSize(*image.size)), Image.Resampling.BICUBIC)
    if drawn.size != whole:
        canvas = Image.new("RGB", whole)
        canvas.paste(drawn)
        drawn = canvas
    return np.asarray(drawn)
