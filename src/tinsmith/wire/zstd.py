"""Compression of request bodies: one zstd frame each, which states the size of its content."""

from __future__ import annotations

import zstandard

from tinsmith.errors import TooLargeError, ValidationError


def compress(body: bytes) -> bytes:
    """One frame at the default level, with the content size in its header."""
    return zstandard.ZstdCompressor(write_content_size=True).compress(body)


def unfolded_size(body: bytes, *, max_bytes: int) -> int:
    """The size of a frame's content as its header states it, unless it is above `max_bytes`."""
    try:
        size: int = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise ValidationError(f"not a zstd frame: {error}") from None
    if size == zstandard.CONTENTSIZE_UNKNOWN:
        raise ValidationError("the zstd frame does not state the size of its content")
    if size > max_bytes:
        raise TooLargeError(f"the body unfolds to {size} bytes; the limit is {max_bytes}")
    return size


def decompress(body: bytes, *, max_bytes: int) -> bytes:
    """The content of a frame, unless it is larger than `max_bytes`.

    No more memory is taken than the header announces, and a frame that turns out larger than it
    announced is refused, so a small body cannot unfold into a huge one.
    """
    unfolded_size(body, max_bytes=max_bytes)
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return decompressor.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValidationError(f"not a valid zstd frame: {error}") from None
