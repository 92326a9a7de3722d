"""`tinsmith chat`: talk to a model."""

from __future__ import annotations

import random
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.output import Output, with_output
from tinsmith.cli.sampling.options import params, sampler, with_sampling_options

if TYPE_CHECKING:
    from tinsmith.cli.sampling.speakers import Speaker

_HELP = (
    "Commands: /reset forgets the conversation, /system TEXT sets the system prompt, /help shows "
    "this, /exit ends; Ctrl-C ends a reply."
)


@click.command("chat")
@click.argument("model")
@click.option("--versus", metavar="MODEL", help="Another model, which answers beside the first.")
@click.option("--system", help="The system prompt.")
@click.option(
    "--seed", type=int, help="The same seed gives the same replies; with --versus both have one."
)
@with_sampling_options
@with_output
def command(
    output: Output,
    /,
    model: str,
    versus: str | None,
    system: str | None,
    seed: int | None,
    tokenizer_source: str | None,
    **options: Any,
) -> None:
    """Talk to MODEL, a base model's name or a tinker:// path of sampler weights.

    With --versus two models answer side by side, from the same seed, each in a conversation of its
    own. Lines from a pipe are messages of one conversation. With --json each message and its reply
    are one line of JSON.
    """
    from tinsmith.cli.sampling.speakers import Speaker
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training import conversation
    from tinsmith.client.service import ServiceClient

    is_live = sys.stdin.isatty() and not output.is_json
    names = [model] if versus is None else [model, versus]
    if versus is not None and seed is None:
        seed = random.randrange(2**31)
    with ServiceClient() as service:
        speakers = []
        for name in names:
            client = sampler(service, name)
            tokenizer = load_tokenizer(service, client.get_base_model(), tokenizer_source)
            asked = params(seed=seed, stop=conversation.end_tokens(tokenizer), **options)
            speakers.append(Speaker(name, client, tokenizer, asked))
            speakers[-1].begin(system)
        if is_live:
            with_seed = "" if versus is None else f", both with seed {seed}"
            _say(f"Talking to {' and '.join(names)}{with_seed}. {_HELP}")
        for line in _lines(is_live):
            word, _, rest = line.partition(" ")
            if word in ("/exit", "/quit"):
                return
            if word in ("/reset", "/system"):
                system = rest.strip() or None if word == "/system" else system
                for speaker in speakers:
                    speaker.begin(system)
                continue
            if word == "/help" or (is_live and re.fullmatch("/[a-z]+", word)):
                _say(_HELP)
                continue
            try:
                _answer(output, speakers, line, seed)
            except KeyboardInterrupt:
                if not is_live:
                    raise
                click.echo()


def _answer(output: Output, speakers: Sequence[Speaker], line: str, seed: int | None) -> None:
    import json

    from tinsmith.cli.sampling.speakers import reply_together, side_by_side

    if output.is_json:
        texts = reply_together(speakers, line, lambda texts: None)
        said: dict[str, Any] = dict(zip(("assistant", "versus"), texts, strict=False))
        seeded = {"seed": seed} if len(speakers) > 1 else {}
        click.echo(json.dumps({"user": line, **said, **seeded}))
    elif len(speakers) > 1:
        with side_by_side([speaker.name for speaker in speakers]) as show:
            reply_together(speakers, line, show)
    else:
        with closing(speakers[0].reply(line)) as pieces:  # type: ignore[type-var]  # a generator
            for piece in pieces:
                click.echo(piece, nl=False)
        click.echo()


def _say(text: str) -> None:
    """A remark beside the conversation; on a terminal no word of it is broken."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
    click.echo(text, err=True)


def _lines(is_live: bool) -> Iterator[str]:
    while True:
        try:
            line = input("\n> " if is_live else "").strip()
        except EOFError:
            return
        if line:
            yield line
