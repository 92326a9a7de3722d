"""What a model reads: a `ModelInput` is a row of chunks, each text, an image or audio.

Token ids are kept as int32 numpy arrays; `tokens` shows them as the list that users expect. The
other chunk kinds are ordinary messages. `chunk_from_wire` tells them apart by their `type`, or by
their fields where a client older than 0.18.0 sent no `type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from tinsmith.errors import ValidationError
from tinsmith.types.arrays import int_array, short_array
from tinsmith.types.convert import fields_of, kind_of
from tinsmith.types.model import Frozen, Request, is_dumped, shorten


class _Plain(Frozen):
    """The pydantic-style methods, for the hand-written types of this module."""

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        del deep  # nothing inside can change
        values = {name: getattr(self, name) for name in self._names}
        return type(self)(**{**values, **(update or {})})

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False) -> str:
        import orjson

        plain = self.model_dump(mode="json", exclude_none=exclude_none)
        return orjson.dumps(plain, option=orjson.OPT_INDENT_2 if indent else 0).decode()

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        import orjson

        try:
            return cls.model_validate(orjson.loads(text))
        except orjson.JSONDecodeError as error:
            raise ValidationError(f"not valid JSON: {error}") from None

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        raise NotImplementedError

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: set[str] | None = None,
        exclude: set[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        fields = self._dump(mode=mode, exclude_none=exclude_none, exclude_defaults=exclude_defaults)
        return {k: v for k, v in fields.items() if is_dumped(k, include, exclude)}

    def _dump(self, **options: Any) -> dict[str, Any]:
        raise NotImplementedError

    def to_wire(self) -> dict[str, Any]:
        raise NotImplementedError


class EncodedTextChunk(_Plain):
    """A run of token ids.

    >>> EncodedTextChunk(tokens=[1, 2, 3]).length
    3
    """

    __slots__ = ("tokens_np",)
    _names = ("tokens", "type")

    tokens_np: npt.NDArray[np.int32]
    """The ids as an int32 array."""

    def __init__(
        self,
        *,
        tokens: Sequence[int] | npt.NDArray[Any],
        type: Literal["encoded_text"] = "encoded_text",
    ) -> None:
        if type != "encoded_text":
            raise ValidationError(f"expected 'encoded_text', got {type!r}", "type")
        try:
            ids = int_array(tokens)
        except ValidationError as error:
            raise error.under("tokens") from None
        if ids.ndim != 1:
            raise ValidationError(f"expected a flat list, got shape {list(ids.shape)}", "tokens")
        _SET_TOKENS(self, ids)

    @property
    def tokens(self) -> list[int]:
        return list(self.tokens_np.tolist())

    @property
    def type(self) -> Literal["encoded_text"]:
        return "encoded_text"

    @property
    def length(self) -> int:
        return len(self.tokens_np)

    @property
    def nbytes(self) -> int:
        return self.tokens_np.nbytes

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        if isinstance(obj, cls):
            return obj
        fields = fields_of(obj, cls.__name__, ("tokens", "type"))
        if fields.get("tokens") is None:
            raise ValidationError("EncodedTextChunk needs this field", "tokens")
        return cls(**fields)

    def _dump(self, *, exclude_defaults: bool = False, **_: Any) -> dict[str, Any]:
        return {"tokens": self.tokens, **({} if exclude_defaults else {"type": "encoded_text"})}

    def to_wire(self) -> dict[str, Any]:
        return {"tokens": np.ascontiguousarray(self.tokens_np), "type": "encoded_text"}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedTextChunk):
            return NotImplemented
        return np.array_equal(self.tokens_np, other.tokens_np)

    __hash__ = None  # type: ignore[assignment]  # compared by content, like a list

    def __repr__(self) -> str:
        return f"EncodedTextChunk(tokens={short_array(self.tokens_np)}, type='encoded_text')"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_text, (self.tokens_np,)


class ImageChunk(Request):
    """An image, as the bytes of its file."""

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    """How many tokens the image should make; advisory, the service may refuse a mismatch."""
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        return _expected_length(self)

    @property
    def nbytes(self) -> int:
        return len(self.data)


class ImageAssetPointerChunk(Request):
    """An image that the service already has, named by its location."""

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        return _expected_length(self)

    @property
    def nbytes(self) -> int:
        return len(self.location)


class DmelChunk(Request):
    """Audio, as the bytes of a tensor container; its first dimension counts the tokens."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        shape = container_shape(self.dmel)
        if not shape:
            raise ValidationError("the audio container has no dimensions", "dmel")
        return shape[0]

    @property
    def nbytes(self) -> int:
        return len(self.dmel)


ModelInputChunk = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk


class ModelInput(_Plain):
    """What a model reads, as a row of chunks.

    >>> ModelInput.from_ints([1, 2]).append_int(3).to_ints()
    [1, 2, 3]
    """

    __slots__ = ("chunks",)
    _names = ("chunks",)

    chunks: list[ModelInputChunk]

    def __init__(self, *, chunks: Sequence[ModelInputChunk | Mapping[str, Any]]) -> None:
        if isinstance(chunks, (str, bytes, Mapping)) or not isinstance(chunks, Sequence):
            raise ValidationError(f"expected a list of chunks, got {kind_of(chunks)}", "chunks")
        kept: list[ModelInputChunk] = []
        for index, chunk in enumerate(chunks):
            try:
                kept.append(chunk_from_wire(chunk))
            except ValidationError as error:
                raise error.under(f"chunks[{index}]") from None
        object.__setattr__(self, "chunks", kept)

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | npt.NDArray[Any]) -> Self:
        instance = cls.__new__(cls)
        _SET_CHUNKS(instance, [EncodedTextChunk(tokens=tokens)])
        return instance

    @classmethod
    def from_text(cls, text: str, tokenizer: Any) -> Self:
        """The tokens of raw text: no chat template, no special tokens added.

        `tokenizer` is anything with `encode`, such as what `get_tokenizer` gives.
        """
        return cls.from_ints(tokenizer.encode(text, add_special_tokens=False))

    @classmethod
    def empty(cls) -> Self:
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        """All token ids; raises `ValueError` if a chunk is not text."""
        return list(self.tokens_np().tolist())

    def tokens_np(self) -> npt.NDArray[np.int32]:
        """All token ids as one int32 array; raises `ValueError` if a chunk is not text."""
        parts = []
        for index, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise ValidationError(f"a {chunk.type} chunk is not text", f"chunks[{index}]")
            parts.append(chunk.tokens_np)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    @property
    def length(self) -> int:
        """How many tokens of context this takes."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """A new input with one more chunk."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new input with one more token, as a chunk of its own."""
        return self.append(EncodedTextChunk(tokens=[token]))

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        if isinstance(obj, cls):
            return obj
        fields = fields_of(obj, cls.__name__, ("chunks",))
        if fields.get("chunks") is None:
            raise ValidationError("ModelInput needs this field", "chunks")
        return cls(**fields)

    def _dump(self, **options: Any) -> dict[str, Any]:
        return {"chunks": [chunk.model_dump(**options) for chunk in self.chunks]}

    def to_wire(self) -> dict[str, Any]:
        return {"chunks": [chunk.to_wire() for chunk in self.chunks]}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelInput):
            return NotImplemented
        return self.chunks == other.chunks

    __hash__ = None  # type: ignore[assignment]  # compared by content, like a list

    def __repr__(self) -> str:
        return f"ModelInput(chunks={shorten(self.chunks)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_input, (type(self), self.chunks)


_BY_TAG: dict[str, Any] = {
    "encoded_text": EncodedTextChunk,
    "image": ImageChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "dmel": DmelChunk,
}
# The field that gives a chunk away when it came without a type (clients before 0.18.0).
_BY_FIELD = {
    "data": "image",
    "location": "image_asset_pointer",
    "dmel": "dmel",
    "tokens": "encoded_text",
}
# Fields that images of releases 0.3 to 0.5 carried; their meaning went into expected_tokens.
_OLD_IMAGE_FIELDS = frozenset({"height", "width", "tokens"})


# Slots are filled through their descriptors: attributes cannot be assigned, and many are made.
_SET_TOKENS = EncodedTextChunk.__dict__["tokens_np"].__set__
_SET_CHUNKS = ModelInput.__dict__["chunks"].__set__


def chunk_from_wire(value: Any) -> ModelInputChunk:
    """One chunk from its JSON form; a chunk object is returned as it is."""
    if isinstance(value, (EncodedTextChunk, ImageChunk, ImageAssetPointerChunk, DmelChunk)):
        return value
    if not isinstance(value, Mapping):
        raise ValidationError(f"expected a chunk object, got {kind_of(value)}")
    tag = value.get("type")
    if tag is None:
        tag = next((kind for name, kind in _BY_FIELD.items() if name in value), None)
    cls = _BY_TAG.get(tag) if isinstance(tag, str) else None
    if cls is None:
        known = ", ".join(_BY_TAG)
        problem = "a chunk needs a type" if tag is None else f"unknown chunk type {str(tag)[:40]!r}"
        raise ValidationError(f"{problem}; known: {known}", "type")
    fields = {name: item for name, item in value.items() if item is not None}
    if tag in ("image", "image_asset_pointer") and _OLD_IMAGE_FIELDS & fields.keys():
        expected = fields.get("tokens")
        fields = {name: item for name, item in fields.items() if name not in _OLD_IMAGE_FIELDS}
        fields.setdefault("expected_tokens", expected)
    chunk: ModelInputChunk = cls.model_validate(fields)
    return chunk


def container_shape(data: bytes) -> tuple[int, ...]:
    """The shape in the header of a tensor container, without looking at its payload."""
    constant_marker, highest_dtype = 254, 7
    offset = 1 if data[:1] == bytes([constant_marker]) else 0
    if offset >= len(data):
        raise ValidationError("the audio container ends inside its header", "dmel")
    if data[offset] > highest_dtype:
        raise ValidationError(f"unknown dtype {data[offset]} in the audio container", "dmel")
    num_dims, offset = _varint(data, offset + 1)
    shape = []
    for _ in range(num_dims):
        extent, offset = _varint(data, offset)
        shape.append(extent)
    return tuple(shape)


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if offset >= len(data):
            raise ValidationError("the audio container ends inside its header", "dmel")
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValidationError("a number in the audio container's header is too long", "dmel")


def _expected_length(chunk: ImageChunk | ImageAssetPointerChunk) -> int:
    if chunk.expected_tokens is None:
        raise ValidationError("set it to give the image a length", "expected_tokens")
    return chunk.expected_tokens


def _rebuild_text(tokens: npt.NDArray[np.int32]) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=tokens)


def _rebuild_input(cls: type[ModelInput], chunks: list[ModelInputChunk]) -> ModelInput:
    return cls(chunks=chunks)
