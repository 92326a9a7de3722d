"""Direct preference optimization: of two answers, the chosen one becomes the likelier.

The loss of a pair is −log σ(m), where the margin m = β·(gain of the chosen answer − gain of the
rejected one), and a gain is how much likelier an answer has become since the run began. Its
gradient by an answer's log-probability is ∓β·σ(−m), the same for each of its tokens: so one pass
asks for the log-probabilities, and a second has that number as the weight of a cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinsmith.cli.training import conversation, forms
from tinsmith.cli.training.conversation import Example
from tinsmith.cli.training.forms import Pair
from tinsmith.cli.training.methods.base import Batch, Chart, Method, in_parts, prompt_of_example
from tinsmith.cli.training.records import Record
from tinsmith.cli.training.settings import DpoSettings
from tinsmith.types import ModelInput

if TYPE_CHECKING:
    from tinsmith.client.training import TrainingClient


class PreferenceOptimization(Method[Pair, DpoSettings]):
    watched = "eval_loss"
    shown = ("loss", "margin", "accuracy", "eval_margin")
    charts = (
        Chart("Margin of the chosen answer", {"training": "margin", "held out": "eval_margin"}),
        Chart("Loss per pair", {"training": "loss", "held out": "eval_loss"}),
    )

    def parse(self, record: Record) -> list[Pair]:
        return [forms.pair(record, self.world.tokenizer)]

    def num_tokens(self, item: Pair) -> int:
        return max(len(item.chosen.tokens), len(item.rejected.tokens))

    def batch(self, step: int, training: TrainingClient) -> Batch:
        chosen = self.of_step(step)
        margins = self._margins(training, chosen)
        data = []
        for pair, margin in zip(chosen, margins, strict=True):
            pull = self.settings.beta * _sigmoid(-margin) / len(chosen)
            for answer, weight in ((pair.chosen, pull), (pair.rejected, -pull)):
                weights = [weight * each for each in answer.weights]
                data.append(conversation.datum(answer.tokens, weights))
        return Batch(data=data, loss_fn="cross_entropy", metrics=_summary(margins))

    def evaluate(self, training: TrainingClient) -> dict[str, float]:
        margins = [
            margin
            for part in in_parts(self.held_out, self.settings.batch_size)
            for margin in self._margins(training, part)
        ]
        return {f"eval_{name}": value for name, value in _summary(margins).items()}

    def prompt_of(self, item: Pair) -> list[int]:
        return prompt_of_example(item.chosen)

    def _margins(self, training: TrainingClient, pairs: Sequence[Pair]) -> list[float]:
        answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
        passed = training.forward(
            [conversation.datum(each.tokens, each.weights) for each in answers], "cross_entropy"
        )
        before = self._start_logprobs(answers)
        gains = []
        for answer, output, start in zip(
            answers, passed.result().loss_fn_outputs, before, strict=True
        ):
            now = output["logprobs"].to_numpy()
            gains.append(_weighted(now.tolist(), answer) - start)
        return [self.settings.beta * (gains[i] - gains[i + 1]) for i in range(0, len(gains), 2)]

    def _start_logprobs(self, answers: Sequence[Example]) -> list[float]:
        """Of each answer, in the weights that the run began with."""
        sampler = self.world.start_sampler()
        futures = [sampler.compute_logprobs(ModelInput.from_ints(each.tokens)) for each in answers]
        return [
            _weighted([value or 0.0 for value in future.result()[1:]], answer)
            for future, answer in zip(futures, answers, strict=True)
        ]


def _weighted(logprobs: Sequence[float], answer: Example) -> float:
    """The log-probability of the answer after its prompt."""
    return sum(
        value * weight for value, weight in zip(logprobs, answer.weights[1:], strict=True) if weight
    )


def _summary(margins: Sequence[float]) -> dict[str, float]:
    return {
        "loss": sum(-math.log(max(_sigmoid(each), 1e-300)) for each in margins) / len(margins),
        "margin": sum(margins) / len(margins),
        "accuracy": sum(each > 0 for each in margins) / len(margins),
    }


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


METHOD = PreferenceOptimization
