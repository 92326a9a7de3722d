"""From a request for text to a model's answer: prompt, jobs, and text and calls as they come.

What both APIs share; their routes only read requests and shape answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from tinsmith.engine import checks
from tinsmith.engine.base import BaseModelInfo, Failure, SampleJob, Shaping, TokensSampled
from tinsmith.errors import EngineError, ValidationError
from tinsmith.server.chat.ask import Ask
from tinsmith.server.chat.pictures import with_images
from tinsmith.server.chat.text import TextStream
from tinsmith.server.chat.tool_calls import ToolCall, ToolCallStream, form_of
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import WAIT, Refusal
from tinsmith.server.sampling.requests import held_bytes
from tinsmith.server.service import Service
from tinsmith.server.store.records import SamplerRecord
from tinsmith.text_model import TextModel
from tinsmith.types import ModelInput, SampledSequence, SampleResponse

_STARTED_TOGETHER = 16
"""Jobs of one request that begin before others have their turn: a few milliseconds' work."""

_MAX_ECHOED = 2_000_000
"""Most log-probabilities of prompts in one answer; each takes some 100 bytes as it is written."""

_ROLES = ("system", "user", "assistant", "tool")


class Answer:
    """One sequence's text and calls, as its tokens arrive."""

    def __init__(self, text: TextModel, ask: Ask) -> None:
        self.has_calls = False
        self._text = TextStream(text, ask.stops)
        self._is_single = ask.tool_use.is_single
        form = form_of(text.template) if ask.tool_use.tools else None
        self._calls = ToolCallStream(form, _opening(text, ask)) if form is not None else None

    @property
    def stopped_by(self) -> str | None:
        return self._text.stopped_by

    def add(self, tokens: Sequence[int]) -> list[str | ToolCall]:
        new = self._text.add(tokens)
        if self._calls is None:
            return [new] if new else []
        return self._kept(self._calls.add(new))

    def finish(self) -> list[str | ToolCall]:
        rest = self._text.finish()
        if self._calls is None:
            return [rest] if rest else []
        return self._kept([*self._calls.add(rest), *self._calls.finish()])

    def whole(self, sequence: SampledSequence) -> list[str | ToolCall]:
        return self.add(sequence.tokens) + self.finish()

    def ended_with_calls(self, stop_reason: str) -> bool:
        """Whether calls are why it ended. One that was cut ended with its length, unless the one
        call that was asked for is whole."""
        return self.has_calls and (self._is_single or stop_reason != "length")

    def _kept(self, parts: list[str | ToolCall]) -> list[str | ToolCall]:
        """All of it; where one call was asked for, nothing behind that."""
        kept: list[str | ToolCall] = []
        for part in parts:
            if self.has_calls and self._is_single:
                break
            kept.append(part)
            self.has_calls |= isinstance(part, ToolCall)
        return kept


class Answering:
    """A request whose jobs are ready to run."""

    def __init__(
        self, service: Service, sampler: SamplerRecord, ask: Ask, chosen: ChosenModel
    ) -> None:
        """Renders, encodes and checks, so that a stream that cannot be is refused before it begins;
        call it in a thread."""
        self.ask = ask
        self.text, base = chosen
        self.images = base.images
        self.jobs = [_checked(_job(ask, sampler, prompt), base) for prompt in _prompts(chosen, ask)]
        self.num_prompt_tokens = sum(job.prompt.length for job in self.jobs)
        if ask.echo and ask.with_logprobs:
            _check_echo(self.num_prompt_tokens * ask.n * (1 + ask.top_logprobs))
        self._service = service
        self._sampler = sampler

    def new_answer(self) -> Answer:
        return Answer(self.text, self.ask)

    async def complete(self) -> list[SampleResponse]:
        """All jobs at once; the first that fails, or leaving, cancels the others."""
        tasks: list[asyncio.Task[SampleResponse]] = []
        try:
            for job in self.jobs:
                tasks.append(asyncio.create_task(self._run(job)))
                if len(tasks) % _STARTED_TOGETHER == 0:
                    await asyncio.sleep(0)
            # Not `gather`, which when it is left cancels all of them at once.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [error for task in done if (error := task.exception()) is not None]
            if failed:
                raise failed[0]
            return [task.result() for task in tasks]
        finally:
            self._service.sampling.give_up(tasks)

    async def stream(self, job: SampleJob) -> AsyncGenerator[TokensSampled | SampleResponse, None]:
        """Tokens as they are sampled, then the whole; leaving cancels the job."""
        try:
            async with aclosing(self._service.sampling.stream(self._sampler, job)) as events:
                async for event in events:
                    if isinstance(event, Failure):
                        if event.category == "user":
                            raise Refusal(400, event.message)
                        raise Refusal(503, event.message, WAIT)
                    yield event
        except EngineError as error:
            raise Refusal(503, f"the engine is restarting: {error}", WAIT) from None

    async def _run(self, job: SampleJob) -> SampleResponse:
        async with aclosing(self.stream(job)) as events:
            async for event in events:
                if isinstance(event, SampleResponse):
                    return event
        raise Refusal(503, "the engine gave no result", WAIT)


async def prepare(service: Service, caller: Caller, ask: Ask) -> Answering:
    """Find the model, render the prompt, and see that there is room for it."""
    sampler, chosen = await find_model(service, caller, ask.model)
    if ask.form is not None:
        await service.forms.check(caller.owner, ask.form)
    answering = await service.texts.run(caller.owner, Answering, service, sampler, ask, chosen)
    num_bytes = sum(map(held_bytes, answering.jobs))
    if not service.sampling.has_room(caller.owner, len(answering.jobs), num_bytes):
        problem = f"{len(answering.jobs)} more prompts are too many at once; wait, or send fewer"
        raise Refusal(429, problem, {"retry-after": "1"})
    return answering


class ChosenModel(NamedTuple):
    """What a base model needs to read a conversation."""

    text: TextModel
    base: BaseModelInfo


async def find_model(
    service: Service, caller: Caller, model: str
) -> tuple[SamplerRecord, ChosenModel]:
    """A sampler for one request, and how its base model reads."""
    sampler = await find_sampler(service, caller, model)
    base = await service.base_model(sampler.base_model)
    if base is None:
        raise Refusal(404, f"no base model called {sampler.base_model!r} is served")
    text = await service.texts.run(caller.owner, service.text_models.get, base)
    return sampler, ChosenModel(text, base)


async def find_sampler(service: Service, caller: Caller, model: str) -> SamplerRecord:
    """Of a base model, or of a checkpoint."""
    base_model, weights_id = model, None
    if model.startswith("tinker://"):
        try:
            checkpoint = await service.checkpoints.readable(model, caller.owner)
            weights = await service.checkpoints.loadable(checkpoint)
        except ValidationError:
            raise Refusal(404, f"there is no checkpoint {model[:200]!r}") from None
        base_model, weights_id = weights.base_model, weights.weights_id
    elif await service.base_model(model) is None:
        if (reason := service.why_refused(model)) is not None:
            raise Refusal(404, f"{model!r} cannot be served: {reason}")
        served = ", ".join(m.name for m in (await service.capabilities()).models)
        raise Refusal(404, f"no model called {model[:200]!r}; served: {served or 'none'}")
    return SamplerRecord(
        sampler_id="oai",
        session_id="",
        sampling_session_seq_id=-1,
        owner=caller.owner,
        base_model=base_model,
        weights_id=weights_id,
        created_at=time.time(),
    )


def _prompts(chosen: ChosenModel, ask: Ask) -> Iterator[ModelInput]:
    """One at a time: the first that is too long spares the others."""
    if ask.is_chat:
        yield render(chosen, ask)
    context = chosen.base.max_context_length
    for given in ask.prompts:
        row = given if isinstance(given, list) else chosen.text.encode(given, context=context)
        yield ModelInput.from_ints(row)


def render(chosen: ChosenModel, ask: Ask) -> ModelInput:
    """A conversation, up to where the model is to speak."""
    text = chosen.text
    options = _known_options(text, ask)
    if ask.tool_use.tools:
        options["tools"] = list(ask.tool_use.tools)
    messages = [_known_role(text, m, index) for index, m in enumerate(ask.messages)]
    context = chosen.base.max_context_length
    if ask.is_begun:
        tokens = text.render_begun(messages, options, context=context)
    else:
        tokens = text.render_chat(messages, options, opening=_opening(text, ask), context=context)
    return with_images(tokens, ask.images, chosen.base.images)


def _known_role(text: TextModel, message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message of a role that the template knows: most leave out those of others in silence."""
    role = message["role"]
    if role in _ROLES or any(f"{quote}{role}{quote}" in text.template for quote in "'\""):
        return message
    if role == "developer":
        return {**message, "role": "system"}
    raise ValidationError(
        f"the chat template of {text.name} knows no role {role[:80]!r}", f"messages[{index}].role"
    )


def _known_options(text: TextModel, ask: Ask) -> dict[str, Any]:
    """What the template is told, by names that occur in it."""
    hints = {name: value for name, value in ask.template_hints.items() if name in text.template}
    options = {**hints, **ask.template_options}
    effort = options.get("reasoning_effort")
    if effort is not None and "reasoning_effort" not in text.template:
        del options["reasoning_effort"]
        if "enable_thinking" in text.template:
            options.setdefault("enable_thinking", effort != "none")
        elif effort != "none":
            raise ValidationError(
                f"the chat template of {text.name} has no option for reasoning", "reasoning_effort"
            )
    for name in options:
        if name not in text.template:
            raise ValidationError(
                f"the chat template of {text.name} has no option {name[:80]!r}",
                "chat_template_kwargs",
            )
    return options


def _opening(text: TextModel, ask: Ask) -> str:
    """What the answer must begin with."""
    if not ask.tool_use.tools:
        return ""
    form = form_of(text.template)
    if form is None:
        raise ValidationError(
            f"the chat template of {text.name} does not say how to call tools", "tools"
        )
    return form.forced(ask.tool_use.name) if ask.tool_use.is_forced else ""


def _checked(job: SampleJob, base: BaseModelInfo) -> SampleJob:
    """As the engine checks it, with the status that an engine's refusal has."""
    try:
        return checks.check_sample(
            job,
            vocab_size=base.vocab_size,
            max_context_length=base.max_context_length,
            images=base.images,
        )
    except ValidationError as error:
        raise Refusal(400, str(error)) from None


def _check_echo(count: int) -> None:
    if count > _MAX_ECHOED:
        raise ValidationError(
            f"the answer would hold {count} log-probabilities of prompts; at most {_MAX_ECHOED} "
            "are given: send fewer prompts at a time, or a smaller n or logprobs",
            "echo",
        )


def _shaping(ask: Ask) -> Shaping | None:
    if ask.form is None:
        return ask.shaping
    return dataclasses.replace(ask.shaping or Shaping(), grammar=ask.form.grammar)


def _job(ask: Ask, sampler: SamplerRecord, prompt: ModelInput) -> SampleJob:
    return SampleJob(
        job_id=f"oai-{uuid.uuid4().hex}",
        base_model=sampler.base_model,
        weights_id=sampler.weights_id,
        prompt=prompt,
        params=ask.params,
        shaping=_shaping(ask),
        num_samples=ask.n,
        prompt_logprobs=ask.echo and ask.with_logprobs,
        topk_prompt_logprobs=ask.top_logprobs if ask.echo else 0,
        topk_sample_logprobs=ask.top_logprobs,
        stream=ask.stream,
        scope=sampler.owner,
    )
