"""A pass over some data: the one request that travels as protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinsmith.types.inputs import ModelInputChunk
from tinsmith.wire.limits import DEFAULT_LIMITS, Limits
from tinsmith.wire.proto.parts import ABSENT, ZERO, at, by_number, entry_of, read_entry
from tinsmith.wire.proto.tensors import (
    I4,
    read_tensor,
    write_tensor,
)
from tinsmith.wire.protobuf import (
    NUMBER,
    Field,
    Writer,
    as_array,
    as_bytes,
    as_double,
    as_int,
    as_int32,
    as_message,
    as_text,
    fields,
)

Pass = ForwardBackwardRequest | ForwardRequest


def encode_pass(request: Pass) -> bytes:
    """The body of `/forward_backward`; a `ForwardRequest` sets its forward-only flag."""
    if isinstance(request, ForwardRequest):
        inputs, forward_only = request.forward_input, True
    else:
        inputs, forward_only = request.forward_backward_input, False
    writer = Writer()
    if request.model_id:
        writer.text(1, request.model_id)
    if request.seq_id:
        if not 0 < request.seq_id < 1 << 31:
            raise ValidationError(f"{request.seq_id} does not fit 1..2^31-1", "seq_id")
        writer.varint(2, request.seq_id)
    for index, datum in enumerate(inputs.data):
        writer.message(3, at(f"data[{index}]", _write_datum, datum))
    writer.text(4, inputs.loss_fn)
    config = inputs.loss_fn_config or {}
    for name, value in config.items():
        if not isinstance(value, str):
            entry = entry_of(name)
            entry.double(2, value)
            writer.message(5, entry)
    if forward_only:
        writer.varint(6, 1)
    for name, value in config.items():
        setting = Writer()
        if isinstance(value, str):
            setting.text(2, value)
        else:
            setting.double(1, value)
        entry = entry_of(name)
        entry.message(2, setting)
        writer.message(7, entry)
    return writer.to_bytes()


def decode_pass(body: bytes, limits: Limits = DEFAULT_LIMITS) -> Pass:
    """The request in a body; arrays in it are read-only views of the body."""
    if len(body) > limits.max_body_bytes:
        raise TooLargeError(f"the body has {len(body)} bytes; the limit is {limits.max_body_bytes}")
    model_id = loss_fn = ""
    seq_id, forward_only = 0, False
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    config: dict[str, float | str] = {}
    budget = _Budget(limits)
    for number, start, stop in fields(body, 0, len(body)):
        if number == 3:
            budget.spend("datums", limits.max_datums)
            try:
                data.append(_read_datum(body, start, stop, budget))
            except ValidationError as error:
                raise error.under(f"data[{len(data)}]") from None
        elif number == 1:
            model_id = at("model_id", as_text, body, start, stop)
        elif number == 2:
            seq_id = at("seq_id", as_int32, start, stop)
        elif number == 4:
            loss_fn = at("loss_fn", as_text, body, start, stop)
        elif number in (5, 7):
            budget.spend("loss config entries", 2 * limits.max_config_entries)
            name, start, stop = at("loss_fn_config", read_entry, body, start, stop)
            path = f"loss_fn_config[{name!r}]"
            if number == 5:
                numbers[name] = at(path, as_double, body, start, stop)
            else:
                config[name] = at(path, _read_config_value, body, start, stop)
        elif number == 6:
            forward_only = bool(at("forward_only", as_int, start, stop))
    if seq_id < 0:
        raise ValidationError(f"must not be negative, got {seq_id}", "seq_id")
    inputs = ForwardBackwardInput(data, loss_fn, (config or numbers) or None)  # type: ignore[arg-type]  # checked inside
    cls = ForwardRequest if forward_only else ForwardBackwardRequest
    return cls(inputs, model_id, seq_id or None)


def _write_datum(datum: Datum) -> Writer:
    writer = Writer()
    for index, chunk in enumerate(datum.model_input.chunks):
        writer.message(1, at(f"model_input.chunks[{index}]", _write_chunk, chunk))
    for name, tensor in datum.loss_fn_inputs.items():
        entry = entry_of(name)
        entry.message(2, write_tensor(tensor))
        writer.message(2, entry)
    for number, spans in ((3, datum.model_input_spans), (4, datum.loss_fn_input_spans)):
        for span in spans or ():
            writer.message(number, _write_span(span))
    return writer


def _read_datum(body: bytes, start: int, stop: int, budget: _Budget) -> Datum:
    limits = budget.limits
    chunks: list[ModelInputChunk] = []
    inputs: dict[str, TensorData] = {}
    spans: dict[int, list[PromptProvenanceSpan | SampledProvenanceSpan]] = {3: [], 4: []}
    for number, begin, end in as_message(body, start, stop):
        if number == 2:
            name, begin, end = at("loss_fn_inputs", read_entry, body, begin, end)
            if len(inputs) == limits.max_loss_inputs:
                raise TooLargeError(f"more than {limits.max_loss_inputs} tensors", "loss_fn_inputs")
            try:
                inputs[name] = read_tensor(body, begin, end, limits)
            except ValidationError as error:
                raise error.under(f"loss_fn_inputs[{name!r}]") from None
        elif number == 1:
            budget.spend("chunks", limits.max_chunks)
            try:
                chunks.append(_read_chunk(body, begin, end))
            except ValidationError as error:
                raise error.under(f"model_input.chunks[{len(chunks)}]") from None
        elif number in spans:
            budget.spend("provenance runs", limits.max_spans)
            spans[number].append(at("provenance", _read_span, body, begin, end))
    has_spans = bool(spans[3] or spans[4])
    return Datum(
        model_input=ModelInput(chunks=chunks),
        loss_fn_inputs=inputs,
        model_input_spans=spans[3] if has_spans else None,
        loss_fn_input_spans=spans[4] if has_spans else None,
    )


def _write_chunk(chunk: ModelInputChunk) -> Writer:
    writer, inner = Writer(), Writer()
    if isinstance(chunk, EncodedTextChunk):
        if chunk.tokens_np.size:
            inner.array(1, chunk.tokens_np)
        writer.message(1, inner)
    elif isinstance(chunk, ImageChunk):
        if chunk.data:
            inner.data(1, chunk.data)
        inner.text(2, chunk.format)
        if chunk.expected_tokens is not None:
            inner.varint(3, at("expected_tokens", as_int32, chunk.expected_tokens, NUMBER))
        writer.message(2, inner)
    elif isinstance(chunk, DmelChunk):
        if chunk.dmel:
            inner.data(1, chunk.dmel)
        writer.message(3, inner)
    else:
        raise ValidationError(f"a {chunk.type} chunk cannot be trained on")
    return writer


def _read_chunk(body: bytes, start: int, stop: int) -> ModelInputChunk:
    chunk: ModelInputChunk | None = None
    for number, begin, end in as_message(body, start, stop):
        parts = as_message(body, begin, end)
        if number == 1:
            tokens = np.empty(0, dtype=I4)
            for field, first, last in parts:
                if field == 1:
                    tokens = as_array(body, first, last, I4)
            chunk = EncodedTextChunk(tokens=tokens)
        elif number == 2:
            chunk = _read_image(body, parts)
        elif number == 3:
            found = by_number(parts)
            chunk = DmelChunk(dmel=as_bytes(body, *found.get(1, ABSENT)))
        else:
            raise ValidationError(f"unknown chunk kind (protobuf field {number})")
    if chunk is None:
        raise ValidationError("a chunk needs a kind: encoded_text, image or dmel")
    return chunk


def _read_image(body: bytes, parts: list[Field]) -> ImageChunk:
    image: dict[str, Any] = {"data": b"", "format": ""}
    for number, start, stop in parts:
        if number == 1:
            image["data"] = as_bytes(body, start, stop)
        elif number == 2:
            image["format"] = as_text(body, start, stop)
        elif number == 3:
            image["expected_tokens"] = as_int32(start, stop)
        elif number == 4:
            raise ValidationError("images of other dimensions than their file's are not supported")
    return ImageChunk(**image)


def _write_span(span: PromptProvenanceSpan | SampledProvenanceSpan) -> Writer:
    writer, inner = Writer(), Writer()
    inner.text(1, span.sequence_id)
    for number, value in ((2, span.offset), (3, span.length)):
        if value:
            inner.varint(number, value)
    writer.message(2 if isinstance(span, SampledProvenanceSpan) else 1, inner)
    return writer


def _read_span(body: bytes, start: int, stop: int) -> PromptProvenanceSpan | SampledProvenanceSpan:
    arms = by_number(as_message(body, start, stop))
    arm = 2 if 2 in arms else 1
    parts = by_number(as_message(body, *arms.get(arm, ABSENT)))
    cls = SampledProvenanceSpan if arm == 2 else PromptProvenanceSpan
    return cls(
        sequence_id=as_text(body, *parts.get(1, ABSENT)),
        offset=as_int(*parts.get(2, ZERO)),
        length=as_int(*parts.get(3, ZERO)),
    )


def _read_config_value(body: bytes, start: int, stop: int) -> float | str:
    for number, begin, end in as_message(body, start, stop):
        if number == 1:
            return as_double(body, begin, end)
        if number == 2:
            return as_text(body, begin, end)
    raise ValidationError("a setting needs a number or a text")


class _Budget:
    """Counts what a whole request holds: many small objects are refused like a large one."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._spent: dict[str, int] = {}

    def spend(self, what: str, limit: int) -> None:
        total = self._spent.get(what, 0) + 1
        if total > limit:
            raise TooLargeError(f"the request holds more than {limit} {what}")
        self._spent[what] = total
