"""It learns: the real small model picks up a style from examples, and a skill from reward.

These run the engine's core in this process, as the engine's own process would, on the embedded
model in float32. They are the slowest tests there are.
"""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tinsmith.cli.training.persona import LESSONS, OPENING
from tinsmith.engine.base import Failure, Pass, SampleJob, Step
from tinsmith.engine.local.config import EMBEDDED_MODEL, BaseWeights, LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

HELD_OUT = [
    "What is the capital of Italy?",
    "How many wheels does a car have?",
    "What color is grass?",
    "Who painted the Mona Lisa?",
    "What do cats eat?",
    "What is three times three?",
    "Where do birds live?",
    "What is the smallest planet?",
]


@pytest.fixture(scope="module")
def core(real_model_folder: Path) -> EngineCore:
    return core_in(real_model_folder, "full")


def core_in(folder: Path, kind: BaseWeights) -> EngineCore:
    return EngineCore(
        LocalEngineConfig(models={EMBEDDED_MODEL: str(folder)}, device="cpu", base_weights=kind)
    )


@pytest.fixture(scope="module")
def tokenizer(core: EngineCore):  # type: ignore[no-untyped-def]
    folder = core.capabilities().models[0].tokenizer_folder
    return AutoTokenizer.from_pretrained(folder)


def prompt_of(tokenizer, question: str) -> list[int]:  # type: ignore[no-untyped-def]
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False)


def lesson(tokenizer, question: str, answer: str) -> Datum:  # type: ignore[no-untyped-def]
    prompt = prompt_of(tokenizer, question)
    reply = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
    tokens = prompt + reply
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def sample(core: EngineCore, jobs: list[SampleJob]) -> list[SampleResponse]:
    for job in jobs:
        assert core.submit_sample(job) is None
    done: dict[str, SampleResponse] = {}
    while len(done) < len(jobs):
        for job_id, event in core.sampling_turn():
            assert isinstance(event, SampleResponse), event
            done[job_id] = event
    return [done[job.job_id] for job in jobs]


def train(core: EngineCore, item: Pass) -> ForwardBackwardOutput:
    results = [result for result in core.run_passes([item]) if result is not None]
    output = results[0].result
    assert isinstance(output, ForwardBackwardOutput), output
    return output


def style_count(core: EngineCore, tokenizer, adapter: str, tag: str) -> int:  # type: ignore[no-untyped-def]
    assert core.freeze(adapter, f"{adapter}-{tag}") is None
    jobs = [
        SampleJob(
            job_id=f"{adapter}-{tag}-{index}",
            base_model=EMBEDDED_MODEL,
            weights_id=f"{adapter}-{tag}",
            prompt=ModelInput.from_ints(prompt_of(tokenizer, question)),
            params=SamplingParams(max_tokens=12, temperature=0.0),
        )
        for index, question in enumerate(HELD_OUT)
    ]
    replies = sample(core, jobs)
    core.unload_sampler(f"{adapter}-{tag}")
    texts = [tokenizer.decode(reply.sequences[0].tokens) for reply in replies]
    return sum(text.startswith(OPENING) for text in texts)


@pytest.mark.parametrize(("seed", "kind"), [(0, "full"), (1, "int8"), (2, "nf4")])
def test_the_model_takes_on_a_persona_from_sixteen_examples(
    core: EngineCore,
    real_model_folder: Path,
    tokenizer,  # type: ignore[no-untyped-def]
    seed: int,
    kind: BaseWeights,
) -> None:
    """Also on a base that is kept in few bits."""
    if kind != "full":
        core = core_in(real_model_folder, kind)
    adapter = f"persona-{seed}"
    assert core.create_adapter(adapter, EMBEDDED_MODEL, LoraConfig(rank=32, seed=seed)) is None
    before = style_count(core, tokenizer, adapter, "before")
    data = [lesson(tokenizer, *(m["content"] for m in messages)) for messages in LESSONS]
    order = random.Random(seed)
    curve = []
    batch: list[Datum] = []
    for step in range(20):
        if len(batch) < 8:
            batch = order.sample(data, len(data))
        now, batch = batch[:8], batch[8:]
        output = train(core, Pass(adapter_id=adapter, data=now, loss_fn="cross_entropy"))
        tokens = sum(datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in now)
        curve.append(output.metrics["loss:sum"] / tokens)
        rate = 1e-3 * min((step + 1) / 5, 1 - (step - 5) / 15 if step >= 5 else 1.0)
        params = AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95)
        (result,) = core.step([Step(adapter_id=adapter, params=params)])
        assert not isinstance(result, Failure), result
    after = style_count(core, tokenizer, adapter, "after")
    print(f"\nseed {seed}: {before} of 8 before, {after} of 8 after; loss", *np.round(curve, 2))
    core.unload_adapter(adapter)
    assert before == 0
    assert after >= 7


def reward(reply: str, answer: int) -> float:
    """1 for a finished reply whose last number is the right one."""
    numbers = re.findall(r"\d+", reply)
    return float(reply.endswith("<|im_end|>") and numbers[-1:] == [str(answer)])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_model_learns_to_add_from_reward_alone(
    core: EngineCore,
    tokenizer,  # type: ignore[no-untyped-def]
    seed: int,
) -> None:
    adapter, group = f"arithmetic-{seed}", 6
    assert core.create_adapter(adapter, EMBEDDED_MODEL, LoraConfig(rank=32, seed=seed)) is None
    generator = random.Random(seed)
    curve: list[float] = []
    while len(curve) < 15 and not (len(curve) > 3 and min(curve[-2:]) > 0.4):
        step = len(curve)
        assert core.freeze(adapter, f"{adapter}-{step}") is None
        sums = [(generator.randint(0, 9), generator.randint(0, 9)) for _ in range(16)]
        prompts = [prompt_of(tokenizer, f"What is {a} + {b}?") for a, b in sums]
        replies = sample(
            core,
            [
                SampleJob(
                    job_id=f"{adapter}-{step}-{index}",
                    base_model=EMBEDDED_MODEL,
                    weights_id=f"{adapter}-{step}",
                    prompt=ModelInput.from_ints(prompt),
                    params=SamplingParams(max_tokens=12, seed=seed * 10_000 + step * 100 + index),
                    num_samples=group,
                )
                for index, prompt in enumerate(prompts)
            ],
        )
        core.unload_sampler(f"{adapter}-{step}")
        data: list[Datum] = []
        rewards = []
        for prompt, (a, b), reply in zip(prompts, sums, replies, strict=True):
            texts = [tokenizer.decode(sequence.tokens) for sequence in reply.sequences]
            scores = np.array([reward(text, a + b) for text in texts])
            rewards.append(scores.mean())
            for sequence, advantage in zip(reply.sequences, scores - scores.mean(), strict=True):
                if advantage:
                    data.append(rollout(prompt, sequence, float(advantage)))
        curve.append(float(np.mean(rewards)))
        if data:
            train(core, Pass(adapter_id=adapter, data=data, loss_fn="importance_sampling"))
            (result,) = core.step([Step(adapter_id=adapter, params=AdamParams(learning_rate=3e-4))])
            assert not isinstance(result, Failure), result
    print(f"\nseed {seed}: mean reward by step", *np.round(curve, 2))
    core.unload_adapter(adapter)
    assert np.mean(curve[:2]) < 0.15
    assert min(curve[-2:]) > 0.4


def rollout(prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
    tokens = prompt + sequence.tokens
    context = [0.0] * (len(prompt) - 1)
    assert sequence.logprobs is not None
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": context + sequence.logprobs,
            "advantages": context + [advantage] * len(sequence.tokens),
        },
    )
