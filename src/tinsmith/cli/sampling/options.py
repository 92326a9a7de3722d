"""The options of commands that sample, and the parameters they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.service import ServiceClient
    from tinsmith.types import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])


def with_sampling_options(function: F) -> F:
    for option in (
        click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True),
        click.option("--temperature", type=float, default=0.7, show_default=True),
        click.option("--top-p", type=float, default=1.0, show_default=True),
        click.option("--top-k", type=int, default=-1, show_default=True, help="-1: no limit."),
        click.option(
            "--tokenizer",
            "tokenizer_source",
            help="A folder or hub name, where the model's own is not found.",
        ),
    ):
        function = option(function)
    return function


def params(
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None = None,
    stop: Sequence[str] | Sequence[int] | None = None,
) -> SamplingParams:
    from tinsmith.types import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=list(stop) if stop else None,  # type: ignore[arg-type]  # all text or all numbers
    )


def sampler(service: ServiceClient, model: str) -> SamplingClient:
    """A sampling client for a base model's name or a `tinker://` path."""
    if model.startswith("tinker://"):
        from tinsmith.cli import naming
        from tinsmith.client.rest import RestClient

        path = naming.checkpoint_path(RestClient(), model)
        return service.create_sampling_client(model_path=path)
    return service.create_sampling_client(base_model=model)
