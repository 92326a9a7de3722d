"""`tinsmith train`: training from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, with_output

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient


_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.group("train")
def command() -> None:
    """Train a model on a server."""


@command.command("sft")
@click.argument("data", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--model", help="Base model.  [default: the server's, if it has one only]")
@click.option("--rank", type=click.IntRange(1), default=32, show_default=True)
@click.option("--learning-rate", type=_POSITIVE, default=2e-4, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True)
@click.option("--epochs", type=_POSITIVE, default=3.0, show_default=True)
@click.option("--steps", type=click.IntRange(1), help="Steps, whatever --epochs says.")
@click.option(
    "--max-length",
    type=click.IntRange(2),
    default=2048,
    show_default=True,
    help="Longer examples, in tokens, are left out.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 0.9),
    default=0.1,
    show_default=True,
    help="Part of the examples that is only evaluated on.",
)
@click.option("--save-every", type=click.IntRange(1), default=50, show_default=True)
@click.option("--eval-every", type=click.IntRange(1), default=20, show_default=True)
@click.option(
    "--output",
    "-o",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for metrics, plot and progress.  [default: the data file's name without .jsonl]",
)
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--tokenizer", "tokenizer_source", help="A folder or hub name of another tokenizer.")
@with_output
def sft(
    output: Output,
    data: Path,
    model: str | None,
    rank: int,
    learning_rate: float,
    batch_size: int,
    epochs: float,
    steps: int | None,
    max_length: int,
    held_out: float,
    save_every: int,
    eval_every: int,
    folder: Path | None,
    resume: bool,
    seed: int,
    tokenizer_source: str | None,
) -> None:
    """Fine-tune on DATA, a file of JSON lines or a JSON array.

    \b
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}

    Conversations go through the model's chat template, and only what the assistant says is
    learned; prompts and completions are taken as they are. Progress is saved as checkpoints on
    the server; --resume goes on after an interruption as if there had been none.
    """
    from tinsmith.cli.progress import Progress
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training import supervised, training_data
    from tinsmith.client.service import ServiceClient

    folder = folder or _folder_beside(data)
    if (folder / supervised.RUN_FILE).exists() and not resume:
        raise CommandError(
            f"{folder} has a run in it",
            "Go on with it (--resume), or choose another folder (--output).",
        )
    with ServiceClient(user_metadata={"made_by": "tinsmith train sft"}) as service:
        model = _known_model(service, model)
        tokenizer = load_tokenizer(service, model, tokenizer_source)
        everything, num_too_long = training_data.read(data, tokenizer, max_length)
        if num_too_long:
            output.note(f"{num_too_long} examples of over {max_length} tokens are left out")
        examples, evaluated = training_data.split(everything, held_out, seed)
        num_steps = steps or supervised.num_steps(len(examples), batch_size, epochs)
        plan = supervised.Plan(
            model=model,
            rank=rank,
            learning_rate=learning_rate,
            batch_size=batch_size,
            num_steps=num_steps,
            warm_up_steps=min(10, max(1, num_steps // 10)),
            seed=seed,
            num_examples=len(examples),
            examples_digest=training_data.digest(examples),
        )
        state = supervised.load_progress(folder, plan) if resume else supervised.Progress()
        folder.mkdir(parents=True, exist_ok=True)
        with Progress(is_quiet=output.is_json).stage("training", total=num_steps) as stage:
            supervised.train(
                service,
                plan,
                state,
                examples,
                evaluated,
                folder,
                save_every=save_every,
                eval_every=eval_every,
                stage=stage,
            )
    metrics = supervised.read_metrics(folder)
    supervised.write_plot(folder, metrics, f"Loss per token, {data.name}")
    if not output.is_json:
        from tinsmith.cli.training.plot import plot

        click.echo(plot(_thinned([line["loss"] for line in metrics]), title="Loss per token"))
    last = metrics[-1]
    facts = {
        "model": model,
        "examples": len(examples),
        "held_out": len(evaluated),
        "left_out": num_too_long,
        "steps": state.step,
        "loss": last["loss"],
        "eval_loss": last.get("eval_loss"),
        "checkpoint": state.state_path,
        "sampler_checkpoint": state.sampler_path,
        "metrics": str(folder / supervised.METRICS_FILE),
        "plot": str(folder / supervised.PLOT_FILE),
    }
    rows = [
        [name, f"{value:.4f}" if isinstance(value, float) else str(value)]
        for name, value in facts.items()
        if value is not None
    ]
    output.show(facts, Table(["Property", "Value"], rows))


def _folder_beside(data: Path) -> Path:
    named = data.with_suffix("")
    return data.with_name(f"{data.name}-run") if named == data else named


def _known_model(service: ServiceClient, name: str | None) -> str:
    """The model of that name, or the only one; asked before its tokenizer is looked for."""
    known = [
        each.model_name
        for each in service.get_server_capabilities().supported_models
        if each.trainable is not False and each.model_name
    ]
    if name is None and len(known) == 1:
        return known[0]
    if name is None:
        raise CommandError("Say which model to train: --model", f"Known: {', '.join(known)}")
    if name not in known:
        raise CommandError(
            f"The server cannot train a model called {name!r}", f"Known: {', '.join(known)}"
        )
    return name


def _thinned(values: list[float], most: int = 72) -> list[float]:
    """Averages of neighbours, so that a long curve fits a line of the terminal."""
    size = -(-len(values) // most)
    pieces = [values[i : i + size] for i in range(0, len(values), size)]
    return [sum(piece) / len(piece) for piece in pieces]
