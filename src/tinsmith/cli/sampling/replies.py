"""What a model says next, as text that comes while it is made.

Our server sends tokens as they are decoded. The hosted service answers with whole samples only. In
a chat it is asked for a few tokens at a time, each time with what came before: that draws the same
text with the same odds. Where a seed or a stop string may be given, the sample comes as one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tinsmith.cli.training import conversation
from tinsmith.client.sampling import SamplingClient
from tinsmith.errors import APIStatusError
from tinsmith.types import ModelInput, SamplingParams

_PIECE_TOKENS = 8
_NO_SUCH_CALL = (404, 405)


def reply(
    client: SamplingClient,
    tokenizer: conversation.Tokenizer,
    messages: Sequence[conversation.Message],
    params: SamplingParams,
) -> Iterator[str]:
    """What the assistant says to `messages`, in pieces that make up the whole."""
    prompt = conversation.prompt_tokens(tokenizer, messages)
    # Pieces that each began with the same seed would not be what one sample with it is.
    otherwise = _in_pieces if params.seed is None else _whole
    tokens = _tokens(client, prompt, params, otherwise=otherwise)
    return _texts(tokens, lambda spoken: conversation.reply_text(tokenizer, spoken))


def continuation(
    client: SamplingClient,
    tokenizer: conversation.Tokenizer,
    prompt: list[int],
    params: SamplingParams,
) -> Iterator[str]:
    """What follows the prompt, in pieces that make up the whole."""
    tokens = _tokens(client, prompt, params, otherwise=_whole)
    return _texts(tokens, lambda said: str(tokenizer.decode(said, skip_special_tokens=True)))


def _texts(pieces: Iterator[list[int]], text_of: Callable[[list[int]], str]) -> Iterator[str]:
    tokens: list[int] = []
    shown = ""
    for piece in pieces:
        tokens += piece
        text = text_of(tokens)
        # A character may be cut in two between tokens; it is shown when it is whole.
        if len(text) > len(shown) and text.startswith(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    text = text_of(tokens)
    if len(text) > len(shown) and text.startswith(shown):
        yield text[len(shown) :]


def _tokens(
    client: SamplingClient,
    prompt: list[int],
    params: SamplingParams,
    *,
    otherwise: Callable[[SamplingClient, list[int], SamplingParams], Iterator[list[int]]],
) -> Iterator[list[int]]:
    has_begun = False
    try:
        for tokens in _streamed(client, prompt, params):
            has_begun = True
            yield tokens
        return
    except APIStatusError as error:
        if has_begun or error.status_code not in _NO_SUCH_CALL:
            raise
    yield from otherwise(client, prompt, params)


def _streamed(
    client: SamplingClient, prompt: list[int], params: SamplingParams
) -> Iterator[list[int]]:
    for piece in client.stream(ModelInput.from_ints(prompt), params):
        yield piece.tokens


def _whole(
    client: SamplingClient, prompt: list[int], params: SamplingParams
) -> Iterator[list[int]]:
    yield client.sample(ModelInput.from_ints(prompt), 1, params).result().sequences[0].tokens


def _in_pieces(
    client: SamplingClient, prompt: list[int], params: SamplingParams
) -> Iterator[list[int]]:
    left = params.max_tokens
    assert left is not None, "the command has a default"
    while left > 0:
        asked = params.model_copy(update={"max_tokens": min(_PIECE_TOKENS, left)})
        response = client.sample(ModelInput.from_ints(prompt), 1, asked).result()
        sequence = response.sequences[0]
        yield sequence.tokens
        if sequence.stop_reason == "stop":
            return
        prompt = prompt + sequence.tokens
        left -= len(sequence.tokens)
