"""Tokens in, tokens out, as vLLM's `generate` has it: messages for reinforcement learning.

A training program renders prompts itself and trains on sampled tokens, so no text is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.server.chat.ask import MAX_STOPS, SHAPING, Ask, given, read_shaping, read_stops
from tinsmith.server.chat.openai import MAX_TOP_LOGPROBS, check_choices, check_known
from tinsmith.types import SampledSequence, SamplingParams
from tinsmith.types.convert import read_field

_KNOWN = {"model", "token_ids", "sampling_params", "return_token_ids", "request_id", "cache_salt"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"stream": (False,), "priority": (0,)}
_PARAMS = SHAPING | {
    "n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "max_tokens", "logprobs"
}  # fmt: skip
_NEUTRAL_PARAMS: dict[str, tuple[Any, ...]] = {
    "ignore_eos": (False,),
    "min_tokens": (0,),
    # They say how text is made of tokens, and there is no text.
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True, False),
}


def read_generate(fields: Mapping[str, Any]) -> Ask:
    check_known(fields, _KNOWN, _NEUTRAL)
    tokens = read_field("token_ids", list[int], fields.get("token_ids"))
    params = read_field("sampling_params", dict[str, Any], fields.get("sampling_params"))
    try:
        return _ask(read_field("model", str, fields.get("model")), tokens, params)
    except ValidationError as error:
        raise error.under("sampling_params") from None


def generated(
    request_id: str, prompt: list[int], sequences: Sequence[SampledSequence], *, with_logprobs: bool
) -> dict[str, Any]:
    num_sampled = sum(len(sequence.tokens) for sequence in sequences)
    return {
        "request_id": request_id,
        "prompt_token_ids": prompt,
        "choices": [
            {
                "index": index,
                "token_ids": sequence.tokens,
                "logprobs": {"content": _logprobs(sequence)} if with_logprobs else None,
                "finish_reason": sequence.stop_reason,
            }
            for index, sequence in enumerate(sequences)
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_sampled,
            "total_tokens": len(prompt) + num_sampled,
        },
    }


def _ask(model: str, tokens: list[int], params: Mapping[str, Any]) -> Ask:
    check_known(params, _PARAMS, _NEUTRAL_PARAMS)
    n = check_choices(given(params, "n", int, 1))
    count = read_field("logprobs", int | None, params.get("logprobs"))
    if not 0 <= (count or 0) <= MAX_TOP_LOGPROBS:
        raise ValidationError(f"must be between 0 and {MAX_TOP_LOGPROBS}", "logprobs")
    stops = read_stops(params.get("stop"), "stop")
    stop_tokens = read_field("stop_token_ids", list[int] | None, params.get("stop_token_ids")) or []
    if stops and stop_tokens:
        raise ValidationError("texts and tokens cannot both stop a sequence", "stop_token_ids")
    if len(stop_tokens) > MAX_STOPS:
        raise ValidationError(f"at most {MAX_STOPS} tokens, got {len(stop_tokens)}",
                              "stop_token_ids")  # fmt: skip
    return Ask(
        model=model,
        is_chat=False,
        prompts=(tokens,),
        params=SamplingParams(
            max_tokens=read_field("max_tokens", int | None, params.get("max_tokens")),
            seed=read_field("seed", int | None, params.get("seed")),
            stop=list(stops) or stop_tokens or None,
            temperature=given(params, "temperature", float, 1.0),
            top_p=given(params, "top_p", float, 1.0),
            top_k=given(params, "top_k", int, -1),
        ),
        shaping=read_shaping(params),
        stops=stops,
        n=n,
        stream=False,
        with_logprobs=count is not None,
        top_logprobs=count or 0,
    )


def _logprobs(sequence: SampledSequence) -> list[dict[str, Any]]:
    tops = sequence.topk_logprobs or [None] * len(sequence.tokens)
    return [
        {**_named(token, logprob), "top_logprobs": [_named(*each) for each in top or ()]}
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs or [], tops, strict=True)
    ]


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
