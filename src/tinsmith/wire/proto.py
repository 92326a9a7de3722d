"""The three messages that travel as protobuf: a pass, its output, and a sampling result.

The field numbers are those of `tinker_public.proto`. Arrays are neither copied nor looked at
element by element: encoding lists their buffers, decoding makes views of the body.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ImageChunk,
    ModelInput,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    StopReason,
    TensorData,
    TensorDtype,
    TopkLogprobs,
)
from tinsmith.types.inputs import ModelInputChunk
from tinsmith.types.tensors import int_array
from tinsmith.wire.limits import DEFAULT_LIMITS, Limits
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
    as_packed,
    as_text,
    fields,
)

T = TypeVar("T")

_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
_DTYPE_CODES: dict[TensorDtype, int] = {"float32": _FLOAT32, "int64": _INT64}
_DTYPES: dict[int, tuple[TensorDtype, np.dtype[Any]]] = {
    _FLOAT32: ("float32", np.dtype("<f4")),
    _INT64: ("int64", np.dtype("<i8")),
    _INT32: ("int64", np.dtype("<i4")),
    _BFLOAT16: ("float32", np.dtype("<u2")),
}
_I8, _I4, _F4 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")
_ABSENT = (0, 0)
"""Where a field that was left out lies: nowhere."""
_ZERO = (0, NUMBER)
"""A number that was left out."""
_STOP_REASONS: tuple[StopReason, ...] = ("stop", "length")

Pass = ForwardBackwardRequest | ForwardRequest


# --- A pass: forward or forward_backward -----------------------------------------------------


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
        writer.message(3, _at(f"data[{index}]", _write_datum, datum))
    writer.text(4, inputs.loss_fn)
    config = inputs.loss_fn_config or {}
    for name, value in config.items():
        if not isinstance(value, str):
            entry = _entry(name)
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
        entry = _entry(name)
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
            model_id = _at("model_id", as_text, body, start, stop)
        elif number == 2:
            seq_id = _at("seq_id", as_int32, start, stop)
        elif number == 4:
            loss_fn = _at("loss_fn", as_text, body, start, stop)
        elif number in (5, 7):
            budget.spend("loss config entries", 2 * limits.max_config_entries)
            name, start, stop = _at("loss_fn_config", _read_entry, body, start, stop)
            path = f"loss_fn_config[{name!r}]"
            if number == 5:
                numbers[name] = _at(path, as_double, body, start, stop)
            else:
                config[name] = _at(path, _read_config_value, body, start, stop)
        elif number == 6:
            forward_only = bool(_at("forward_only", as_int, start, stop))
    if seq_id < 0:
        raise ValidationError(f"must not be negative, got {seq_id}", "seq_id")
    inputs = ForwardBackwardInput(data, loss_fn, (config or numbers) or None)  # type: ignore[arg-type]  # checked inside
    cls = ForwardRequest if forward_only else ForwardBackwardRequest
    return cls(inputs, model_id, seq_id or None)


def _write_datum(datum: Datum) -> Writer:
    writer = Writer()
    for index, chunk in enumerate(datum.model_input.chunks):
        writer.message(1, _at(f"model_input.chunks[{index}]", _write_chunk, chunk))
    for name, tensor in datum.loss_fn_inputs.items():
        entry = _entry(name)
        entry.message(2, _write_tensor(tensor))
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
            name, begin, end = _at("loss_fn_inputs", _read_entry, body, begin, end)
            if len(inputs) == limits.max_loss_inputs:
                raise TooLargeError(f"more than {limits.max_loss_inputs} tensors", "loss_fn_inputs")
            try:
                inputs[name] = _read_tensor(body, begin, end)
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
            spans[number].append(_at("provenance", _read_span, body, begin, end))
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
            inner.varint(3, _at("expected_tokens", as_int32, chunk.expected_tokens, NUMBER))
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
            tokens = np.empty(0, dtype=_I4)
            for field, first, last in parts:
                if field == 1:
                    tokens = as_array(body, first, last, _I4)
            chunk = EncodedTextChunk(tokens=tokens)
        elif number == 2:
            chunk = _read_image(body, parts)
        elif number == 3:
            found = _by_number(parts)
            chunk = DmelChunk(dmel=as_bytes(body, *found.get(1, _ABSENT)))
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


def _write_tensor(tensor: TensorData, *, narrow: bool = False) -> Writer:
    """`narrow` sends integers as int32, where the protocol says so."""
    writer = Writer()
    values = int_array(tensor.numpy) if narrow and tensor.dtype == "int64" else tensor.numpy
    if tensor.csr_rows is not None and tensor.csr_columns is not None:
        csr = Writer()
        for number, part in ((1, values), (2, tensor.csr_rows), (3, tensor.csr_columns)):
            if part.size:
                csr.array(number, part)
        writer.message(2, csr)
    else:
        writer.array(1, values)
    writer.varint(3, _INT32 if values.dtype == _I4 else _DTYPE_CODES[tensor.dtype])
    if tensor.shape is not None:
        writer.packed(4, tensor.shape)
    return writer


def _read_tensor(body: bytes, start: int, stop: int) -> TensorData:
    dense, csr = _ABSENT, None
    code, shape = 0, []
    for number, begin, end in as_message(body, start, stop):
        if number == 1:
            dense, csr = (begin, end), None
        elif number == 3:
            code = as_int(begin, end)
        elif number == 4:
            shape += as_packed(body, begin, end)
        elif number == 2:
            csr = (begin, end)
    if code not in _DTYPES:
        raise ValidationError(f"unknown dtype code {code}", "dtype")
    if len(shape) > DEFAULT_LIMITS.max_tensor_rank:
        raise TooLargeError(f"more than {DEFAULT_LIMITS.max_tensor_rank} dimensions", "shape")
    if csr is None:
        flat = _widen(body, *dense, code)
        # No shape means a vector; a scalar looks the same on the wire.
        return TensorData.dense(flat, shape or [flat.size])
    parts = _by_number(as_message(body, *csr))
    return TensorData(
        _widen(body, *parts.get(1, _ABSENT), code),
        _DTYPES[code][0],
        shape,
        as_array(body, *parts.get(2, _ABSENT), _I8),
        as_array(body, *parts.get(3, _ABSENT), _I8),
    )


def _widen(body: bytes, start: int, stop: int, code: int) -> npt.NDArray[Any]:
    """The bytes of an array as one of the two public dtypes."""
    raw = as_array(body, start, stop, _DTYPES[code][1])
    if code == _INT32:
        return raw.astype(_I8)
    if code == _BFLOAT16:
        return (raw.astype("<u4") << 16).view(_F4)
    return raw


def _write_span(span: PromptProvenanceSpan | SampledProvenanceSpan) -> Writer:
    writer, inner = Writer(), Writer()
    inner.text(1, span.sequence_id)
    for number, value in ((2, span.offset), (3, span.length)):
        if value:
            inner.varint(number, value)
    writer.message(2 if isinstance(span, SampledProvenanceSpan) else 1, inner)
    return writer


def _read_span(body: bytes, start: int, stop: int) -> PromptProvenanceSpan | SampledProvenanceSpan:
    arms = _by_number(as_message(body, start, stop))
    arm = 2 if 2 in arms else 1
    parts = _by_number(as_message(body, *arms.get(arm, _ABSENT)))
    cls = SampledProvenanceSpan if arm == 2 else PromptProvenanceSpan
    return cls(
        sequence_id=as_text(body, *parts.get(1, _ABSENT)),
        offset=as_int(*parts.get(2, _ZERO)),
        length=as_int(*parts.get(3, _ZERO)),
    )


def _read_config_value(body: bytes, start: int, stop: int) -> float | str:
    for number, begin, end in as_message(body, start, stop):
        if number == 1:
            return as_double(body, begin, end)
        if number == 2:
            return as_text(body, begin, end)
    raise ValidationError("a setting needs a number or a text")


# --- The output of a pass ---------------------------------------------------------------------


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """Outputs whose fields differ in dtype or trailing shape go into records of their own."""
    writer = Writer()
    writer.text(1, output.loss_fn_output_type)
    for run in _uniform_runs(output.loss_fn_outputs):
        writer.message(2, _write_record(run))
    for name, value in output.metrics.items():
        entry = _entry(name)
        entry.double(2, float(value))
        writer.message(3, entry)
    return writer.to_bytes()


def decode_output(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ForwardBackwardOutput:
    kind = ""
    outputs: list[dict[str, TensorData]] = []
    metrics: dict[str, float] = {}
    for number, start, stop in fields(body, 0, len(body)):
        if number == 1:
            kind = _at("loss_fn_output_type", as_text, body, start, stop)
        elif number == 2:
            outputs += _at(f"loss_fn_outputs[{len(outputs)}]", _read_record, body, start, stop)
            if len(outputs) > limits.max_datums:
                raise TooLargeError(f"more than {limits.max_datums} datums", "loss_fn_outputs")
        elif number == 3:
            name, start, stop = _at("metrics", _read_entry, body, start, stop)
            metrics[name] = _at(f"metrics[{name!r}]", as_double, body, start, stop)
            if len(metrics) > limits.max_config_entries:
                raise TooLargeError(f"more than {limits.max_config_entries} entries", "metrics")
    return ForwardBackwardOutput(kind.rsplit(":", 1)[-1] or "ArrayRecord", outputs, metrics)


Outputs = Sequence[dict[str, TensorData]]


def _uniform_runs(outputs: Outputs) -> list[Outputs]:
    """Consecutive outputs that can share a record."""
    runs: list[list[dict[str, TensorData]]] = []
    previous = None
    for output in outputs:
        form = {name: (t.dtype, t.numpy.shape[1:]) for name, t in output.items()}
        if form != previous:
            runs.append([])
            previous = form
        runs[-1].append(output)
    return list(runs)


def _write_record(run: Outputs) -> Writer:
    writer = Writer()
    for name, first in run[0].items():
        if any(output[name].is_sparse for output in run):
            raise ValidationError("an output is a dense tensor", f"loss_fn_outputs[{name!r}]")
        arrays = [output[name].numpy for output in run]
        sizes = [array.nbytes for array in arrays]
        batched = Writer()
        joined = np.concatenate([array.ravel() for array in arrays])
        if joined.size:
            batched.array(1, joined)
        batched.array(2, np.concatenate(([0], np.cumsum(sizes))).astype(_I8))
        batched.varint(3, _DTYPE_CODES[first.dtype])
        batched.packed(4, list(first.numpy.shape[1:]))
        entry = _entry(name)
        entry.message(2, batched)
        writer.message(2, entry)
    writer.varint(3, len(run))
    return writer


def _read_record(body: bytes, start: int, stop: int) -> list[dict[str, TensorData]]:
    count = 0
    columns: dict[str, list[TensorData]] = {}
    for number, begin, end in as_message(body, start, stop):
        if number == 2:
            name, begin, end = _read_entry(body, begin, end)
            columns[name] = _at(f"[{name!r}]", _read_batched, body, begin, end)
        elif number == 3:
            count = as_int(begin, end)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise ValidationError(f"fields disagree on the number of datums: {sorted(lengths)}")
    if not count and lengths:
        count = lengths.pop()  # encoders older than num_datums
    elif lengths and lengths != {count}:
        raise ValidationError(f"num_datums is {count}, but the fields have {lengths.pop()}")
    elif not 0 <= count <= DEFAULT_LIMITS.max_datums:
        raise TooLargeError(f"num_datums is {count}; the limit is {DEFAULT_LIMITS.max_datums}")
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _read_batched(body: bytes, start: int, stop: int) -> list[TensorData]:
    parts: dict[int, tuple[int, int]] = {}
    trailing: list[int] = []
    for number, begin, end in as_message(body, start, stop):
        if number == 4:
            trailing += as_packed(body, begin, end)
        else:
            parts[number] = (begin, end)
    code = as_int(*parts.get(3, _ZERO))
    if code not in _DTYPES:
        raise ValidationError(f"unknown dtype code {code}", "dtype")
    wire_dtype = _DTYPES[code][1]
    flat = _widen(body, *parts.get(1, _ABSENT), code)
    offsets = as_array(body, *parts.get(2, _ABSENT), _I8)
    if len(trailing) >= DEFAULT_LIMITS.max_tensor_rank:
        limit = DEFAULT_LIMITS.max_tensor_rank
        raise TooLargeError(f"more than {limit} dimensions", "trailing_shape")
    width = math.prod(trailing)
    bounds = offsets // wire_dtype.itemsize
    if offsets.size and (
        offsets[0] != 0
        or (offsets % wire_dtype.itemsize).any()
        or (np.diff(offsets) < 0).any()
        or bounds[-1] != flat.size
        or not 0 < width < 1 << 62
        or (np.diff(bounds) % width).any()
    ):
        raise ValidationError(f"do not divide {flat.nbytes} bytes of data", "offsets")
    return [
        TensorData.dense(flat[first:last], [(last - first) // width, *trailing])
        for first, last in pairwise(bounds.tolist())
    ]


# --- A sampling result ------------------------------------------------------------------------


def encode_sample(response: SampleResponse) -> bytes:
    """Sequence ids are not part of the message; the promise carried them."""
    writer = Writer()
    for sequence in response.sequences:
        writer.message(1, _write_sequence(sequence))
    prompt = response.prompt_logprobs_np
    if prompt is None and response.prompt_logprobs is not None:
        prompt = np.array([np.nan if v is None else v for v in response.prompt_logprobs])
    if prompt is not None:
        writer.array(2, prompt.astype(_F4, copy=False))
    topk = response.topk_prompt_logprobs_np
    if topk is None and response.topk_prompt_logprobs is not None:
        topk = TopkLogprobs.from_lists(response.topk_prompt_logprobs)
    if topk is not None:
        writer.message(3, _write_topk(topk))
    if response.prompt_cache_hit_tokens:
        writer.varint(4, response.prompt_cache_hit_tokens)
    if response.target_prompt_logprobs is not None:
        writer.message(5, _write_tensor(response.target_prompt_logprobs))
    if response.prompt_alt_tokens is not None:
        alternatives = Writer()
        alternatives.message(1, _write_tensor(response.prompt_alt_tokens.tokens, narrow=True))
        alternatives.message(2, _write_tensor(response.prompt_alt_tokens.logprobs))
        writer.message(6, alternatives)
    return writer.to_bytes()


def decode_sample(body: bytes, sequence_ids: Sequence[str] | None = None) -> SampleResponse:
    """`sequence_ids` are those of the promise, one per sequence."""
    found = fields(body, 0, len(body))
    parts = _by_number(found)
    sequences = [(start, stop) for number, start, stop in found if number == 1]
    if sequence_ids is not None and len(sequence_ids) != len(sequences):
        problem = f"{len(sequences)} sequences for {len(sequence_ids)} ids"
        raise ValidationError(problem, "sequences")
    ids = [""] * len(sequences) if sequence_ids is None else sequence_ids
    prompt = _at("prompt_logprobs", as_array, body, *parts.get(2, _ABSENT), _F4)
    return SampleResponse(
        sequences=[
            _at(f"sequences[{i}]", _read_sequence, body, *span, sequence_id)
            for i, (span, sequence_id) in enumerate(zip(sequences, ids, strict=True))
        ],
        prompt_logprobs_np=prompt if prompt.size else None,
        topk_prompt_logprobs_np=(
            _at("topk_prompt_logprobs", _read_topk, body, *parts[3]) if 3 in parts else None
        ),
        target_prompt_logprobs=(
            _at("target_prompt_logprobs", _read_tensor, body, *parts[5]) if 5 in parts else None
        ),
        prompt_cache_hit_tokens=_at("prompt_cache_hit_tokens", as_int32, *parts.get(4, _ZERO)),
        prompt_alt_tokens=(
            _at("prompt_alt_tokens", _read_alternatives, body, *parts[6]) if 6 in parts else None
        ),
    )


def _read_alternatives(body: bytes, start: int, stop: int) -> PromptAltTokens:
    parts = _by_number(as_message(body, start, stop))
    return PromptAltTokens(
        tokens=_at("tokens", _read_tensor, body, *parts.get(1, _ABSENT)),
        logprobs=_at("logprobs", _read_tensor, body, *parts.get(2, _ABSENT)),
    )


def _write_sequence(sequence: SampledSequence) -> Writer:
    writer = Writer()
    code = _STOP_REASONS.index(sequence.stop_reason)
    if code:
        writer.varint(1, code)
    tokens = sequence.tokens_np
    if tokens is None:
        tokens = np.asarray(sequence.tokens, dtype=_I4)
    if tokens.size:
        writer.array(2, tokens.astype(_I4, copy=False))
    logprobs = sequence.logprobs_np
    if logprobs is None and sequence.logprobs is not None:
        logprobs = np.asarray(sequence.logprobs, dtype=_F4)
    if logprobs is not None:
        writer.array(3, logprobs.astype(_F4, copy=False))
    topk = sequence.topk_logprobs_np
    if topk is None and sequence.topk_logprobs is not None:
        topk = TopkLogprobs.from_lists(sequence.topk_logprobs)
    if topk is not None:
        writer.message(4, _write_topk(topk))
    return writer


def _read_sequence(body: bytes, start: int, stop: int, sequence_id: str) -> SampledSequence:
    parts = _by_number(as_message(body, start, stop))
    code = as_int(*parts.get(1, _ZERO))
    if not 0 <= code < len(_STOP_REASONS):
        raise ValidationError(f"unknown stop reason {code}", "stop_reason")
    logprobs = _at("logprobs", as_array, body, *parts.get(3, _ABSENT), _F4)
    return SampledSequence(
        stop_reason=_STOP_REASONS[code],
        sequence_id=sequence_id,
        tokens_np=_at("tokens", as_array, body, *parts.get(2, _ABSENT), _I4),
        logprobs_np=logprobs if logprobs.size else None,
        topk_logprobs_np=_at("topk_logprobs", _read_topk, body, *parts[4]) if 4 in parts else None,
    )


def _write_topk(topk: TopkLogprobs) -> Writer:
    writer = Writer()
    length, k = topk.token_ids.shape
    if topk.token_ids.size:
        writer.array(1, topk.token_ids.astype(_I4, copy=False))
        writer.array(2, topk.logprobs.astype(_F4, copy=False))
    if k:
        writer.varint(3, k)
    if length:
        writer.varint(4, length)
    return writer


def _read_topk(body: bytes, start: int, stop: int) -> TopkLogprobs | None:
    parts = _by_number(as_message(body, start, stop))
    k, length = as_int(*parts.get(3, _ZERO)), as_int(*parts.get(4, _ZERO))
    if not k or not length:
        return None
    token_ids = as_array(body, *parts.get(1, _ABSENT), _I4)
    logprobs = as_array(body, *parts.get(2, _ABSENT), _F4)
    if k < 0 or token_ids.size != k * length or logprobs.size != k * length:
        raise ValidationError(f"{token_ids.size} and {logprobs.size} cells for {length} x {k}")
    return TopkLogprobs(token_ids.reshape(length, k), logprobs.reshape(length, k))


# --- Shared -----------------------------------------------------------------------------------


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


def _at(path: str, function: Callable[..., T], *args: Any) -> T:
    """Call, and let a complaint say where in the message it arose."""
    try:
        return function(*args)
    except ValidationError as error:
        raise error.under(path) from None


def _entry(name: str) -> Writer:
    """A map entry with its key; the value is for the caller to add as field 2."""
    entry = Writer()
    entry.text(1, name)
    return entry


def _read_entry(body: bytes, start: int, stop: int) -> tuple[str, int, int]:
    """A map entry: its key, and where its value lies (nowhere if it was left out)."""
    name, value = "", _ABSENT
    for number, begin, end in as_message(body, start, stop):
        if number == 1:
            name = as_text(body, begin, end)
        elif number == 2:
            value = (begin, end)
    return name, *value


def _by_number(found: list[Field]) -> dict[int, tuple[int, int]]:
    return {number: (start, stop) for number, start, stop in found}
