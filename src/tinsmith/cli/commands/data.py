"""`tinsmith data`: look at data before training on it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, with_output
from tinsmith.cli.training import METHOD_NAMES

if TYPE_CHECKING:
    from tinsmith.cli.training.preview import Shown


@click.group("data")
def command() -> None:
    """Look at data to train on."""


@command.command("preview")
@click.argument("data")
@click.option(
    "--method",
    type=click.Choice(METHOD_NAMES),
    default="sft",
    show_default=True,
    help="What it is to be used for.",
)
@click.option("--model", help="Base model.  [default: the server's, if it has one only]")
@click.option("--tokenizer", "source", help="A folder or hub name; no server is needed then.")
@click.option("-n", "num_shown", type=click.IntRange(0), default=3, show_default=True)
@click.option("--max-length", type=click.IntRange(2), default=2048, show_default=True)
@with_output
def preview(
    output: Output,
    data: str,
    method: str,
    model: str | None,
    source: str | None,
    num_shown: int,
    max_length: int,
) -> None:
    """Show what a model will learn from DATA, token by token.

    What is learned is on green, or in «guillemets» where there are no colours; the rest is only
    read. The whole file is checked, and its tokens are counted.
    """
    from tinsmith.cli.training import preview as previews

    tokenizer = _tokenizer(model, source)
    found = list(previews.sequences(data, method, tokenizer))
    facts = _facts(found, max_length)
    shown = [(each, previews.texts(tokenizer, each.example)) for each in found[:num_shown]]
    if output.is_json:
        output.show_json({**facts, "shown": [_as_json(*each) for each in shown]})
        return
    for each, pieces in shown:
        click.echo(f"--- {each.place}, {each.kind}: {len(pieces)} tokens ---")
        if sys.stdout.isatty():
            from rich.console import Console

            Console(emoji=False, markup=False, highlight=False).print(
                previews.coloured(pieces, each.example.weights)
            )
        else:
            click.echo(previews.plain(pieces, each.example.weights))
    click.echo(
        f"{facts['sequences']} sequences, {facts['tokens']:,} tokens, of which "
        f"{facts['learned_tokens']:,} are learned; the longest has {facts['longest']:,}; "
        f"{facts['over_max_length']} are over {max_length:,} and would be left out"
    )


def _tokenizer(model: str | None, source: str | None) -> Any:
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training.models import known_model
    from tinsmith.client import tokenizers
    from tinsmith.client.service import ServiceClient

    if source is not None:
        try:
            return tokenizers.load(source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CommandError(f"no tokenizer in {source!r}: {reason}") from error
    with ServiceClient() as service:
        return load_tokenizer(service, known_model(service, model))


def _facts(found: list[Shown], max_length: int) -> dict[str, int]:
    lengths = [len(each.example.tokens) for each in found]
    return {
        "sequences": len(found),
        "tokens": sum(lengths),
        "learned_tokens": round(sum(each.example.num_learned for each in found)),
        "longest": max(lengths, default=0),
        "over_max_length": sum(length > max_length for length in lengths),
    }


def _as_json(each: Shown, pieces: list[str]) -> dict[str, Any]:
    return {
        "place": each.place,
        "kind": each.kind,
        "tokens": each.example.tokens,
        "texts": pieces,
        "weights": each.example.weights,
    }
