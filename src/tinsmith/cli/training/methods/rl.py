"""Reinforcement learning from a reward, with groups: GRPO without its division by the spread.

Each prompt gets several answers. An answer's advantage, on each of its tokens, is its reward less
the mean of its group; a group of equal rewards teaches nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinsmith.cli.training import rewards
from tinsmith.cli.training.forms import Prompt
from tinsmith.cli.training.methods.base import Batch, Chart, World
from tinsmith.cli.training.methods.rollouts import Answer, SampledMethod, datum
from tinsmith.cli.training.settings import RlSettings

if TYPE_CHECKING:
    from tinsmith.client.training import TrainingClient


class ReinforcementLearning(SampledMethod[RlSettings]):
    watched = "eval_reward"
    is_higher_better = True
    shown = ("reward", "answer_tokens", "eval_reward")
    charts = (
        Chart("Mean reward", {"training": "reward", "held out": "eval_reward"}),
        Chart("Tokens in an answer", {"training": "answer_tokens"}),
    )

    def __init__(self, settings: RlSettings, world: World) -> None:
        self._reward = rewards.build(settings.reward, settings.check)
        super().__init__(settings, world)

    def batch(self, step: int, training: TrainingClient) -> Batch:
        prompts = self.of_step(step)
        sampler = training.save_weights_and_get_sampling_client()
        groups = self.answers(sampler, prompts, self.settings.group_size, step)
        scored = self._scores(prompts, groups)
        data = []
        for prompt, group, scores in zip(prompts, groups, scored, strict=True):
            mean = sum(scores) / len(scores)
            for answer, score in zip(group, scores, strict=True):
                if score != mean and answer.tokens:
                    data.append(datum(prompt, answer, [score - mean] * len(answer.tokens)))
        flat = [score for scores in scored for score in scores]
        lengths = [len(answer.tokens) for group in groups for answer in group]
        return Batch(
            data=data,
            loss_fn=self.settings.loss,  # type: ignore[arg-type]  # the option's choices
            num_passes=self.settings.passes,
            metrics={
                "reward": sum(flat) / len(flat),
                "answer_tokens": sum(lengths) / len(lengths),
                "equal_groups": sum(len(set(scores)) == 1 for scores in scored) / len(scored),
            },
        )

    def evaluate(self, training: TrainingClient) -> dict[str, float]:
        """The mean reward of one answer to each prompt that is not trained on."""
        sampler = training.save_weights_and_get_sampling_client()
        groups = self.answers(sampler, self.held_out, 1, "evaluation")
        flat = [score for scores in self._scores(self.held_out, groups) for score in scores]
        return {"eval_reward": sum(flat) / len(flat)}

    def _scores(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Answer]]
    ) -> list[list[float]]:
        asked = [
            rewards.Case(prompt.text, answer.text, prompt.fields)
            for prompt, group in zip(prompts, groups, strict=True)
            for answer in group
        ]
        scores = iter(self._reward(asked))
        return [[next(scores) for _ in group] for group in groups]


METHOD = ReinforcementLearning
