"""How good a model's answers are: checks that each passes or fails, and what a judge thinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.cli.training import conversation, rewards
from tinsmith.cli.training.conversation import Tokenizer
from tinsmith.cli.training.forms import Prompt
from tinsmith.cli.training.rewards import Case
from tinsmith.errors import TinkerError
from tinsmith.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient

RUBRIC = "Is the answer correct?"


@dataclass(frozen=True, slots=True)
class Judge:
    """A model that is asked about answers; its opinion is how it divides its belief between Yes
    and No, so there is no reply to misread."""

    sampler: SamplingClient
    tokenizer: Tokenizer
    rubric: str = RUBRIC

    def opinions(self, cases: Sequence[Case]) -> list[float]:
        """The probability of Yes, for each."""
        verdicts = [conversation.encode(self.tokenizer, word) for word in ("Yes", "No")]
        asked = [self._question(case) for case in cases]
        futures = [
            [
                self.sampler.compute_logprobs(ModelInput.from_ints(question + verdict))
                for verdict in verdicts
            ]
            for question in asked
        ]
        opinions = []
        for question, pair in zip(asked, futures, strict=True):
            yes, no = (sum(map(float, f.result()[len(question) :])) for f in pair)  # type: ignore[arg-type]  # only the first token has none
            opinions.append(1 / (1 + math.exp(min(no - yes, 700.0))))
        return opinions

    def _question(self, case: Case) -> list[int]:
        expected = case.record.get("answer")
        parts = [f"Question:\n{case.prompt}"]
        parts += [f"Expected answer:\n{expected}"] if expected is not None else []
        parts += [f"Answer:\n{case.answer}", f"{self.rubric} Reply with Yes or No alone."]
        text = "\n\n".join(parts)
        try:
            return conversation.prompt_tokens(self.tokenizer, [{"role": "user", "content": text}])
        except TinkerError:  # it has no chat template
            return conversation.text_tokens(self.tokenizer, f"{text}\n\nVerdict: ")


def answers(
    sampler: SamplingClient, tokenizer: Tokenizer, prompts: Sequence[Prompt], params: SamplingParams
) -> list[Case]:
    """The model's answer to each prompt; all are under way at once."""
    futures = [sampler.sample(ModelInput.from_ints(each.tokens), 1, params) for each in prompts]
    return [
        Case(
            each.text,
            conversation.reply_text(tokenizer, future.result().sequences[0].tokens),
            each.fields,
        )
        for each, future in zip(prompts, futures, strict=True)
    ]


def scores(
    cases: Sequence[Case], checks: Sequence[str], judge: Judge | None
) -> dict[str, list[float]]:
    """By check, and for "judge", a number from 0 to 1 for each case."""
    found = {}
    for text in checks:
        passes = rewards.check(text)
        found[text] = [float(passes(case)) for case in cases]
    if judge is not None:
        found["judge"] = judge.opinions(cases)
    return found


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard error of it.

    >>> mean_and_error([1.0, 0.0, 1.0, 0.0])
    (0.5, 0.25)
    """
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return mean, math.sqrt(variance / len(values))
