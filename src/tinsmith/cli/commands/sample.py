"""`tinsmith sample`: continuations of a prompt."""

from __future__ import annotations

from typing import IO, Any

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.output import Output, with_output
from tinsmith.cli.sampling.options import params, sampler, with_sampling_options


@click.command("sample")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option(
    "--file", "file", type=click.File("r"), help="The prompt is in this file; - is stdin."
)
@click.option("-n", "num_samples", type=click.IntRange(1), default=1, show_default=True)
@click.option("--chat", "is_chat", is_flag=True, help="The prompt is a user's message in a chat.")
@click.option("--system", help="With --chat: the system prompt.")
@click.option("--seed", type=int, help="The same seed gives the same samples.")
@click.option("--stop", multiple=True, help="Stop at this text; repeatable.")
@with_sampling_options
@with_output
def command(
    output: Output,
    /,
    model: str,
    prompt: str | None,
    file: IO[str] | None,
    num_samples: int,
    is_chat: bool,
    system: str | None,
    seed: int | None,
    stop: tuple[str, ...],
    tokenizer_source: str | None,
    **options: Any,
) -> None:
    """Continue PROMPT with MODEL, a base model's name or a tinker:// path of sampler weights.

    The prompt is taken as it is, unless --chat puts it into the model's chat template. A single
    sample is shown as it comes. Ctrl-C gives up, here and at the server.
    """
    from tinsmith.cli.sampling import replies
    from tinsmith.cli.sampling.tokenizer import load_tokenizer
    from tinsmith.cli.training import conversation
    from tinsmith.client.service import ServiceClient
    from tinsmith.types import ModelInput

    if (prompt is None) == (file is None):
        raise CommandError("Give a prompt, or a file with one (--file), and not both")
    text = prompt if file is None else file.read()
    assert text is not None
    if system is not None and not is_chat:
        raise CommandError("--system needs --chat: plain text has no system prompt")
    with ServiceClient() as service:
        client = sampler(service, model)
        tokenizer = load_tokenizer(service, client.get_base_model(), tokenizer_source)
        if is_chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
            tokens = conversation.prompt_tokens(tokenizer, messages)
        else:
            tokens = tokenizer.encode(text)
        if not tokens:
            raise CommandError("The prompt is empty; a model needs a token to begin with")
        ends: Any = stop or conversation.end_tokens(tokenizer)
        asked = params(seed=seed, stop=ends, **options)
        if num_samples == 1 and not output.is_json:
            for piece in replies.continuation(client, tokenizer, tokens, asked):
                click.echo(piece, nl=False)
            click.echo()
            return
        response = client.sample(ModelInput.from_ints(tokens), num_samples, asked).result()
    texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in response.sequences]
    if output.is_json:
        samples = [
            {
                "text": text,
                "tokens": each.tokens,
                "logprobs": each.logprobs,
                "stop_reason": each.stop_reason,
            }
            for text, each in zip(texts, response.sequences, strict=True)
        ]
        output.show_json({"model": model, "prompt": text, "samples": samples})
        return
    for number, each in enumerate(texts, 1):
        if num_samples > 1:
            click.echo(f"--- {number} ---")
        click.echo(each)
