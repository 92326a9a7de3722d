"""A process that finds out whether grammars can be compiled, and may die of one that cannot.

Compiling can take exponential time, inside a library that cannot be stopped. So it is tried here
first, where the kernel ends what takes too much of the CPU's time or of memory: `python -m` this,
a line of JSON for each grammar, a line of JSON for each answer.
"""

from __future__ import annotations

import resource
import signal
import sys

import orjson

from tinsmith.engine.base import Grammar
from tinsmith.engine.grammar import compile_grammar
from tinsmith.errors import ValidationError

MAX_COMPILE_SECONDS = 0.5
"""Of the CPU's time. Schemas of a hundred properties take a twentieth of it."""

_MAX_BYTES = 4 * 2**30


def main() -> None:
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        grammar = Grammar(**orjson.loads(line))
        problem = None
        # Nobody handles the signal, so it ends the process.
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_SECONDS)
        try:
            compile_grammar(grammar, tokenizer)
        except ValidationError as error:
            problem = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(orjson.dumps({"problem": problem}) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
