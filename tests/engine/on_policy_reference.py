"""What sampler and trainer say of the same tokens, for tests that compare them bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.engine.sample.sampling_reference import answers, job_of, tokens_of
from tinsmith.engine.base import Pass
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.engine.local.sample.kvcache import CacheShape
from tinsmith.engine.local.train.passes import run_passes
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput


def trained_logprobs(
    decoder: Decoder,
    sequences: list[tuple[list[int], Adapter]],
    config: LocalEngineConfig,
    *,
    forward_only: bool,
    targets: list[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """What the trainer says of every token but the first, all sequences in one call; with
    `targets` (tokens - 1, K), of those in their places."""
    if targets is None:
        targets = [np.array(tokens[1:]) for tokens, _ in sequences]
    adapters = {str(number): adapter for number, (_, adapter) in enumerate(sequences)}
    passes = [
        Pass(
            adapter_id=str(number),
            data=[
                Datum(
                    model_input=ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={"target_tokens": target},
                )
            ],
            loss_fn="cross_entropy",
            forward_only=forward_only,
        )
        for number, ((tokens, _), target) in enumerate(zip(sequences, targets, strict=True))
    ]
    found: dict[int, np.ndarray] = {}
    for finished in run_passes(passes, adapters, decoder, config):
        if finished is not None:
            assert isinstance(finished.result, ForwardBackwardOutput), finished
            found[finished.index] = finished.result.loss_fn_outputs[0]["logprobs"].numpy
    return [found[number] for number in range(len(sequences))]


def assert_they_agree_in_every_bit(
    decoder: Decoder,
    config: LocalEngineConfig,
    new_adapter: Callable[..., Adapter],
    cached_tokens: int,
) -> None:
    """Chunked and shared prompts, groups, several adapters and ranks, neighbours that come and go;
    trained packed in one call, alone, and with gradients."""
    shape = CacheShape.of(decoder.config, decoder.device, decoder.dtype)
    generator = Generator(
        decoder,
        replace(config, kv_cache_bytes=cached_tokens * shape.bytes_per_token),
        prefill_tokens=7,
    )
    adapters = [new_adapter(decoder, fill_seed=seed, rank=rank) for seed, rank in ((1, 4), (2, 9))]
    none = new_adapter(decoder, fill_seed=None)
    shared = tokens_of(31, 5)
    prompts = [tokens_of(3, 1), shared, [*shared, 9, 8], tokens_of(70, 2), tokens_of(12, 3)]
    jobs = [
        (
            job_of(
                str(number),
                prompt,
                seed=number,
                max_tokens=9 + 11 * number,
                num_samples=1 + number % 3,
                prompt_logprobs=True,
                topk_sample_logprobs=2 * (number % 2),
            ),
            [None, *adapters][number % 3],
        )
        for number, prompt in enumerate(prompts)
    ]
    responses = answers(generator, jobs)
    sequences, sampled, tops = [], [], []
    for job, adapter in jobs:
        prompt, response = job.prompt.to_ints(), responses[job.job_id]
        assert response.prompt_logprobs_np is not None
        for sequence in response.sequences:
            sequences.append((prompt + sequence.tokens, adapter or none))
            known = response.prompt_logprobs_np[1:], sequence.logprobs_np
            sampled.append(np.concatenate(known))
            tops.append(sequence.topk_logprobs)
    packed = trained_logprobs(decoder, sequences, config, forward_only=True)
    for ours, theirs in zip(sampled, packed, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for number in range(0, len(sequences), 3):
        (alone,) = trained_logprobs(decoder, [sequences[number]], config, forward_only=False)
        np.testing.assert_array_equal(sampled[number], alone)
    # The likeliest tokens: each place's are its targets.
    for one, top in zip(sequences, tops, strict=True):
        if top:
            place = len(one[0]) - len(top)
            targets = np.zeros((len(one[0]) - 1, 2), dtype=np.int64)
            targets[place - 1 :] = [[token for token, _ in pair] for pair in top]
            (theirs,) = trained_logprobs(
                decoder, [one], config, forward_only=True, targets=[targets]
            )
            ours = np.array([[value for _, value in pair] for pair in top], dtype=np.float32)
            np.testing.assert_array_equal(ours, theirs[place - 1 :])
