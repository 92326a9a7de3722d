"""Supervised fine-tuning: the replies of conversations become likelier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.cli.training import conversation, forms
from tinsmith.cli.training.conversation import Example
from tinsmith.cli.training.methods.base import Batch, Chart, Method, in_parts, prompt_of_example
from tinsmith.cli.training.records import Record
from tinsmith.cli.training.settings import SftSettings

if TYPE_CHECKING:
    from tinsmith.client.training import TrainingClient


class SupervisedFineTuning(Method[Example, SftSettings]):
    watched = "eval_loss"
    shown = ("loss", "eval_loss")
    charts = (Chart("Loss per token", {"training": "loss", "held out": "eval_loss"}),)

    def parse(self, record: Record) -> list[Example]:
        return forms.examples(record, self.world.tokenizer)

    def num_tokens(self, item: Example) -> int:
        return len(item.tokens)

    def batch(self, step: int, training: TrainingClient) -> Batch:
        chosen = self.of_step(step)
        return Batch(
            data=[conversation.datum(each.tokens, each.weights) for each in chosen],
            loss_fn="cross_entropy",
            loss_divisor=sum(each.num_learned for each in chosen),
        )

    def evaluate(self, training: TrainingClient) -> dict[str, float]:
        """Loss per token on examples that are not trained on."""
        futures = [
            training.forward(
                [conversation.datum(each.tokens, each.weights) for each in part], "cross_entropy"
            )
            for part in in_parts(self.held_out, self.settings.batch_size)
        ]
        total = sum(future.result().metrics["loss:sum"] for future in futures)
        return {"eval_loss": total / sum(each.num_learned for each in self.held_out)}

    def prompt_of(self, item: Example) -> list[int]:
        return prompt_of_example(item)


METHOD = SupervisedFineTuning
