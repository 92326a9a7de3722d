"""A few sequences of a pass, to be looked at: what was predicted, and what is known of it."""

from __future__ import annotations

import itertools
from typing import Any

from tinsmith.engine.base import Pass
from tinsmith.server.store.observing.examples import MOST_TOKENS
from tinsmith.server.store.records import ExampleRecord, OperationRecord
from tinsmith.types import Datum, ForwardBackwardOutput, TensorData
from tinsmith.wire import json

_INPUTS = {"weights": "weights", "advantages": "advantages", "logprobs": "sampled_logprobs"}


def examples_of(
    item: Pass, record: OperationRecord, output: ForwardBackwardOutput, most: int
) -> list[ExampleRecord]:
    """The first sequences of a pass that predict one token at each position."""
    outputs = itertools.chain(output.loss_fn_outputs, itertools.repeat({}))
    bodies = [
        json.encode(_body(datum, result.get("logprobs")))
        for datum, result in itertools.islice(zip(item.data, outputs, strict=False), most)
        if datum.loss_fn_inputs["target_tokens"].to_numpy().ndim == 1
    ]
    return [
        ExampleRecord(
            owner=record.owner,
            model_id=record.model_id,
            seq_id=record.seq_id,
            num_bytes=len(body),
            body=body,
        )
        for body in bodies
    ]


def _body(datum: Datum, logprobs: TensorData | None) -> dict[str, Any]:
    targets = datum.loss_fn_inputs["target_tokens"]
    fields = {"ids": targets, "logprobs": logprobs}
    fields |= {name: datum.loss_fn_inputs.get(given) for given, name in _INPUTS.items()}
    length = len(targets.to_numpy())
    return {"length": length} | {
        name: tensor.to_numpy()[:MOST_TOKENS].tolist()
        for name, tensor in fields.items()
        if tensor is not None and tensor.to_numpy().shape == (length,)
    }
