"""Supervised fine-tuning: passes and steps over a file of examples, with a way back.

The run's folder has `metrics.jsonl`, a line per step, `run.json`, which names the last
checkpoint, and at the end `loss.svg`. Resuming goes on with the optimizer's state and the order of
examples that an uninterrupted run would have had.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.cli.progress import Stage
from tinsmith.cli.training import conversation, plot, training_data
from tinsmith.cli.training.schedule import learning_rate
from tinsmith.cli.training.training_data import Example
from tinsmith.errors import TinkerError
from tinsmith.types import AdamParams

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.training import TrainingClient

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
PLOT_FILE = "loss.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What decides the result: a run can only be resumed with the plan it began with."""

    model: str
    rank: int
    learning_rate: float
    batch_size: int
    num_steps: int
    warm_up_steps: int
    seed: int
    num_examples: int
    examples_digest: str
    """Of what is trained on: another file, or another tokenizer, makes another run."""

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate(self.learning_rate, step, self.num_steps, self.warm_up_steps)


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    state_path: str | None = None
    sampler_path: str | None = None


def num_steps(num_examples: int, batch_size: int, epochs: float) -> int:
    return max(1, math.ceil(num_examples * epochs / batch_size))


def load_progress(folder: Path, plan: Plan) -> Progress:
    """Where the run in `folder` was; an error if it was another run."""
    try:
        saved = json.loads((folder / RUN_FILE).read_text("utf-8"))
    except FileNotFoundError:
        raise TinkerError(
            f"there is nothing to resume in {folder}: it has no {RUN_FILE}; omit --resume"
        ) from None
    before, now = saved["plan"], asdict(plan)
    changed = [f"{name} was {before.get(name)!r}" for name in now if before.get(name) != now[name]]
    if changed:
        raise TinkerError(
            f"the run in {folder} was another one ({', '.join(changed)}); "
            "use its settings, or another folder"
        )
    return Progress(**saved["progress"])


def save_progress(folder: Path, plan: Plan, progress: Progress) -> None:
    temporary = folder / f".{RUN_FILE}"
    text = json.dumps({"plan": asdict(plan), "progress": asdict(progress)}, indent=2)
    temporary.write_text(text + "\n", "utf-8")
    temporary.replace(folder / RUN_FILE)


def train(
    service: ServiceClient,
    plan: Plan,
    progress: Progress,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    folder: Path,
    *,
    save_every: int,
    eval_every: int,
    stage: Stage,
) -> None:
    """Run the plan from where `progress` is to its end."""
    training = _training_client(service, plan, progress)
    _drop_metrics_after(folder / METRICS_FILE, progress.step)
    batches = training_data.Batches(examples, plan.batch_size, plan.seed)
    started, num_tokens = time.monotonic(), 0
    while progress.step < plan.num_steps:
        step = progress.step
        chosen = batches.of_step(step)
        passed = training.forward_backward(
            [conversation.datum(each.tokens, each.weights) for each in chosen], "cross_entropy"
        )
        stepped = training.optim_step(AdamParams(learning_rate=plan.rate(step)))
        loss = passed.result().metrics["loss:sum"] / sum(each.num_learned for each in chosen)
        stepped.result()
        num_tokens += sum(len(each.tokens) for each in chosen)
        speed = num_tokens / (time.monotonic() - started)
        progress.step = step + 1
        is_last = progress.step == plan.num_steps
        line: dict[str, Any] = {
            "step": progress.step,
            "loss": loss,
            "learning_rate": plan.rate(step),
            "tokens_per_second": round(speed, 1),
        }
        if held_out and (is_last or progress.step % eval_every == 0):
            line["eval_loss"] = evaluate(training, held_out, plan.batch_size)
        with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if is_last or progress.step % save_every == 0:
            _save(training, plan, progress, folder, is_last=is_last)
        told = f"loss {loss:.3f}, {speed:.0f} tokens/s"
        if "eval_loss" in line:
            told += f", held-out loss {line['eval_loss']:.3f}"
        stage.update(progress.step, told)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics, of the steps before an interruption too."""
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text("utf-8").splitlines()]


def write_plot(folder: Path, metrics: Sequence[dict[str, Any]], title: str) -> None:
    curves = {
        name: [(line["step"], line[key]) for line in metrics if key in line]
        for name, key in (("training", "loss"), ("held out", "eval_loss"))
    }
    shown = {name: curve for name, curve in curves.items() if curve}
    (folder / PLOT_FILE).write_text(plot.svg(shown, title), "utf-8")


def evaluate(training: TrainingClient, held_out: Sequence[Example], batch_size: int) -> float:
    """Loss per token on examples that are not trained on."""
    futures = [
        training.forward(
            [
                conversation.datum(each.tokens, each.weights)
                for each in held_out[i : i + batch_size]
            ],
            "cross_entropy",
        )
        for i in range(0, len(held_out), batch_size)
    ]
    total = sum(future.result().metrics["loss:sum"] for future in futures)
    return total / sum(each.num_learned for each in held_out)


def _training_client(service: ServiceClient, plan: Plan, progress: Progress) -> TrainingClient:
    if progress.state_path is not None:
        return service.create_training_client_from_state_with_optimizer(progress.state_path)
    return service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)


def _save(
    training: TrainingClient, plan: Plan, progress: Progress, folder: Path, *, is_last: bool
) -> None:
    name = "final" if is_last else f"step-{progress.step:06d}"
    state = training.save_state(name, overwrite=True)
    sampler = training.save_weights_for_sampler(name) if is_last else None
    progress.state_path = state.result().path
    if sampler is not None:
        progress.sampler_path = sampler.result().path
    save_progress(folder, plan, progress)


def _drop_metrics_after(file: Path, step: int) -> None:
    """Steps after the last checkpoint are done again, and would be in the file twice."""
    if not file.exists():
        return
    lines = file.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    file.write_text("".join(kept), "utf-8")
