"""`tinsmith eval`: how good a model's answers are."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, Table, with_output
from tinsmith.cli.sampling.options import sampler

if TYPE_CHECKING:
    from tinsmith.cli.training.evaluation import Judge
    from tinsmith.client.service import ServiceClient


@click.command("eval")
@click.argument("model")
@click.argument("data")
@click.option(
    "--check",
    "checks",
    multiple=True,
    help="exact, contains:TEXT, regex:PATTERN, length:MIN..MAX or json; repeatable.",
)
@click.option("--judge", "judge_model", help="A model that is asked about each answer.")
@click.option("--rubric", help="What the judge is asked.  [default: Is the answer correct?]")
@click.option("--system", help="A system prompt before every prompt.")
@click.option("--limit", type=click.IntRange(1), help="Use at most this many prompts.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--tokenizer", "tokenizer_source", help="A folder or hub name of another tokenizer.")
@click.option(
    "--output",
    "-o",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file for the answers and their scores, as JSON lines.",
)
@with_output
def command(
    output: Output,
    model: str,
    data: str,
    checks: tuple[str, ...],
    judge_model: str | None,
    rubric: str | None,
    system: str | None,
    limit: int | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    tokenizer_source: str | None,
    file: Path | None,
) -> None:
    """Let MODEL answer the prompts of DATA, and score the answers.

    \b
    {"prompt": "2 + 2 =", "answer": "4"}

    MODEL is a base model's name or a tinker:// path of sampler weights. A check without a text
    looks for the record's answer. A judge is another model, or the same, that says how likely its
    answer to the rubric is Yes.
    """
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training import conversation, evaluation, forms, records, rewards
    from tinsmith.client.service import ServiceClient
    from tinsmith.types import SamplingParams

    if not checks and judge_model is None:
        raise CommandError("Say how answers are scored: --check, or --judge with a model")
    if rubric is not None and judge_model is None:
        raise CommandError("--rubric needs --judge: only a judge reads it")
    for check in checks:
        rewards.check(check)
    with ServiceClient() as service:
        client = sampler(service, model)
        tokenizer = load_tokenizer(service, client.get_base_model(), tokenizer_source)
        found = [
            forms.prompt(each, tokenizer, system) for each in islice(records.read(data), limit)
        ]
        if not found:
            raise CommandError(f"there is no prompt in {data}")
        ends = conversation.end_tokens(tokenizer) or None
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop=ends
        )
        cases = evaluation.answers(client, tokenizer, found, params)
        judge = None
        if judge_model is not None:
            judge = _judge(service, judge_model, rubric, tokenizer_source)
        scores = evaluation.scores(cases, checks, judge)
    if file is not None:
        lines = [
            {**asdict(case), "scores": {name: values[i] for name, values in scores.items()}}
            for i, case in enumerate(cases)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        file.write_text(text, "utf-8")
    summary = {name: evaluation.mean_and_error(values) for name, values in scores.items()}
    facts = {
        "model": model,
        "prompts": len(cases),
        "scores": {
            name: {"mean": mean, "standard_error": error} for name, (mean, error) in summary.items()
        },
        "answers": None if file is None else str(file),
    }
    rows = [[name, f"{mean:.3f}", f"{error:.3f}"] for name, (mean, error) in summary.items()]
    title = f"{len(cases)} answers of {model}"
    output.show(facts, Table(["Score", "Mean", "Standard error"], rows, title))


def _judge(
    service: ServiceClient, model: str, rubric: str | None, tokenizer_source: str | None
) -> Judge:
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training import evaluation

    client = sampler(service, model)
    tokenizer = load_tokenizer(service, client.get_base_model(), tokenizer_source)
    return evaluation.Judge(client, tokenizer, rubric or evaluation.RUBRIC)
