"""`tinsmith train`: training without code."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.failures import CommandError, Interrupted
from tinsmith.cli.output import Output, Table, with_output
from tinsmith.cli.training import METHOD_NAMES

if TYPE_CHECKING:
    from tinsmith.cli.training.methods import Method
    from tinsmith.cli.training.run_folder import Progress, RunFolder
    from tinsmith.cli.training.settings import Settings
    from tinsmith.client.service import ServiceClient


class _Methods(click.Group):
    """A command for each method, with its settings as options; made when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(METHOD_NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _method_command(cmd_name) if cmd_name in METHOD_NAMES else None


@click.group("train", cls=_Methods, invoke_without_command=True)
@click.option(
    "--resume",
    "run_folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Continue the run in this folder, with the settings stored there.",
)
@with_output
def command(output: Output, run_folder: Path | None) -> None:
    """Train a model on a server.

    Each method takes a file of data, or a TOML file of settings, which options override. The run's
    folder has everything: `tinsmith train --resume FOLDER` goes on after an interruption as if
    there had been none.
    """
    context = click.get_current_context()
    if run_folder is None:
        if context.invoked_subcommand is None:
            click.echo(context.get_help())
        return
    if context.invoked_subcommand is not None:
        raise CommandError(
            f"omit {context.invoked_subcommand}: with --resume the run's file says what it is"
        )
    from tinsmith.cli.training.run_folder import RunFolder

    _run(output, RunFolder.open(run_folder))


_ABOUTS = {
    "sft": """Fine-tune on conversations or texts.

    \b
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}
    {"text": "…"}
    ShareGPT's "conversations", Alpaca's "instruction", "input" and "output"

    Conversations go through the model's chat template, and only what the assistant says is
    learned; prompts and completions are taken as they are. `tinsmith data preview` shows what
    will be learned.""",
    "dpo": """Learn which of two answers is the better (direct preference optimization).

    \b
    {"prompt": "…", "chosen": "…", "rejected": "…"}

    Texts are taken as they are, lists of messages go through the model's chat template.""",
    "rl": """Learn from a reward for the model's own answers (policy gradient with groups).

    \b
    {"prompt": "…", "answer": "…"}

    A prompt is a text, or a list of messages. The reward is a Python function
    (--reward file.py:function, called with an answer and its record), a URL, or the share of
    checks that an answer passes (--check contains --check length:1..200).""",
    "distill": """Learn from a teacher's view of the model's own answers (on-policy distillation).

    \b
    {"prompt": "…"}

    A prompt is a text, or a list of messages. The teacher is another model of the same tokenizer
    or a checkpoint, or the model itself with a system prompt (--teacher-system), which thereby
    moves into the weights.""",
}


def _method_command(method: str) -> click.Command:
    from tinsmith.cli.training import settings as run_settings

    @click.argument("source", metavar="[DATA | CONFIG.toml]", required=False)
    @run_settings.with_settings(run_settings.METHODS[method])
    @with_output
    def train(output: Output, /, source: str | None, **options: Any) -> None:
        _run(output, _new_run(method, source, options))

    return click.command(method, help=_ABOUTS[method])(train)


def _new_run(method: str, source: str | None, options: dict[str, Any]) -> RunFolder:
    """A folder for a run that has not begun."""
    from tinsmith.cli.training import settings as run_settings
    from tinsmith.cli.training.run_folder import RUN_FILE, RunFolder

    is_file = source is not None and source.endswith(".toml")
    if source is not None and not is_file:
        if options["data"] is not None:
            raise CommandError("Give the data once: as an argument, or as --data")
        options = {**options, "data": source}
    file = Path(source) if source is not None and is_file else None
    settings = run_settings.build(run_settings.METHODS[method], file, options)
    if not settings.data:
        raise CommandError("Give data to train on: a file, or the name of a data set")
    path = _folder_of(method, settings)
    if path.is_file():
        raise CommandError(f"{path} is a file", "Choose a folder (--output).")
    if (path / RUN_FILE).exists():
        raise CommandError(
            f"{path} has a run in it",
            f"Go on with it (tinsmith train --resume {path}), or choose another folder (--output).",
        )
    located: dict[str, Any] = {
        name: str(Path(value).absolute())
        for name in run_settings.path_names(settings)
        if (value := getattr(settings, name)) and Path(value.partition(":")[0]).exists()
    }
    settings = replace(settings, name=settings.name or path.name, **located)
    return RunFolder(path, method, settings, digest="")


def _folder_of(method: str, settings: Settings) -> Path:
    if settings.output is not None:
        return Path(settings.output)
    data = Path(settings.data)
    beside = data.parent if data.exists() else Path()
    return beside / (settings.name or f"{data.stem.partition(':')[0]}-{method}")


def _run(output: Output, folder: RunFolder) -> None:
    from tinsmith.cli.training import interruption, trackers
    from tinsmith.cli.training.display import showing
    from tinsmith.cli.training.loop import Loop, Stopped
    from tinsmith.cli.training.models import known_model
    from tinsmith.client.service import ServiceClient
    from tinsmith.errors import TinkerError

    go_on = f"Go on with: tinsmith train --resume {folder.path}"
    with ServiceClient(user_metadata={"made_by": f"tinsmith train {folder.method}"}) as service:
        model = known_model(service, folder.settings.model)
        method, folder = _prepared(output, service, model, folder)
        logs = trackers.build(folder)
        try:
            with (
                showing(
                    method.shown, method.charts[0], folder.metrics(), is_quiet=output.is_json
                ) as display,
                interruption.noticed(
                    lambda: display.note("ending after this step; Ctrl-C again ends at once")
                ) as wanted,
            ):
                progress = Loop(service, model, folder, display, logs, wanted).run(method)
        except (Stopped, KeyboardInterrupt):
            done = folder.progress().step
            raise Interrupted(f"interrupted; saved after step {done}", go_on) from None
        except TinkerError:
            output.note(f"the run is saved after step {folder.progress().step}. {go_on}")
            raise
        finally:
            trackers.close(logs)
    _tell(output, method, folder, model, progress)


def _prepared(
    output: Output, service: ServiceClient, model: str, folder: RunFolder
) -> tuple[Method[Any, Any], RunFolder]:
    """The method with its data, and the folder that knows which data they are."""
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training import methods, records
    from tinsmith.cli.training.checkpoints import Start

    # A file that is not there is said at once: looking for a tokenizer may take minutes.
    next(records.read(folder.settings.data), None)
    tokenizer = load_tokenizer(service, model, folder.settings.tokenizer)
    world = methods.World(service, model, tokenizer, Start(service, model, folder).sampler)
    method = methods.find(folder.method)(folder.settings, world)
    if method.num_left_out:
        output.note(
            f"{method.num_left_out} examples of over {folder.settings.max_length} tokens are left "
            "out (--max-length)"
        )
    if folder.digest not in ("", method.digest):
        raise CommandError(
            f"the data of the run in {folder.path} has changed since it began: "
            f"{folder.settings.data}",
            "Put back what it was, or begin another run with --from "
            f"{folder.progress().state_path or 'a checkpoint'}.",
        )
    return method, replace(folder, digest=method.digest)


def _tell(
    output: Output, method: Method[Any, Any], folder: RunFolder, model: str, progress: Progress
) -> None:
    """What came of it: a report in the folder, and its facts."""
    from tinsmith.cli.training import report
    from tinsmith.cli.training.plot import plot, thinned

    metrics = folder.metrics()
    last = {name: value for line in metrics for name, value in line.items()}
    best = progress.best
    facts = {
        "method": folder.method,
        "model": model,
        "examples": len(method.items),
        "held_out": len(method.held_out),
        "left_out": method.num_left_out,
        "steps": progress.step,
        **{name: last[name] for name in method.shown if name in last},
        "checkpoint": progress.state_path,
        "sampler_checkpoint": progress.sampler_path,
        "best_checkpoint": best and best.path,
        "best_step": best and best.step,
        "folder": str(folder.path),
        "report": str(folder.path / report.HTML_FILE),
    }
    report.Report(folder, method.charts, facts).write()
    if not (output.is_json or sys.stderr.isatty()):  # a terminal has seen the curve grow
        chart = method.charts[0]
        key = next(iter(chart.curves.values()))
        values = [line[key] for line in metrics if key in line]
        click.echo(plot(thinned(values), title=chart.title))
    rows = [[name, report.shown(value)] for name, value in facts.items() if value is not None]
    output.show(facts, Table(["Property", "Value"], rows))
    for text, remark in report.going_on(facts):
        output.note(f"\n  # {remark}\n  {text}")
