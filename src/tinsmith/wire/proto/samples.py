"""The result of a sampling request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinsmith.errors import ValidationError
from tinsmith.types import (
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    StopReason,
    TopkLogprobs,
)
from tinsmith.wire.proto.parts import ABSENT, ZERO, at, by_number
from tinsmith.wire.proto.tensors import (
    F4,
    I4,
    read_tensor,
    write_tensor,
)
from tinsmith.wire.protobuf import (
    Writer,
    as_array,
    as_int,
    as_int32,
    as_message,
    fields,
)

_STOP_REASONS: tuple[StopReason, ...] = ("stop", "length")


def encode_sample(response: SampleResponse) -> bytes:
    """Sequence ids are not part of the message; the promise carried them."""
    writer = Writer()
    for sequence in response.sequences:
        writer.message(1, _write_sequence(sequence))
    prompt = response.prompt_logprobs_np
    if prompt is None and response.prompt_logprobs is not None:
        prompt = np.array([np.nan if v is None else v for v in response.prompt_logprobs])
    if prompt is not None:
        writer.array(2, prompt.astype(F4, copy=False))
    topk = response.topk_prompt_logprobs_np
    if topk is None and response.topk_prompt_logprobs is not None:
        topk = TopkLogprobs.from_lists(response.topk_prompt_logprobs)
    if topk is not None:
        writer.message(3, _write_topk(topk))
    if response.prompt_cache_hit_tokens:
        writer.varint(4, response.prompt_cache_hit_tokens)
    if response.target_prompt_logprobs is not None:
        writer.message(5, write_tensor(response.target_prompt_logprobs))
    if response.prompt_alt_tokens is not None:
        alternatives = Writer()
        alternatives.message(1, write_tensor(response.prompt_alt_tokens.tokens, narrow=True))
        alternatives.message(2, write_tensor(response.prompt_alt_tokens.logprobs))
        writer.message(6, alternatives)
    return writer.to_bytes()


def decode_sample(body: bytes, sequence_ids: Sequence[str] | None = None) -> SampleResponse:
    """`sequence_ids` are those of the promise, one per sequence."""
    found = fields(body, 0, len(body))
    parts = by_number(found)
    sequences = [(start, stop) for number, start, stop in found if number == 1]
    if sequence_ids is not None and len(sequence_ids) != len(sequences):
        problem = f"{len(sequences)} sequences for {len(sequence_ids)} ids"
        raise ValidationError(problem, "sequences")
    ids = [""] * len(sequences) if sequence_ids is None else sequence_ids
    prompt = at("prompt_logprobs", as_array, body, *parts.get(2, ABSENT), F4)
    return SampleResponse(
        sequences=[
            at(f"sequences[{i}]", _read_sequence, body, *span, sequence_id)
            for i, (span, sequence_id) in enumerate(zip(sequences, ids, strict=True))
        ],
        prompt_logprobs_np=prompt if prompt.size else None,
        topk_prompt_logprobs_np=(
            at("topk_prompt_logprobs", _read_topk, body, *parts[3]) if 3 in parts else None
        ),
        target_prompt_logprobs=(
            at("target_prompt_logprobs", read_tensor, body, *parts[5]) if 5 in parts else None
        ),
        prompt_cache_hit_tokens=at("prompt_cache_hit_tokens", as_int32, *parts.get(4, ZERO)),
        prompt_alt_tokens=(
            at("prompt_alt_tokens", _read_alternatives, body, *parts[6]) if 6 in parts else None
        ),
    )


def _read_alternatives(body: bytes, start: int, stop: int) -> PromptAltTokens:
    parts = by_number(as_message(body, start, stop))
    return PromptAltTokens(
        tokens=at("tokens", read_tensor, body, *parts.get(1, ABSENT)),
        logprobs=at("logprobs", read_tensor, body, *parts.get(2, ABSENT)),
    )


def _write_sequence(sequence: SampledSequence) -> Writer:
    writer = Writer()
    code = _STOP_REASONS.index(sequence.stop_reason)
    if code:
        writer.varint(1, code)
    tokens = sequence.tokens_np
    if tokens is None:
        tokens = np.asarray(sequence.tokens, dtype=I4)
    if tokens.size:
        writer.array(2, tokens.astype(I4, copy=False))
    logprobs = sequence.logprobs_np
    if logprobs is None and sequence.logprobs is not None:
        logprobs = np.asarray(sequence.logprobs, dtype=F4)
    if logprobs is not None:
        writer.array(3, logprobs.astype(F4, copy=False))
    topk = sequence.topk_logprobs_np
    if topk is None and sequence.topk_logprobs is not None:
        topk = TopkLogprobs.from_lists(sequence.topk_logprobs)
    if topk is not None:
        writer.message(4, _write_topk(topk))
    return writer


def _read_sequence(body: bytes, start: int, stop: int, sequence_id: str) -> SampledSequence:
    parts = by_number(as_message(body, start, stop))
    code = as_int(*parts.get(1, ZERO))
    if not 0 <= code < len(_STOP_REASONS):
        raise ValidationError(f"unknown stop reason {code}", "stop_reason")
    logprobs = at("logprobs", as_array, body, *parts.get(3, ABSENT), F4)
    return SampledSequence(
        stop_reason=_STOP_REASONS[code],
        sequence_id=sequence_id,
        tokens_np=at("tokens", as_array, body, *parts.get(2, ABSENT), I4),
        logprobs_np=logprobs if logprobs.size else None,
        topk_logprobs_np=at("topk_logprobs", _read_topk, body, *parts[4]) if 4 in parts else None,
    )


def _write_topk(topk: TopkLogprobs) -> Writer:
    writer = Writer()
    length, k = topk.token_ids.shape
    if topk.token_ids.size:
        writer.array(1, topk.token_ids.astype(I4, copy=False))
        writer.array(2, topk.logprobs.astype(F4, copy=False))
    if k:
        writer.varint(3, k)
    if length:
        writer.varint(4, length)
    return writer


def _read_topk(body: bytes, start: int, stop: int) -> TopkLogprobs | None:
    parts = by_number(as_message(body, start, stop))
    k, length = as_int(*parts.get(3, ZERO)), as_int(*parts.get(4, ZERO))
    if not k or not length:
        return None
    token_ids = as_array(body, *parts.get(1, ABSENT), I4)
    logprobs = as_array(body, *parts.get(2, ABSENT), F4)
    if k < 0 or token_ids.size != k * length or logprobs.size != k * length:
        raise ValidationError(f"{token_ids.size} and {logprobs.size} cells for {length} x {k}")
    return TopkLogprobs(token_ids.reshape(length, k), logprobs.reshape(length, k))
