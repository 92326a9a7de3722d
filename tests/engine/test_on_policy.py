"""With `on_policy` exact, sampler and trainer agree in every bit, whatever is beside a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import build_reference
from tests.engine.on_policy_reference import assert_they_agree_in_every_bit, trained_logprobs
from tests.engine.sample.sampling_reference import answers, job_of, tokens_of
from tests.support.tiny_families import save_tiny
from tests.support.tiny_vision import TINY_TEXT_PARTS, save_tiny_vision
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model import invariant
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.families import AttentionSpec
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.errors import EngineError

EXACT = LocalEngineConfig(device="cpu", on_policy="exact")


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def exact_decoder(variant: str, model_folder: Callable[[str], Path]) -> Decoder:
    decoder = Decoder.load(model_folder(variant))
    decoder.allow_packing()
    decoder.make_invariant()
    return decoder


@pytest.mark.parametrize(
    "cached_tokens", [100_000, 400], ids=["with room", "with work that gives way"]
)
def test_a_sampled_tokens_logprob_is_the_trainers_in_every_bit(
    cached_tokens: int, exact_decoder: Decoder, new_adapter: Callable[..., Adapter]
) -> None:
    assert_they_agree_in_every_bit(exact_decoder, EXACT, new_adapter, cached_tokens)


def test_without_it_they_differ(
    model_folder: Callable[[str], Path], new_adapter: Callable[..., Adapter]
) -> None:
    """So that the test above could fail."""
    decoder = Decoder.load(model_folder("qwen3"))
    job = job_of("a", tokens_of(20), max_tokens=40, seed=3)
    (sequence,) = answers(Generator(decoder, EXACT), [(job, None)])["a"].sequences
    none = new_adapter(decoder, fill_seed=None)
    trained = trained_logprobs(
        decoder, [(tokens_of(20) + sequence.tokens, none)], EXACT, forward_only=True
    )
    assert not np.array_equal(trained[0][19:], sequence.logprobs_np)


def test_the_number_of_threads_changes_no_bit(
    tmp_path: Path, new_adapter: Callable[..., Adapter]
) -> None:
    """With so many numbers, and so odd a number, that torch would divide what is between the
    products, and within a row."""
    build_reference("llama", intermediate_size=201).save_pretrained(tmp_path)
    exact_decoder = Decoder.load(tmp_path)
    exact_decoder.make_invariant()
    adapter = new_adapter(exact_decoder, fill_seed=1, rank=5)
    prompts = [tokens_of(100 + number, number) for number in range(9)]
    jobs = [
        (job_of(str(number), prompt, max_tokens=5, seed=3, prompt_logprobs=True), adapter)
        for number, prompt in enumerate(prompts)
    ]

    def logprobs(num_threads: int) -> list[np.ndarray]:
        torch.set_num_threads(num_threads)
        found = answers(Generator(exact_decoder, EXACT), jobs)
        sampled = [found[job.job_id] for job, _ in jobs]
        trained = trained_logprobs(
            exact_decoder, [(prompt, adapter) for prompt in prompts], EXACT, forward_only=False
        )
        of_prompts = [response.prompt_logprobs_np[1:] for response in sampled]
        return [*of_prompts, *(response.sequences[0].logprobs_np for response in sampled), *trained]

    expected = logprobs(1)
    for num_threads in (2, 3, 7):
        for ours, theirs in zip(logprobs(num_threads), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("dim", "num_kv_heads"), [(8, 1), (24, 2), (64, 3)])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (20, None, True), (None, 5.0, False)]
)
def test_a_query_finds_the_same_bits_alone_and_among_others(
    dim: int, num_kv_heads: int, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(dim)
    spec = AttentionSpec(scale=0.2, rope=None, window=window, softcap=softcap)
    q = torch.randn(150, 6, dim, generator=generator)
    k, v = torch.randn(2, num_kv_heads, 150, dim, generator=generator)
    sinks = torch.randn(6, generator=generator) if has_sinks else None
    positions = torch.arange(150)[None]
    whole = invariant.attend(spec, q[None], k, v, positions, sinks)
    for start, stop in [(0, 1), (63, 64), (64, 65), (5, 70), (70, 149), (149, 150)]:
        part = slice(start, stop)
        own = (q[None, part], k[:, :stop], v[:, :stop], positions[:, part], sinks)
        assert torch.equal(invariant.attend(spec, *own), whole[:, part])
    # Beside another sequence.
    pair = [torch.cat([x, x.flip(0)]) for x in (q[None, 90:91], k, v, positions[:, 90:91])]
    assert torch.equal(invariant.attend(spec, *pair, sinks)[:1], whole[:, 90:91])


def test_what_it_does_not_work_with_is_refused() -> None:
    with pytest.raises(EngineError, match="not on cpu in bfloat16"):
        BaseModels(replace(EXACT, dtype="bfloat16"))
    with pytest.raises(EngineError, match="one rank"):
        BaseModels(replace(EXACT, ranks=2))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("qwen3_next", {}, "not for models with experts"),
        ("qwen3_5_text", {}, "not for models with recurrent layers"),
        ("qwen3_5", {}, "not for models with recurrent layers"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 4}, "not for models that read images"),
        ("nemotron_h", {}, "for models of our own decoder"),
    ],
)
def test_models_that_it_is_not_for_are_refused_with_the_reason(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save = save_tiny_vision if model_type in TINY_TEXT_PARTS else save_tiny
    save(model_type, tmp_path, **changes)
    models = BaseModels(replace(EXACT, models={"tiny": str(tmp_path)}))
    with pytest.raises(EngineError, match=reason):
        models.config("tiny")
