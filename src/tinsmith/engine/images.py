"""Images in a model's input: which are taken, and how many tokens each of them is.

Counting needs an image's size and the model's own numbers, and neither pixels nor torch, so the
server counts before it records a request, and every engine counts alike. An image is scaled so
that its sides are whole cells and its pixels within the model's bounds; each cell is a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tinsmith.engine.image_headers import ImageSize, image_size
from tinsmith.errors import ValidationError
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput, ModelInputChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """How a model cuts images into tokens: what its processor's file says."""

    token_id: int
    """The token that stands for a part of an image in text."""

    patch_size: int
    """Side of a patch, in pixels; the vision tower reads patches."""

    merge_size: int
    """Side of a token, in patches."""

    frames: int
    """How often an image is repeated where a video has successive frames."""

    min_pixels: int
    max_pixels: int
    """Bounds of the scaled image."""

    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """A channel's value is (byte · scale - mean) / std."""

    max_side: int | None = None
    """Most pixels of a side, where an image lies in whole cells as large as it is, or smaller; None
    where it is scaled to fill them."""

    is_in_line: bool = False
    """Whether the parts of an image have positions one after the other, as text has; else they have
    two axes more."""

    @property
    def cell(self) -> int:
        """Side of a token, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Of one image."""
        if self.max_side is None:
            return self.max_pixels // self.cell**2
        # Of every number of rows of patches, as many columns as are kept as they are.
        most, longest = self.max_pixels // self.patch_size**2, self.max_side // self.patch_size
        sizes = [(rows, min(longest, most // rows)) for rows in range(1, min(longest, most) + 1)]
        return max(self._cells(rows) * self._cells(columns) for rows, columns in sizes)

    def _cells(self, patches: int) -> int:
        """Along a side of so many whole patches, and almost one more."""
        assert self.max_side is not None, "the image lies in cells"
        return -(-min((patches + 1) * self.patch_size - 1, self.max_side) // self.cell)

    def scaled(self, size: ImageSize) -> ImageSize:
        """The size that the vision tower sees, in whole cells."""
        if self.max_side is not None:
            inner = self.drawn(size)
            return ImageSize(*(-(-side // self.cell) * self.cell for side in inner))
        # As the processors do it, also where a short side is rounded to nothing at first.
        width, height = (round(side / self.cell) * self.cell for side in size)
        area = size.width * size.height
        if width * height > self.max_pixels:
            ratio = math.sqrt(area / self.max_pixels)
            width, height = (
                max(self.cell, math.floor(side / ratio / self.cell) * self.cell) for side in size
            )
        elif width * height < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / area)
            width, height = (math.ceil(side * ratio / self.cell) * self.cell for side in size)
        return ImageSize(width, height)

    def drawn(self, size: ImageSize) -> ImageSize:
        """The size that the image itself has in that; what is behind it is black."""
        if self.max_side is None:
            return self.scaled(size)
        patches = [max(1, side // self.patch_size) for side in size]
        most = self.max_pixels // self.patch_size**2
        by_side = (self.max_side / side for side in size)
        scale = min(1.0, math.sqrt(most / math.prod(patches)), *by_side)
        return ImageSize(*(min(max(1, int(side * scale)), self.max_side) for side in size))

    def grid(self, size: ImageSize) -> tuple[int, int]:
        """Rows and columns of tokens."""
        width, height = self.scaled(size)
        return height // self.cell, width // self.cell


def has_images(model_input: ModelInput) -> bool:
    return any(not isinstance(chunk, EncodedTextChunk) for chunk in model_input.chunks)


def count_images(model_input: ModelInput, rules: ImageRules | None, path: str) -> ModelInput:
    """The input with `expected_tokens` of every image, which is refused where it says otherwise.

    `rules` are None for a model that reads text only. Pixels are not looked at here.
    """
    if not has_images(model_input):
        return model_input
    chunks = []
    for index, chunk in enumerate(model_input.chunks):
        try:
            is_text = isinstance(chunk, EncodedTextChunk)
            chunks.append(chunk if is_text else count_image(chunk, rules))
        except ValidationError as error:
            raise error.under(f"{path}.chunks[{index}]") from None
    return ModelInput(chunks=chunks)


def count_image(chunk: ModelInputChunk, rules: ImageRules | None) -> ImageChunk:
    """One image with its `expected_tokens`; a chunk that the model does not read is refused."""
    if rules is None or not isinstance(chunk, ImageChunk):
        raise ValidationError(_why_refused(chunk.type, rules))
    size = image_size(chunk.data, chunk.format)
    num_tokens = math.prod(rules.grid(size))
    if chunk.expected_tokens is None:
        return chunk.model_copy(update={"expected_tokens": num_tokens})
    if chunk.expected_tokens != num_tokens:
        raise ValidationError(
            f"says {chunk.expected_tokens}, and this model makes {num_tokens} tokens of an image "
            f"of {size.width} x {size.height} pixels",
            "expected_tokens",
        )
    return chunk


def with_joined_texts(model_input: ModelInput) -> ModelInput:
    """The same input with texts that follow each other in one chunk."""
    chunks: list[ModelInputChunk] = []
    for is_text, run in groupby(model_input.chunks, lambda c: isinstance(c, EncodedTextChunk)):
        together = list(run)
        if is_text:
            together = [EncodedTextChunk(tokens=ModelInput(chunks=together).tokens_np())]
        chunks += together
    return ModelInput(chunks=chunks)


def token_row(model_input: ModelInput, rules: ImageRules | None) -> npt.NDArray[np.int32]:
    """The tokens of a counted input, with the image's token wherever a part of one is."""
    if rules is None or not has_images(model_input):
        return model_input.tokens_np()
    return np.concatenate(
        [
            chunk.tokens_np
            if isinstance(chunk, EncodedTextChunk)
            else np.full(chunk.length, rules.token_id, dtype=np.int32)
            for chunk in model_input.chunks
        ]
    )


def _why_refused(kind: str, rules: ImageRules | None) -> str:
    if rules is not None and kind == "image_asset_pointer":
        return "this server keeps no assets; send the file itself, in a chunk of type 'image'"
    reads = "text only" if rules is None else "text and images only"
    return f"a chunk of type {kind!r} cannot be used: this model reads {reads}"
