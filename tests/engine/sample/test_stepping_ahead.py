"""A decoding step that is launched before the last one was read changes nothing for anybody.

On CUDA the step is a graph. Here it is the plain one, with what it brought kept back until it is
read, and with the last tokens known to it alone, as they are on a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.sample.sampling_reference import CPU, job_of, tokens_of, trainer_logits
from tests.support.tiny_families import save_tiny
from tinsmith.detokenizer import read_detokenize
from tinsmith.engine.base import SampleEvent, SampleJob
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.choosing import uniforms
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.engine.local.sample.kvcache import CacheShape
from tinsmith.engine.local.sample.launched import Launched
from tinsmith.engine.local.sample.mixed_step import MixedStep
from tinsmith.engine.local.sample.sequences import Sequence
from tinsmith.types import SampleResponse


class LateDecode:
    """A decoding step like that of a GPU, on the CPU."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._last: dict[Sequence, int] = {}
        self.num_ahead: list[int] = []
        """Of each launch, how many rows had a token that was not read yet."""

    def launch(self, running: list[Sequence]) -> Launched:
        launched = Launched(running)
        self.num_ahead.append(sum(sequence.num_ahead for sequence in running))
        unread = [sequence for sequence in running if sequence.num_ahead]
        for sequence in unread:
            assert sequence.num_ahead == 1
            sequence.tokens.append(self._last[sequence])
        found = {}
        for sequence in running:
            step = MixedStep(self._decoder, [], [sequence])
            step.run()
            (found[sequence],) = step.next_tokens()
        for sequence in unread:
            sequence.tokens.pop()
        for sequence in running:
            sequence.num_ahead += 1
        self._last = {sequence: found[sequence].token for sequence in running}
        facts = [(float(f.token), f.logprob, float(f.is_finite)) for f in found.values()]
        chosen = [found[s] for s in running if not s.request.draws_whole]
        launched.add(running, torch.tensor(facts, dtype=torch.float64).T, chosen)
        return launched

    def forget(self, adapter: Adapter) -> None:
        pass


def run(
    generator: Generator, jobs: list[SampleJob], cancelled: tuple[str, ...] = ()
) -> dict[str, SampleResponse]:
    """Jobs that come three steps after one another; some are cancelled five steps after that."""
    events: list[tuple[str, SampleEvent]] = []
    for job in jobs:
        generator.submit(job, None)
        for _ in range(3):
            events += generator.step()
    for _ in range(5):
        events += generator.step()
    for job_id in cancelled:
        generator.cancel(job_id)
    while generator.busy:
        events += generator.step()
    return {job_id: event for job_id, event in events if isinstance(event, SampleResponse)}


def assert_decided_by_seed_and_model(
    decoder: Decoder, job: SampleJob, response: SampleResponse
) -> None:
    """Every token is the one on which the job's number falls, after those before it."""
    assert job.params.seed is not None
    assert isinstance(job.params.stop, list)
    prompt = job.prompt.to_ints()
    for index, sequence in enumerate(response.sequences):
        tokens = np.array(sequence.tokens)
        is_stop = np.isin(tokens, [*job.params.stop, *decoder.config.eos_token_ids])
        assert not is_stop[:-1].any()
        assert bool(is_stop[-1]) == (sequence.stop_reason == "stop")
        assert is_stop[-1] or len(tokens) == job.params.max_tokens
        logits = trainer_logits(decoder, prompt + sequence.tokens)[len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double(), -1).numpy()
        places = np.arange(len(tokens))
        np.testing.assert_allclose(sequence.logprobs_np, logprobs[places, tokens], atol=1e-4)
        if job.params.top_k <= 0 and job.params.temperature == 1:
            numbers = uniforms(np.array([job.params.seed]), np.array([index]), places)
            above = np.exp(logprobs).cumsum(axis=-1)[places, tokens]
            below = above - np.exp(logprobs[places, tokens])
            assert ((below - 1e-4 < numbers) & (numbers < above + 1e-4)).all()


def varied_jobs() -> list[SampleJob]:
    """Several lengths, stops by token, top-k among them, groups, two owners."""
    changes: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"max_tokens": 40, "stop": [7, 11, 19, 23, 31]},
        {"max_tokens": 25, "num_samples": 4},
        {"max_tokens": 1},
        {"max_tokens": 30, "top_k": 5},
        {"max_tokens": 33, "temperature": 0.0},
        {"max_tokens": 60, "scope": "other", "num_samples": 3},
        {"max_tokens": 20, "topk_sample_logprobs": 2},
    ]
    return [
        job_of(str(number), tokens_of(4 + 3 * number, number), seed=number, **change)
        for number, change in enumerate(changes)
    ]


@pytest.fixture
def new_pair(tiny_decoder: Decoder, tiny_llama_folder: Path) -> Any:
    def make(**settings: Any) -> tuple[Generator, LateDecode]:
        config = LocalEngineConfig(device="cpu", **settings)
        detokenize = read_detokenize(tiny_llama_folder)
        decode = LateDecode(tiny_decoder)
        return Generator(tiny_decoder, config, detokenize, prefill_tokens=16, decode=decode), decode

    return make


@pytest.mark.parametrize(
    ("max_running", "cached_tokens"),
    [(256, 100_000), (3, 100_000), (256, 300)],
    ids=["plain", "paused", "giving way"],
)
def test_every_token_is_the_one_that_seed_and_model_decide(
    max_running: int, cached_tokens: int, new_pair: Any, tiny_decoder: Decoder
) -> None:
    shape = CacheShape.of(tiny_decoder.config, tiny_decoder.device, tiny_decoder.dtype)
    cache_bytes = cached_tokens * shape.bytes_per_token
    generator, decode = new_pair(max_running_samples=max_running, kv_cache_bytes=cache_bytes)
    jobs = varied_jobs()
    found = run(generator, jobs)
    assert found.keys() == {job.job_id for job in jobs}
    for job in jobs:
        assert_decided_by_seed_and_model(tiny_decoder, job, found[job.job_id])
    assert max(decode.num_ahead) > 1


def test_a_cancelled_job_takes_nothing_with_it(new_pair: Any, tiny_decoder: Decoder) -> None:
    generator, _ = new_pair()
    jobs = varied_jobs()
    found = run(generator, jobs, cancelled=("0", "6"))
    assert found.keys() == {job.job_id for job in jobs} - {"0", "6"}
    for job_id, response in found.items():
        assert_decided_by_seed_and_model(tiny_decoder, jobs[int(job_id)], response)


def test_a_step_that_another_turn_follows_is_read_at_once(tiny_decoder: Decoder) -> None:
    decode = LateDecode(tiny_decoder)
    generator = Generator(tiny_decoder, CPU, decode=decode)
    generator.submit(job_of("a", tokens_of(5), max_tokens=9, seed=1), None)
    while generator.busy:
        generator.step(ahead=False)
    assert len(decode.num_ahead) == 8
    assert not any(decode.num_ahead)


@pytest.mark.parametrize("cached_tokens", [100_000, 300], ids=["plain", "giving way"])
def test_states_of_recurrent_layers_are_those_of_the_tokens_read(
    tmp_path: Path, cached_tokens: int
) -> None:
    """Also of a sequence that stopped, or gave way, in a step that was launched already."""
    save_tiny("qwen3_5_text", tmp_path, eos_token_id=None)
    config = LocalEngineConfig(device="cpu", models={"tiny": str(tmp_path)})
    decoder = BaseModels(config).get("tiny")
    shape = CacheShape.of(decoder.config, decoder.device, decoder.dtype)
    room = 2 * max(cached_tokens * shape.bytes_per_token, 8 * shape.state_bytes)
    small = LocalEngineConfig(device="cpu", kv_cache_bytes=room)
    jobs = [job for job in varied_jobs() if job.params.top_k <= 0]
    generator = Generator(decoder, small, prefill_tokens=16, decode=LateDecode(decoder))
    found = run(generator, jobs)
    for job in jobs:
        assert_decided_by_seed_and_model(decoder, job, found[job.job_id])
