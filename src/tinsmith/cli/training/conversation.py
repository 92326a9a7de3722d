"""Conversations as tokens: prompts to continue, and examples to learn from.

The model's own chat template does the rendering. In an example only the words of the assistant
count: everything before a reply has weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.errors import TinkerError
from tinsmith.types import Datum, ModelInput, TensorData

Message = dict[str, Any]
"""`{"role": "user" | "assistant" | "system" | "tool", "content": text}`, and what else the template
reads. A reply with `"weight": 0` is rendered and not learned."""

Tokenizer = Any
"""A transformers tokenizer; the library is not imported to name it."""


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens, and a weight for each: what is learned has 1, what is only read has 0."""

    tokens: list[int]
    weights: list[float]

    @property
    def num_learned(self) -> float:
        """Tokens that count in the loss; nothing predicts the first."""
        return sum(self.weights[1:])


def prompt_tokens(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The conversation up to where the assistant is to speak next."""
    return encode(tokenizer, _render(tokenizer, messages, is_open=True))


def end_tokens(tokenizer: Tokenizer) -> list[int]:
    """What a reply ends with."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def reply_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """A sampled reply as text, without the tokens that mark its end."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text.strip()


def chat_examples(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Example]:
    """What there is to learn from a conversation: each reply after what the model will have seen.

    One example, if the template only adds to what it has rendered. A template that rewrites
    earlier messages (Qwen3's drops their thoughts) shows the model another past at every reply:
    then a reply that follows a rewritten past begins an example of its own.
    """
    if not any(_is_learned(message) for message in messages):
        raise TinkerError("a conversation to learn from needs a message of the assistant")
    examples: list[Example] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, reply = _reply(tokenizer, messages, number)
        if not examples or not before.startswith(done):
            examples.append(Example([], []))
            done = ""
        for text, weight in ((before[len(done) :], 0.0), (reply, float(_is_learned(message)))):
            piece = encode(tokenizer, text)
            examples[-1].tokens.extend(piece)
            examples[-1].weights.extend([weight] * len(piece))
        done = before + reply
    return [each for each in examples if each.num_learned]


def completion_example(tokenizer: Tokenizer, prompt: str, completion: str) -> Example:
    """Plain text and what is to follow it, as they are: no template is applied."""
    before = text_tokens(tokenizer, prompt)
    after = encode(tokenizer, completion) + end_tokens(tokenizer)
    return Example(before + after, [0.0] * len(before) + [1.0] * len(after))


def text_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The beginning of a plain text: after the token that begins every text, if the model has one.

    What some tokenizers put at the end is left out, for something is to follow.
    """
    tokens = encode(tokenizer, text)
    first = tokenizer.bos_token_id
    if first is None or tokenizer.encode("")[:1] != [first] or tokens[:1] == [first]:
        return tokens
    return [int(first), *tokens]


def datum(tokens: Sequence[int], weights: Sequence[float]) -> Datum:
    """Each token is to be predicted from those before it."""
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": TensorData(data=list(tokens[1:]), dtype="int64"),
            "weights": TensorData(data=list(weights[1:]), dtype="float32"),
        },
    )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Text as it is: special tokens only where it spells them."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def _reply(tokenizer: Tokenizer, messages: Sequence[Message], number: int) -> tuple[str, str]:
    """What the model sees before reply `number`, and the reply as it shall write it."""
    before = _render(tokenizer, messages[:number], is_open=True)
    after = _render(tokenizer, messages[: number + 1], is_open=False)
    if after.startswith(before):
        return before, after[len(before) :]
    # The template opens a reply with words that it does not repeat in a finished one, as those
    # that make a model think do. The model will have seen them.
    content = str(messages[number].get("content") or "").strip()
    start = after.rfind(content) if content else -1
    if start < 0:
        raise TinkerError(
            f"messages[{number}]: the model's chat template changes the reply, so that what is to "
            "be learned cannot be told; use 'prompt' and 'completion'"
        )
    return before, after[start:]


def _is_learned(message: Message) -> bool:
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def _render(tokenizer: Tokenizer, messages: Sequence[Message], *, is_open: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=is_open
        )
    except Exception as error:
        # Templates raise errors of a library that only tokenizers with a template bring along.
        if type(error).__module__.partition(".")[0] == "jinja2":
            problem = f"the model's chat template refuses the conversation: {error}"
            raise TinkerError(problem) from error
        if isinstance(error, ValueError) and "chat_template" in str(error):
            raise TinkerError(
                "the model has no chat template, which messages need; use 'prompt' and 'completion'"
            ) from error
        raise
    return text
