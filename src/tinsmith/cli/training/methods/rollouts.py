"""Answers that the model itself gives: what reinforcement learning and distillation begin with.

Seeds come from the run's, the step and the prompt's place, so that a step that is done again has
the same answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tinsmith.cli.training import conversation, forms
from tinsmith.cli.training.forms import Prompt
from tinsmith.cli.training.methods.base import Method
from tinsmith.cli.training.records import Record
from tinsmith.cli.training.settings import SampledSettings
from tinsmith.types import (
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SamplingParams,
)

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient

S = TypeVar("S", bound=SampledSettings)


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    """As they were when the answer was sampled."""
    text: str
    sequence_id: str | None = None
    """What the service calls it."""


class SampledMethod(Method[Prompt, S]):
    """A method that learns from answers to prompts."""

    def parse(self, record: Record) -> list[Prompt]:
        return [forms.prompt(record, self.world.tokenizer, self.settings.system)]

    def num_tokens(self, item: Prompt) -> int:
        return len(item.tokens) + self.settings.max_tokens

    def prompt_of(self, item: Prompt) -> list[int]:
        return item.tokens

    def answers(
        self, sampler: SamplingClient, prompts: Sequence[Prompt], num_answers: int, step: int | str
    ) -> list[list[Answer]]:
        """Answers to each prompt; all are under way at once."""
        futures = [
            sampler.sample(
                ModelInput.from_ints(prompt.tokens),
                num_answers,
                SamplingParams(
                    max_tokens=self.settings.max_tokens,
                    temperature=self.settings.temperature,
                    stop=conversation.end_tokens(self.world.tokenizer) or None,
                    seed=_seed(self.settings.seed, step, number),
                ),
            )
            for number, prompt in enumerate(prompts)
        ]
        return [
            [
                Answer(
                    list(each.tokens),
                    list(each.logprobs or []),
                    conversation.reply_text(self.world.tokenizer, each.tokens),
                    each.sequence_id,
                )
                for each in future.result().sequences
            ]
            for future in futures
        ]


def datum(prompt: Prompt, answer: Answer, advantages: Sequence[float]) -> Datum:
    """A sampled answer to learn from; the prompt has no part in the gradient."""
    tokens = prompt.tokens + answer.tokens
    nothing = [0.0] * (len(prompt.tokens) - 1)
    learned = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": nothing + answer.logprobs,
            "advantages": nothing + list(advantages),
        },
    )
    name, num_prompt, num_sampled = answer.sequence_id, len(prompt.tokens), len(answer.tokens)
    if name is None or not answer.tokens:
        return learned
    # With this a service can send tokens to the experts that they went to when they were sampled.
    return learned.with_provenance(
        [
            PromptProvenanceSpan(sequence_id=name, length=num_prompt),
            SampledProvenanceSpan(sequence_id=name, length=num_sampled - 1),
        ],
        [
            PromptProvenanceSpan(sequence_id=name, offset=1, length=num_prompt - 1),
            SampledProvenanceSpan(sequence_id=name, length=num_sampled),
        ],
    )


def _seed(seed: int, step: int | str, number: int) -> int:
    content = hashlib.sha256(f"{seed} {step} {number}".encode()).digest()
    return int.from_bytes(content[:4]) >> 1
