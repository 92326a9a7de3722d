"""`tinsmith demo`: a language model learns something on this machine, from nothing, in minutes."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.failures import CommandError, Interrupted, explained, is_disk_full
from tinsmith.cli.output import Output, with_output

if TYPE_CHECKING:
    from tinsmith.cli.progress import Progress, Stage
    from tinsmith.cli.server.background import BackgroundServer
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.training import TrainingClient

RANK = 32
BATCH = 8
LEARNING_RATE = 1e-3
_WARM_UP_STEPS = 5
_MODEL_BYTES = 750 * 1024**2
_RUN_BYTES = 300 * 1024**2
_NEEDED = ("torch", "transformers", "gguf", "safetensors", "starlette", "uvicorn", "sqlalchemy")

_SERVER_OPTIONS = ("--engine", "local", "--device", "cpu", "--set", "disk_patience_seconds=3")
"""A user is watching: a full disk is reported at once, not waited out."""


@dataclass
class Story:
    """What happened, for the closing page."""

    model: str
    questions: Sequence[str] = ()
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    run_id: str = ""
    sampler_path: str = ""
    state_path: str = ""
    seconds: float = 0.0


@click.command("demo")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the server keeps what it learns.  [default: the usual data folder, under 'demo']",
)
@click.option("--port", type=int, default=0, help="The server's port; 0 takes a free one.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--keep", is_flag=True, help="Leave the server up until Ctrl-C, to see the run in a browser."
)
@with_output
def command(
    output: Output, data_dir: Path | None, port: int, steps: int, seed: int, keep: bool
) -> None:
    """Fine-tune a small language model on this machine, and see what it learned.

    Fetches SmolLM2-135M-Instruct (93 MB, once), starts a server in the background, teaches the
    model to answer like a pirate, asks it the same questions before and after, saves a
    checkpoint, and stops the server, with --keep at Ctrl-C. Takes about a minute on two cores;
    needs no account.
    """
    from tinsmith.cli.progress import Progress

    _check_installed()
    from tinsmith.engine.local.config import default_cache_folder
    from tinsmith.server.config import default_data_dir

    cache, folder = default_cache_folder(), data_dir or default_data_dir() / "demo"
    _check_disk(cache, folder)
    progress = Progress(is_quiet=output.is_json)
    try:
        with explained():
            _run(output, folder, port, steps, seed, keep, progress)
    except CommandError as error:
        if is_disk_full(f"{error.message} {error.details}"):
            raise CommandError(
                f"no space is left on the disk in {folder} or {cache}; free some, or choose "
                "others with --data-dir and XDG_CACHE_HOME, and run the demo again"
            ) from error
        raise
    except KeyboardInterrupt:
        raise Interrupted(
            f"the demo was interrupted and its server is stopped; {command_name()} demo begins anew"
        ) from None


# --- the parts --------------------------------------------------------------------------------


def _check_installed() -> None:
    from tinsmith import extras

    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"the demo needs the server and the engine ({', '.join(missing)} not installed)",
            f"Install what is missing: {extras.install_line('all')}",
        )


def _check_disk(cache: Path, data_dir: Path) -> None:
    needs_model = not any(cache.glob("SmolLM2*/model.safetensors"))
    for folder, needed, advice in (
        (cache, _MODEL_BYTES if needs_model else 0, "set XDG_CACHE_HOME to a folder elsewhere"),
        (data_dir, _RUN_BYTES, "give a folder elsewhere with --data-dir"),
    ):
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        free = shutil.disk_usage(existing).free
        if free < needed:
            raise CommandError(
                f"the demo needs {needed / 1024**2:.0f} MB of disk in {folder}, which has "
                f"{free / 1024**2:.0f} MB; free some, or {advice}"
            )


def _run(
    output: Output, folder: Path, port: int, steps: int, seed: int, keep: bool, progress: Progress
) -> None:
    from tinsmith.cli.server import keyring
    from tinsmith.cli.server.background import serving
    from tinsmith.cli.training import embedded_model
    from tinsmith.server.config_sources import build_config
    from tinsmith.server.serving import FIRST_OWNER

    started = time.monotonic()
    model_folder = embedded_model.fetch(progress.stage("finding the model", total=1.0))
    config = build_config({"data_dir": folder})
    key, _ = keyring.create(config, FIRST_OWNER, "demo", "made by tinsmith demo")
    with ExitStack() as stack:
        with progress.stage("starting a server"):
            server = stack.enter_context(serving(folder, port=port, options=_SERVER_OPTIONS))
        story = _teach(server.url, key, model_folder, steps, seed, progress)
        story.seconds = time.monotonic() - started
        if keep:
            _tell(output, story, folder, key, server)
            _stay(server)
        with progress.stage("stopping the server"):
            stack.close()
    if not keep:
        _tell(output, story, folder, key, None)


def _stay(server: BackgroundServer) -> None:
    """Until Ctrl-C, which is how this is meant to end."""
    with suppress(KeyboardInterrupt):
        code = server.process.wait()
        raise CommandError(f"the demo's server ended by itself, with exit code {code}")


def _teach(
    url: str, key: str, model_folder: Path, steps: int, seed: int, progress: Progress
) -> Story:
    from tinsmith.cli.training.persona import QUESTIONS
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.tokenizers import load
    from tinsmith.engine.local.config import EMBEDDED_MODEL

    story = Story(EMBEDDED_MODEL, QUESTIONS)
    tokenizer = load(str(model_folder))
    with ServiceClient(base_url=url, api_key=key, display_name="tinsmith demo") as service:
        with progress.stage("asking the model as it is", total=len(QUESTIONS)) as stage:
            sampler = service.create_sampling_client(base_model=EMBEDDED_MODEL)
            story.before = _ask(sampler, tokenizer, QUESTIONS, stage)
        training = service.create_lora_training_client(
            EMBEDDED_MODEL,
            rank=RANK,
            seed=seed,
            user_metadata={"name": "pirate", "made_by": "tinsmith demo"},
        )
        story.run_id = training.model_id
        with progress.stage("training", total=steps) as stage:
            _train(training, tokenizer, steps, seed, stage, story)
        with progress.stage("saving a checkpoint"):
            saved = training.save_weights_for_sampler("pirate")
            state = training.save_state("pirate")
            story.sampler_path, story.state_path = saved.result().path, state.result().path
        with progress.stage("asking what it learned", total=len(QUESTIONS)) as stage:
            sampler = service.create_sampling_client(model_path=story.sampler_path)
            story.after = _ask(sampler, tokenizer, QUESTIONS, stage)
    return story


def _ask(
    sampler: SamplingClient, tokenizer: Any, questions: Sequence[str], stage: Stage
) -> list[str]:
    from tinsmith.cli.training import conversation
    from tinsmith.types import ModelInput, SamplingParams

    params = SamplingParams(max_tokens=40, temperature=0.0, stop=conversation.end_tokens(tokenizer))
    asked = [
        sampler.sample(
            ModelInput.from_ints(
                conversation.prompt_tokens(tokenizer, [{"role": "user", "content": question}])
            ),
            1,
            params,
        )
        for question in questions
    ]
    answers = []
    for number, future in enumerate(asked, 1):
        tokens = future.result().sequences[0].tokens
        answers.append(conversation.reply_text(tokenizer, tokens))
        stage.update(number, answers[-1].replace("\n", " ")[:40])
    return answers


def _train(
    training: TrainingClient, tokenizer: Any, steps: int, seed: int, stage: Stage, story: Story
) -> None:
    from tinsmith.cli.training import conversation
    from tinsmith.cli.training.persona import LESSONS
    from tinsmith.cli.training.schedule import learning_rate
    from tinsmith.types import AdamParams

    examples = [
        example for lesson in LESSONS for example in conversation.chat_examples(tokenizer, lesson)
    ]
    order = random.Random(seed)
    batch: list[conversation.Example] = []
    started = time.monotonic()
    num_tokens = 0
    for step in range(steps):
        if len(batch) < BATCH:
            batch = order.sample(examples, len(examples))
        now, batch = batch[:BATCH], batch[BATCH:]
        passed = training.forward_backward(
            [conversation.datum(each.tokens, each.weights) for each in now], "cross_entropy"
        )
        rate = learning_rate(LEARNING_RATE, step, steps, min(_WARM_UP_STEPS, max(1, steps // 4)))
        stepped = training.optim_step(AdamParams(learning_rate=rate))
        loss = passed.result().metrics["loss:sum"] / sum(each.num_learned for each in now)
        stepped.result()
        num_tokens += sum(len(each.tokens) for each in now)
        story.losses.append(loss)
        story.tokens_per_second = num_tokens / (time.monotonic() - started)
        stage.update(step + 1, f"loss {loss:.3f}, {story.tokens_per_second:.0f} tokens/s")


# --- the closing page -------------------------------------------------------------------------


def _tell(
    output: Output, story: Story, data_dir: Path, key: str, server: BackgroundServer | None
) -> None:
    """`server` is the one that stays up, if it does."""
    answers = [
        {"question": question, "before": before, "after": after}
        for question, before, after in zip(story.questions, story.before, story.after, strict=True)
    ]
    if output.is_json:
        output.show_json(
            {
                "model": story.model,
                "answers": answers,
                "losses": story.losses,
                "tokens_per_second": story.tokens_per_second,
                "checkpoint": story.state_path,
                "sampler_checkpoint": story.sampler_path,
                "data_dir": str(data_dir),
                "seconds": story.seconds,
                **({} if server is None else _addresses(story, key, server)),
            }
        )
        sys.stdout.flush()
        return
    from tinsmith.cli.training.plot import plot

    click.echo()
    click.echo(plot(story.losses, title=f"Loss per token over {len(story.losses)} steps"))
    click.echo()
    _show_answers(answers)
    click.echo(
        f"\n{story.model} learned this from 16 examples in {len(story.losses)} steps "
        f"({story.tokens_per_second:.0f} tokens/s); the whole demo took {story.seconds:.0f} s."
    )
    click.echo(f"Saved: {story.sampler_path}")
    click.echo("\nThree commands to try next:")
    for text, remark in _next_commands(story, data_dir, key, server):
        click.echo(f"\n  # {remark}\n  {text}")
    if server is not None:
        addresses = _addresses(story, key, server)
        click.echo("\nThe server stays up until Ctrl-C. To see the run in a browser, sign in with")
        click.echo(f"  {addresses['console_url']}\n(once, within 15 minutes), then open")
        click.echo(f"  {addresses['run_url']}")
        sys.stdout.flush()


def _addresses(story: Story, key: str, server: BackgroundServer) -> dict[str, str | None]:
    return {
        "base_url": server.url,
        "api_key": key,
        "console_url": server.console_url,
        "run_url": f"{server.url}/training_runs/{story.run_id}",
    }


def _next_commands(
    story: Story, data_dir: Path, key: str, server: BackgroundServer | None
) -> list[tuple[str, str]]:
    tinsmith = command_name()
    url = "http://127.0.0.1:8000" if server is None else server.url
    client = f"TINKER_BASE_URL={url} TINKER_API_KEY={key} {tinsmith}"
    first = (
        (f"{tinsmith} serve --data-dir {data_dir}", "the same server again, at port 8000")
        if server is None
        else (f"{client} run show {story.run_id}", "in a second terminal: how the loss fell")
    )
    return [
        first,
        (f"{client} chat {story.sampler_path}", "in a second terminal: talk to the pirate"),
        (f"{tinsmith} train sft --help", "train on conversations of your own"),
    ]


def _show_answers(answers: Sequence[dict[str, str]]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(show_lines=True)
        table.add_column("Question", style="bright_cyan")
        table.add_column("Before")
        table.add_column("After", style="green")
        for answer in answers:
            table.add_row(answer["question"], answer["before"], answer["after"])
        Console(emoji=False, markup=False).print(table)
        return
    for answer in answers:
        click.echo(answer["question"])
        for when in ("before", "after"):
            text = textwrap.shorten(answer[when], 300)
            click.echo(
                textwrap.fill(text, 96, initial_indent=f"  {when:<7} ", subsequent_indent=" " * 10)
            )


def command_name() -> str:
    """What to type to run this command again."""
    python = Path(sys.executable)
    script = python.with_name("tinsmith")
    found = shutil.which("tinsmith")
    if found is not None and script.exists() and Path(found).samefile(script):
        return "tinsmith"
    here = Path.cwd()
    short = {
        each: each.relative_to(here) if each.is_relative_to(here) else each
        for each in (python, script)
    }
    return str(short[script]) if script.exists() else f"{short[python]} -m tinsmith.cli"
