"""On-policy distillation: the model answers, and a teacher says of each token how likely it is.

A token's advantage is how much likelier the teacher finds it than the model does, compared with the
mean of the step: the reverse Kullback-Leibler divergence, token by token, negated. The teacher may
see a system prompt that the model does not: then what it asks for moves into the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinsmith.cli.training import conversation
from tinsmith.cli.training.forms import Prompt
from tinsmith.cli.training.methods.base import Batch, Chart, World
from tinsmith.cli.training.methods.rollouts import Answer, SampledMethod, datum
from tinsmith.cli.training.settings import DistillSettings
from tinsmith.errors import ValidationError
from tinsmith.types import ModelInput

if TYPE_CHECKING:
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.training import TrainingClient


class Distillation(SampledMethod[DistillSettings]):
    watched = "eval_kl"
    shown = ("kl", "answer_tokens", "eval_kl")
    charts = (Chart("Divergence from the teacher", {"training": "kl", "held out": "eval_kl"}),)

    def __init__(self, settings: DistillSettings, world: World) -> None:
        if settings.teacher is None and settings.teacher_system is None:
            raise ValidationError(
                "needs a teacher: another model (--teacher), or the model itself with a system "
                "prompt that only the teacher sees (--teacher-system)"
            )
        super().__init__(settings, world)
        self._teacher = _teacher(settings, world)

    def batch(self, step: int, training: TrainingClient) -> Batch:
        prompts = self.of_step(step)
        asked = [each for each in prompts for _ in range(self.settings.group_size)]
        sampler = training.save_weights_and_get_sampling_client()
        groups = self.answers(sampler, prompts, self.settings.group_size, step)
        answers = [answer for group in groups for answer in group]
        differences = self._differences(asked, answers)
        mean, weight = _mean(differences), self.settings.kl_coefficient
        # The mean changes the gradient's noise, not its direction: without it, every token that
        # was sampled is pushed down, for the teacher likes most of them less than the model does.
        data = [
            datum(prompt, answer, [weight * (mean - each) for each in difference])
            for prompt, answer, difference in zip(asked, answers, differences, strict=True)
            if answer.tokens
        ]
        lengths = [len(answer.tokens) for answer in answers]
        return Batch(
            data=data,
            loss_fn=self.settings.loss,  # type: ignore[arg-type]  # the option's choices
            num_passes=self.settings.passes,
            metrics={"kl": mean, "answer_tokens": sum(lengths) / len(lengths)},
        )

    def evaluate(self, training: TrainingClient) -> dict[str, float]:
        sampler = training.save_weights_and_get_sampling_client()
        groups = self.answers(sampler, self.held_out, 1, "evaluation")
        answers = [answer for group in groups for answer in group]
        return {"eval_kl": _mean(self._differences(self.held_out, answers))}

    def _differences(
        self, prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> list[list[float]]:
        """Of each token: its log-probability for the model less that for the teacher."""
        seen = [self._seen_by_teacher(prompt) for prompt in prompts]
        futures = [
            self._teacher.compute_logprobs(ModelInput.from_ints(before + answer.tokens))
            for before, answer in zip(seen, answers, strict=True)
        ]
        return [
            [
                ours - (theirs or 0.0)
                for ours, theirs in zip(
                    answer.logprobs, future.result()[len(before) :], strict=True
                )
            ]
            for before, answer, future in zip(seen, answers, futures, strict=True)
        ]

    def _seen_by_teacher(self, prompt: Prompt) -> list[int]:
        if self.settings.teacher_system is None:
            return prompt.tokens
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        system = {"role": "system", "content": self.settings.teacher_system}
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return conversation.prompt_tokens(self.world.tokenizer, [system, *rest])


def _teacher(settings: DistillSettings, world: World) -> SamplingClient:
    from tinsmith.cli.sampling.options import sampler

    teacher = sampler(world.service, settings.teacher or world.model)
    base = teacher.get_base_model()
    if base != world.model:
        _check_same_tokens(base, world)
    return teacher


def _check_same_tokens(base: str, world: World) -> None:
    """A teacher reads the model's tokens as they are, so it must know them by the same numbers."""
    from tinsmith.cli.sampling.tokenizer import load_tokenizer

    theirs = load_tokenizer(world.service, base)
    if theirs.get_vocab() != world.tokenizer.get_vocab():
        raise ValidationError(
            f"the teacher {base!r} has another tokenizer than {world.model!r}; choose one of the "
            "same family",
            "teacher",
        )


def _mean(differences: Sequence[Sequence[float]]) -> float:
    flat = [each for difference in differences for each in difference]
    return sum(flat) / max(len(flat), 1)


METHOD = Distillation
