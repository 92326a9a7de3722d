"""Conversations as tokens: prompts to continue, and examples to learn from.

The model's own chat template does the rendering. In an example only the words of the assistant
count: everything before a reply has weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.errors import TinkerError
from tinsmith.types import Datum, ModelInput, TensorData

Message = dict[str, str]
"""`{"role": "user" | "assistant" | "system", "content": text}`"""

Tokenizer = Any
"""A transformers tokenizer; the library is not imported to name it."""


def prompt_tokens(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The conversation up to where the assistant is to speak next."""
    return _encode(tokenizer, _render(tokenizer, messages, is_open=True))


def end_tokens(tokenizer: Tokenizer) -> list[int]:
    """What a reply ends with."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def reply_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """A sampled reply as text, without the tokens that mark its end."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text.strip()


def chat_example(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[list[int], list[float]]:
    """Tokens of a whole conversation, and a weight for each: 1 where the assistant speaks."""
    if not any(message["role"] == "assistant" for message in messages):
        raise TinkerError("a conversation to learn from needs a message of the assistant")
    tokens: list[int] = []
    weights: list[float] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:number], is_open=True)
        after = _render(tokenizer, messages[: number + 1], is_open=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise TinkerError(
                "the model's chat template changes earlier messages as a conversation grows; "
                "train on conversations with a single reply"
            )
        for text, weight in ((before[len(done) :], 0.0), (after[len(before) :], 1.0)):
            piece = _encode(tokenizer, text)
            tokens += piece
            weights += [weight] * len(piece)
        done = after
    return tokens, weights


def completion_example(
    tokenizer: Tokenizer, prompt: str, completion: str
) -> tuple[list[int], list[float]]:
    """Tokens of plain text and what is to follow it, as they are: no template is applied."""
    before = _encode(tokenizer, prompt)
    after = _encode(tokenizer, completion) + end_tokens(tokenizer)
    return before + after, [0.0] * len(before) + [1.0] * len(after)


def datum(tokens: Sequence[int], weights: Sequence[float]) -> Datum:
    """Each token is to be predicted from those before it."""
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": TensorData(data=list(tokens[1:]), dtype="int64"),
            "weights": TensorData(data=list(weights[1:]), dtype="float32"),
        },
    )


def _render(tokenizer: Tokenizer, messages: Sequence[Message], *, is_open: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=is_open
        )
    except Exception as error:
        # Templates raise errors of a library that only tokenizers with a template bring along.
        if type(error).__module__.partition(".")[0] != "jinja2":
            raise
        raise TinkerError(f"the model's chat template refuses the conversation: {error}") from error
    return text


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens
