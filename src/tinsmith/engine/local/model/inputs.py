"""What a sequence reads, laid out in rows: tokens, positions, and images among them.

An image takes as many rows as it has tokens. Positions have three axes (time, height, width): a
row of text has one position on all three, a part of an image its row and column, and text behind
an image goes on after the largest position so far. Where there is no image, or the model has its
parts in line with text, a position is the index of its row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.image_headers import image_size
from tinsmith.engine.images import ImageRules, has_images
from tinsmith.engine.local.model.images.vision import Picture, Vision
from tinsmith.errors import ValidationError
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput


class _Image(NamedTuple):
    chunk: ImageChunk
    number: int
    """Which chunk of the input it is."""
    start: int
    stop: int
    """Its rows."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows of a batch that are parts of images."""

    rows: Tensor
    """(M,), ascending."""

    offsets: Tensor
    """(3, M): what is added to their positions."""

    features: tuple[Tensor, ...]
    """(M, d) each; see `vision.Picture`."""

    def on_axes(self, positions: Tensor) -> Tensor:
        """(3, N): the positions (N,) of the batch, with those of images on three axes."""
        found = positions.expand(3, -1).clone()
        found[:, self.rows] += self.offsets
        return found

    def among(self, embeddings: Tensor) -> Tensor:
        """(N, d): embeddings with what is seen in their places."""
        return embeddings.index_copy(0, self.rows, self.features[0].to(embeddings.dtype))

    @classmethod
    def joined(cls, parts: Iterable[tuple[int, Seen | None]]) -> Seen | None:
        """Those of several stretches, each with the row where it begins."""
        kept = [(first, seen) for first, seen in parts if seen is not None]
        if not kept:
            return None
        layers = zip(*(seen.features for _, seen in kept), strict=True)
        return cls(
            torch.cat([seen.rows + first for first, seen in kept]),
            torch.cat([seen.offsets for _, seen in kept], dim=1),
            tuple(torch.cat(layer) for layer in layers),
        )


def rows_of(picture: Picture, start: int, stop: int) -> Seen:
    """Tokens start to stop of a picture, as rows from zero on."""
    device = picture.features[0].device
    places = torch.arange(start, stop, device=device)
    columns = picture.grid[1]
    return Seen(
        places - start,
        torch.stack([torch.zeros_like(places), places // columns, places % columns]),
        tuple(layer[start:stop] for layer in picture.features),
    )


class Input:
    """A counted `ModelInput`: how many tokens each image is has been found out before."""

    def __init__(self, model_input: ModelInput, rules: ImageRules | None) -> None:
        self._images: list[_Image] = []
        self.shift = 0
        """What is added to the index of a row behind the input to have its position."""
        if rules is None or not has_images(model_input):
            self.tokens = model_input.tokens_np()
            """(n,) int32. Parts of an image are numbers below zero, the same for the same image."""
            return
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        row = 0
        for number, chunk in enumerate(model_input.chunks):
            stop = row + chunk.length
            if isinstance(chunk, EncodedTextChunk):
                tokens.append(chunk.tokens_np)
                positions.append(np.arange(row, stop) + self.shift)
            else:
                assert isinstance(chunk, ImageChunk), "others were refused"
                self._images.append(_Image(chunk, number, row, stop))
                tokens.append(_numbers(chunk))
                if rules.is_in_line:
                    positions.append(np.arange(row, stop))
                else:
                    positions.append(np.full(chunk.length, row + self.shift))
                    extent = max(rules.grid(image_size(chunk.data, chunk.format)))
                    self.shift += extent - chunk.length
            row = stop
        self.tokens = np.concatenate(tokens)
        self._positions = np.concatenate(positions)

    def text_tokens(self, image_token: int) -> np.ndarray:
        """With one token for all parts of images."""
        if not self._images:
            return self.tokens
        return np.where(self.tokens < 0, np.int32(image_token), self.tokens)

    def positions(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,): of rows that may also lie behind the input.

        On axes, all rows of an image have the position where it begins, which `Seen` adds to.
        """
        if not self._images:
            return np.arange(start, stop)
        behind = np.arange(max(start, len(self.tokens)), stop) + self.shift
        return np.concatenate([self._positions[start:stop], behind])

    def seen(self, start: int, stop: int, vision: Vision | None, owner: str) -> Seen | None:
        """What is seen in rows start to stop; an image that cannot be decoded is an error."""
        parts = []
        for image in self._images:
            if image.start < stop and start < image.stop:
                assert vision is not None, "images were counted"
                try:
                    picture = vision.see(image.chunk, owner)
                except ValidationError as error:
                    raise error.under(f"chunks[{image.number}]") from None
                first, last = max(start, image.start), min(stop, image.stop)
                part = rows_of(picture, first - image.start, last - image.start)
                parts.append((first - start, part))
        return Seen.joined(parts)


def _numbers(chunk: ImageChunk) -> np.ndarray:
    """Numbers below zero for the parts of an image, which depend on its content alone."""
    digest = hashlib.sha256(chunk.data).digest()
    drawn = hashlib.shake_256(digest).digest(4 * chunk.length)
    return (np.frombuffer(drawn, dtype=np.uint32) | np.uint32(1 << 31)).view(np.int32)
