"""Who answers in a chat: a model in a conversation of its own, alone or beside another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import click

from tinsmith.cli.sampling import replies
from tinsmith.cli.training.conversation import Message, Tokenizer
from tinsmith.client.sampling import SamplingClient
from tinsmith.types import SamplingParams

_REDRAW_SECONDS = 0.1


@dataclass(slots=True)
class Speaker:
    name: str
    client: SamplingClient
    tokenizer: Tokenizer
    params: SamplingParams
    messages: list[Message] = field(default_factory=list)

    def begin(self, system: str | None) -> None:
        """Forget the conversation."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def reply(self, line: str) -> Iterator[str]:
        """What it says to a message, in pieces; as far as it came it is part of what was said."""
        self.messages.append({"role": "user", "content": line})
        said = ""
        try:
            for piece in replies.reply(self.client, self.tokenizer, self.messages, self.params):
                said += piece
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": said})


def reply_together(
    speakers: Sequence[Speaker], line: str, show: Callable[[Sequence[str]], None]
) -> list[str]:
    """What each says to a message. All are asked at once; `show` sees how far they are."""
    texts = [""] * len(speakers)
    is_over = threading.Event()

    def speak(number: int) -> None:
        with closing(speakers[number].reply(line)) as pieces:  # type: ignore[type-var]  # a generator
            for piece in pieces:
                texts[number] += piece
                if is_over.is_set():
                    return

    with ThreadPoolExecutor(len(speakers)) as pool:
        asked = [pool.submit(speak, number) for number in range(len(speakers))]
        try:
            is_waiting = True
            while is_waiting:
                done, others = wait(asked, _REDRAW_SECONDS, FIRST_EXCEPTION)
                show(texts)
                is_waiting = bool(others) and all(each.exception() is None for each in done)
        finally:
            is_over.set()  # for the others, when one has failed or Ctrl-C was pressed
    for each in asked:
        each.result()
    return texts


@contextmanager
def side_by_side(names: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
    """Shows texts in columns that grow on a terminal; elsewhere one below the other, at the end."""
    if not sys.stdout.isatty():
        last: Sequence[str] = [""] * len(names)

        def keep(texts: Sequence[str]) -> None:
            nonlocal last
            last = list(texts)

        yield keep
        click.echo("\n".join(f"{n}:\n{text}\n" for n, text in zip(names, last, strict=True)))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    # What models say may look like rich's markup.
    console = Console(emoji=False, markup=False, highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:

        def draw(texts: Sequence[str]) -> None:
            table = Table(expand=True)
            for name in names:
                table.add_column(name, ratio=1, overflow="fold")
            table.add_row(*texts)
            live.update(table, refresh=True)

        yield draw
