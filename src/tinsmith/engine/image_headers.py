"""What the first bytes of an image file say of it, read before anything is decoded.

A file of a few kilobytes may claim billions of pixels, so its size is known and bounded before a
decoder sees it. Only what is needed is read, and only PNG and JPEG, the two formats that the
protocol has.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from tinsmith.errors import TooLargeError, ValidationError

MAX_PIXELS = 2**25
"""Most pixels of an image as it is sent, whatever the model makes of it afterwards."""

MAX_RATIO = 200
"""Largest ratio of an image's sides; it is that of the models' own processors."""

Format = Literal["png", "jpeg"]

_MOST_PIECES = 1000
"""Chunks or segments before the first pixel; real files have some dozens."""

_PNG_START = b"\x89PNG\r\n\x1a\n"
_JPEG_START = b"\xff\xd8\xff"
_STARTS: dict[bytes, str] = {
    _PNG_START: "png",
    _JPEG_START: "jpeg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"II*\x00": "tiff",
    b"MM\x00*": "tiff",
}


class ImageSize(NamedTuple):
    """As stored: a file may also say that the image is to be shown rotated by 90 degrees."""

    width: int
    height: int


def image_size(data: bytes, declared: Format) -> ImageSize:
    """The size of an image whose header is sound; a `ValidationError` names what is not."""
    found = next((name for start, name in _STARTS.items() if data.startswith(start)), None)
    if found != declared:
        what = f"a {found} file" if found else "not a PNG or JPEG file"
        raise ValidationError(f"says {declared!r}, and the data is {what}", "format")
    size = _png_size(data) if declared == "png" else _jpeg_size(data)
    width, height = size
    if not (width and height):
        raise ValidationError(f"has no pixels: {width} x {height}", "data")
    if width * height > MAX_PIXELS:
        raise TooLargeError(
            f"has {width} x {height} = {width * height} pixels; at most {MAX_PIXELS} are taken, "
            "so scale it down",
            "data",
        )
    if max(size) > MAX_RATIO * min(size):
        raise ValidationError(
            f"is {width} x {height}; one side may be at most {MAX_RATIO} times the other", "data"
        )
    return size


def _png_size(data: bytes) -> ImageSize:
    """From the first chunk; the others are walked over, to find an animation."""
    if len(data) < 29 or data[12:16] != b"IHDR":
        raise _cut_off("PNG")
    width, height, depth = struct.unpack_from(">IIB", data, 16)
    if depth > 8:
        raise ValidationError(f"has {depth} bits a channel; at most 8 are taken", "data")
    offset = len(_PNG_START)
    for _ in range(_MOST_PIECES):
        if offset + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"acTL":
            raise ValidationError("is animated; send one of its frames", "data")
        if kind == b"IDAT":
            return ImageSize(width, height)
        offset += 12 + length
    raise _cut_off("PNG")


def _jpeg_size(data: bytes) -> ImageSize:
    """From the frame header, over the segments before it."""
    offset = 2
    for _ in range(_MOST_PIECES):
        if offset + 4 > len(data) or data[offset] != 0xFF:
            break
        kind = data[offset + 1]
        if kind == 0xFF:  # padding
            offset += 1
            continue
        (length,) = struct.unpack_from(">H", data, offset + 2)
        if _is_frame(kind):
            if offset + 9 > len(data):
                break
            depth, height, width = struct.unpack_from(">BHH", data, offset + 4)
            if depth != 8:
                raise ValidationError(f"has {depth} bits a channel; 8 are taken", "data")
            return ImageSize(width, height)
        offset += 2 + length
    raise _cut_off("JPEG")


def _is_frame(kind: int) -> bool:
    """SOF0 to SOF15, among which are a table of Huffman codes and two others."""
    return 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC)


def _cut_off(name: str) -> ValidationError:
    return ValidationError(
        f"the {name} file ends, or is broken, before its first pixel, or has more than "
        f"{_MOST_PIECES} parts before it",
        "data",
    )
