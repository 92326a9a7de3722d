"""What a sample asks about its prompt, checked before it is sent and when it is answered."""

from __future__ import annotations

import numpy as np

from tinsmith.errors import TinkerError, ValidationError
from tinsmith.types import SampleRequest, SampleResponse, TensorData


def check_questions(
    targets: TensorData | None, alternatives: int, last_n: int | None, with_logprobs: bool
) -> None:
    """Refuse here what the service would refuse later."""
    if targets is not None:
        if targets.dtype != "int64":
            raise ValidationError(
                f"must hold token ids (int64), got {targets.dtype}", "target_prompt_logprobs"
            )
        if targets.shape is None or len(targets.shape) != 2:
            raise ValidationError(
                f"must be [prompt length - 1, K], got shape {targets.shape}",
                "target_prompt_logprobs",
            )
    if alternatives < 0:
        raise ValidationError(f"must be 0 or more, got {alternatives}", "prompt_alt_tokens_k")
    if last_n is not None:
        if last_n < 1:
            raise ValidationError(f"must be 1 or more, got {last_n}", "prompt_logprobs_last_n")
        if not with_logprobs:
            raise ValidationError("needs include_prompt_logprobs", "prompt_logprobs_last_n")


def check_answers(request: SampleRequest, response: SampleResponse) -> None:
    """A service that predates a field ignores it; that must not pass for an answer."""
    if request.prompt_alt_tokens_k > 0 and response.prompt_alt_tokens is None:
        raise TinkerError(
            f"prompt_alt_tokens_k={request.prompt_alt_tokens_k} was asked for, but the service "
            "returned none; it may predate the feature"
        )
    last_n, logprobs = request.prompt_logprobs_last_n, response.prompt_logprobs_np
    if last_n is not None and logprobs is not None:
        before = logprobs[: max(len(logprobs) - last_n, 0)]
        if not np.isnan(before).all():
            raise TinkerError(
                f"prompt_logprobs_last_n={last_n} was asked for, but the service scored the whole "
                "prompt; it may predate the feature"
            )
