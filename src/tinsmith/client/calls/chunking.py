"""Cutting a call's data into chunks that each fit one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tinsmith.errors import ValidationError
from tinsmith.types import Datum
from tinsmith.types.convert import kind_of


def checked(data: Sequence[Datum]) -> list[Datum]:
    """The datums of a call; an error names what a caller has given in their place."""
    if isinstance(data, Datum):
        raise ValidationError("expected a list of datums, got one datum; write [datum]", "data")
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise ValidationError(f"expected a list of datums, got {kind_of(data)}", "data")
    data = list(data)
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise ValidationError(
                f"expected a Datum, got {kind_of(datum)}; "
                "make one: Datum(model_input=…, loss_fn_inputs=…)",
                f"data[{index}]",
            )
    return data


def split(data: Sequence[Datum], *, max_items: int, max_bytes: int) -> Iterator[list[Datum]]:
    """Yield consecutive chunks of `data` that each fit one request.

    A datum above `max_bytes` still gets a chunk of its own: whether it is too
    large is for the server to say, and its answer names the limit.
    """
    chunk: list[Datum] = []
    size = 0
    for datum in data:
        nbytes = datum.nbytes
        if chunk and (len(chunk) == max_items or size + nbytes > max_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(datum)
        size += nbytes
    if chunk:
        yield chunk
