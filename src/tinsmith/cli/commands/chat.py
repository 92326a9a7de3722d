"""`tinsmith chat`: talk to a model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.output import Output, with_output
from tinsmith.cli.sampling.options import params, sampler, with_sampling_options

if TYPE_CHECKING:
    from tinsmith.cli.training.conversation import Message

_HELP = (
    "Commands: /reset forgets the conversation, /system TEXT sets the system prompt, /help shows "
    "this, /exit ends; Ctrl-C ends a reply."
)


@click.command("chat")
@click.argument("model")
@click.option("--system", help="The system prompt.")
@with_sampling_options
@with_output
def command(
    output: Output, /, model: str, system: str | None, tokenizer_source: str | None, **options: Any
) -> None:
    """Talk to MODEL, a base model's name or a tinker:// path of sampler weights.

    Lines from a pipe are messages of one conversation. With --json each message and its reply are
    one line of JSON.
    """
    import json

    from tinsmith.cli.sampling import replies
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training import conversation
    from tinsmith.client.service import ServiceClient

    is_live = sys.stdin.isatty() and not output.is_json
    with ServiceClient() as service:
        client = sampler(service, model)
        tokenizer = load_tokenizer(service, client.get_base_model(), tokenizer_source)
        asked = params(stop=conversation.end_tokens(tokenizer), **options)
        if is_live:
            click.echo(f"Talking to {model}. {_HELP}", err=True)
        messages = _beginning(system)
        for line in _lines(is_live):
            word, _, rest = line.partition(" ")
            if word in ("/exit", "/quit"):
                return
            if word in ("/reset", "/system"):
                system = rest.strip() or None if word == "/system" else system
                messages = _beginning(system)
                continue
            if word == "/help" or (is_live and re.fullmatch("/[a-z]+", word)):
                click.echo(_HELP, err=True)
                continue
            messages.append({"role": "user", "content": line})
            reply = ""
            try:
                for piece in replies.reply(client, tokenizer, messages, asked):
                    reply += piece
                    if not output.is_json:
                        click.echo(piece, nl=False)
            except KeyboardInterrupt:
                if not is_live:
                    raise
            if output.is_json:
                click.echo(json.dumps({"user": line, "assistant": reply}))
            else:
                click.echo()
            messages.append({"role": "assistant", "content": reply})


def _beginning(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


def _lines(is_live: bool) -> Iterator[str]:
    while True:
        try:
            line = input("\n> " if is_live else "").strip()
        except EOFError:
            return
        if line:
            yield line
