"""The output of a pass: tensors of all datums joined, with byte offsets, and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.types import (
    ForwardBackwardOutput,
    TensorData,
)
from tinsmith.wire.limits import DEFAULT_LIMITS, Limits
from tinsmith.wire.proto.parts import ABSENT, ZERO, at, entry_of, read_entry
from tinsmith.wire.proto.tensors import (
    DTYPE_CODES,
    DTYPES,
    I8,
    widen,
)
from tinsmith.wire.protobuf import (
    Writer,
    as_array,
    as_double,
    as_int,
    as_message,
    as_packed,
    as_text,
    fields,
)


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """Outputs whose fields differ in dtype or trailing shape go into records of their own."""
    writer = Writer()
    writer.text(1, output.loss_fn_output_type)
    for run in _uniform_runs(output.loss_fn_outputs):
        writer.message(2, _write_record(run))
    for name, value in output.metrics.items():
        entry = entry_of(name)
        entry.double(2, float(value))
        writer.message(3, entry)
    return writer.to_bytes()


def decode_output(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ForwardBackwardOutput:
    kind = ""
    outputs: list[dict[str, TensorData]] = []
    metrics: dict[str, float] = {}
    for number, start, stop in fields(body, 0, len(body)):
        if number == 1:
            kind = at("loss_fn_output_type", as_text, body, start, stop)
        elif number == 2:
            outputs += at(
                f"loss_fn_outputs[{len(outputs)}]", _read_record, body, start, stop, limits
            )
            if len(outputs) > limits.max_datums:
                raise TooLargeError(f"more than {limits.max_datums} datums", "loss_fn_outputs")
        elif number == 3:
            name, start, stop = at("metrics", read_entry, body, start, stop)
            metrics[name] = at(f"metrics[{name!r}]", as_double, body, start, stop)
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
        batched.array(2, np.concatenate(([0], np.cumsum(sizes))).astype(I8))
        batched.varint(3, DTYPE_CODES[first.dtype])
        batched.packed(4, list(first.numpy.shape[1:]))
        entry = entry_of(name)
        entry.message(2, batched)
        writer.message(2, entry)
    writer.varint(3, len(run))
    return writer


def _read_record(body: bytes, start: int, stop: int, limits: Limits) -> list[dict[str, TensorData]]:
    count = 0
    columns: dict[str, list[TensorData]] = {}
    for number, begin, end in as_message(body, start, stop):
        if number == 2:
            name, begin, end = read_entry(body, begin, end)
            columns[name] = at(f"[{name!r}]", _read_batched, body, begin, end, limits)
        elif number == 3:
            count = as_int(begin, end)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise ValidationError(f"fields disagree on the number of datums: {sorted(lengths)}")
    if not count and lengths:
        count = lengths.pop()  # encoders older than num_datums
    elif lengths and lengths != {count}:
        raise ValidationError(f"num_datums is {count}, but the fields have {lengths.pop()}")
    if not 0 <= count <= limits.max_datums:
        raise TooLargeError(f"num_datums is {count}; the limit is {limits.max_datums}")
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _read_batched(body: bytes, start: int, stop: int, limits: Limits) -> list[TensorData]:
    parts: dict[int, tuple[int, int]] = {}
    trailing: list[int] = []
    for number, begin, end in as_message(body, start, stop):
        if number == 4:
            trailing += as_packed(body, begin, end)
        else:
            parts[number] = (begin, end)
    code = as_int(*parts.get(3, ZERO))
    if code not in DTYPES:
        raise ValidationError(f"unknown dtype code {code}", "dtype")
    wire_dtype = DTYPES[code][1]
    flat = widen(body, *parts.get(1, ABSENT), code)
    offsets = as_array(body, *parts.get(2, ABSENT), I8)
    if len(trailing) >= limits.max_tensor_rank:
        raise TooLargeError(f"more than {limits.max_tensor_rank} dimensions", "trailing_shape")
    if offsets.size > limits.max_datums + 1:
        raise TooLargeError(f"more than {limits.max_datums} datums", "offsets")
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
