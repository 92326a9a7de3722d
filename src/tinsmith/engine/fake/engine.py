"""`FakeEngine`: the engine interface without torch.

It keeps every rule of the interface (order, failure as a value, exact saves, frozen
samplers, seeds, streams, cancelling) over the toy model of `model`, in microseconds a call.
It trains: a datum it has seen becomes more likely. What it leaves out, it refuses by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinsmith.engine import checks
from tinsmith.engine.base import (
    BaseModelInfo,
    Capabilities,
    Engine,
    EngineSampleEvent,
    Failure,
    FinishedPass,
    Health,
    ImportedAdapter,
    Pass,
    SampleEvent,
    SampleJob,
    SavedAdapter,
    SavedKind,
    Step,
    TokensSampled,
)
from tinsmith.engine.fake import adapter_files
from tinsmith.engine.fake.config import FakeEngineConfig, FakeModel
from tinsmith.engine.fake.losses import LARGEST_LOSS, LOSSES
from tinsmith.engine.fake.model import Array, Bigram, BigramAdapter
from tinsmith.engine.fake.sample import Continuation, PromptScores, TokenSource
from tinsmith.engine.grammar import Tokens
from tinsmith.engine.loss_table import loss_named
from tinsmith.engine.shaping import Shaper
from tinsmith.engine.stopping import StopRule, StopWatch
from tinsmith.errors import EngineDiedError, ValidationError
from tinsmith.types import (
    ForwardBackwardOutput,
    LoraConfig,
    LossFnOutput,
    SampleResponse,
    TensorData,
)

_TOKENS_PER_PAUSE = 64
"""Tokens a job decodes before others on the event loop get their turn."""


@dataclass(frozen=True, slots=True)
class _Sampler:
    base_model: str
    logprobs: Array


class FakeEngine(Engine):
    """See the module's notes. State changes when a call is made; answers come when it is due."""

    def __init__(self, config: FakeEngineConfig | None = None) -> None:
        self.config = config or FakeEngineConfig()
        self._models = {model.name: model for model in self.config.models}
        self._tables = {m.name: Bigram(m.name, m.vocab_size) for m in self.config.models}
        self._adapters: dict[str, BigramAdapter] = {}
        self._samplers: dict[str, _Sampler] = {}
        self._jobs: dict[str, asyncio.Event] = {}
        self._busy_until = 0.0
        self._num_decoded = 0
        self._death: str | None = None

    async def capabilities(self) -> Capabilities:
        self._check_alive()
        return Capabilities(
            models=tuple(
                BaseModelInfo(
                    name=model.name,
                    max_context_length=model.max_context_length,
                    vocab_size=model.vocab_size,
                    architecture="bigram",
                    tokenizer_folder=model.tokenizer_folder,
                )
                for model in self.config.models
            ),
            max_lora_rank=self.config.max_lora_rank,
            device="no device: the fake engine",
        )

    async def health(self) -> Health:
        return Health(
            alive=self._death is None,
            detail=self._death or "",
            num_adapters=len(self._adapters),
            num_samplers=len(self._samplers),
            running_samples=self.running_samples,
            decoded_tokens=self._num_decoded,
            memory_bytes=sum(a.weights.nbytes for a in self._adapters.values()),
        )

    @property
    def running_samples(self) -> int:
        return len(self._jobs)

    def die(self, reason: str) -> None:
        """Behave like a process that was killed: nothing is kept, and every call raises."""
        self._death = self._death or reason
        self._adapters.clear()
        self._samplers.clear()
        for given_up in self._jobs.values():
            given_up.set()

    async def close(self) -> None:
        self.die("the engine was closed")

    # Training

    async def create_adapter(
        self, adapter_id: str, base_model: str, lora: LoraConfig
    ) -> Failure | None:
        self._check_alive()
        try:
            model = self._model(base_model)
            checks.check_lora(lora, self.config.max_lora_rank)
            if adapter_id in self._adapters:
                raise ValidationError(f"an adapter called {adapter_id!r} exists already")
        except ValidationError as error:
            return _refusal(error)
        self._adapters[adapter_id] = BigramAdapter(self._tables[model.name], lora)
        await self._work()
        return None

    async def unload_adapter(self, adapter_id: str) -> None:
        self._check_alive()
        self._adapters.pop(adapter_id, None)

    def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        self._check_alive()
        return self._deliver([self._timed_pass(index, item) for index, item in enumerate(passes)])

    async def _deliver(self, finished: list[FinishedPass]) -> AsyncIterator[FinishedPass]:
        for item in finished:
            await self._work()
            yield item

    def _timed_pass(self, index: int, item: Pass) -> FinishedPass:
        start = time.perf_counter()
        result = self._run_pass(item)
        seconds = time.perf_counter() - start + self.config.pass_seconds
        return FinishedPass(index, result, seconds)

    def _run_pass(self, item: Pass) -> ForwardBackwardOutput | Failure:
        try:
            adapter = self._adapter(item.adapter_id)
            model = self._models[adapter.model.name]
            if item.loss_fn == "custom":
                raise ValidationError("the fake engine does not run uploaded losses", "loss_fn")
            checks.check_pass(
                item, vocab_size=model.vocab_size, max_context_length=model.max_context_length
            )
        except ValidationError as error:
            return _refusal(error)
        compute = LOSSES[item.loss_fn]
        settings = {**loss_named(item.loss_fn).config, **item.loss_fn_config}
        logprobs = adapter.logprobs()
        outputs: list[LossFnOutput] = []
        gradients: list[Array] = []
        metrics: defaultdict[str, float] = defaultdict(float)
        for datum in item.data:
            inputs = {name: data.to_numpy() for name, data in datum.loss_fn_inputs.items()}
            targets = inputs.pop("target_tokens")
            previous = datum.model_input.tokens_np()
            if targets.ndim == 2:
                previous = previous[:, None]
            cells = adapter.model.cells(previous, targets)
            policy = logprobs.ravel()[cells]
            given = {name: values.astype(np.float64) for name, values in inputs.items()}
            with np.errstate(over="ignore", invalid="ignore"):
                value, slopes = compute(policy, **{**settings, **given})
            if not (abs(value) <= LARGEST_LOSS and (np.abs(slopes) <= LARGEST_LOSS).all()):
                problem = (
                    f"data[{len(outputs)}].loss_fn_inputs: the loss is {value:.3g}; it and its "
                    f"gradient must be within ±{LARGEST_LOSS:.2g}"
                )
                return Failure(problem, "user")
            metrics["loss:sum"] += value
            metrics["tokens:sum"] += len(targets)
            if item.loss_fn == "cross_entropy":
                metrics["weights:sum"] -= slopes.sum()
            outputs.append({"logprobs": TensorData.from_numpy(policy)})
            if not item.forward_only:
                gradients.append(adapter.gradient(logprobs, cells, slopes))
        for gradient in gradients:
            adapter.accumulate(gradient)
        return ForwardBackwardOutput("ArrayRecord", outputs, dict(metrics))

    async def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        self._check_alive()
        results = [self._take_step(step) for step in steps]
        await self._work()
        return results

    def _take_step(self, step: Step) -> dict[str, float] | Failure:
        try:
            return self._adapter(step.adapter_id).take_step(step.params)
        except ValidationError as error:
            return _refusal(error)

    # Adapters in files

    async def save(self, adapter_id: str, folder: Path, kind: SavedKind) -> SavedAdapter | Failure:
        self._check_alive()
        try:
            adapter = self._adapter(adapter_id)
        except ValidationError as error:
            return _refusal(error)
        try:
            info = adapter_files.save(adapter, folder, kind)
        except OSError as error:
            return Failure(f"the adapter could not be written to {folder}: {error}", "server")
        await self._work()
        return info

    async def restore(
        self, adapter_id: str, folder: Path, kind: SavedKind
    ) -> SavedAdapter | Failure:
        self._check_alive()
        try:
            adapter = self._adapter(adapter_id)
            info = adapter_files.restore(adapter, folder, kind)
        except ValidationError as error:
            return _refusal(error)
        await self._work()
        return info

    async def import_adapter(
        self, base_model: str, source: Path, folder: Path, kind: SavedKind
    ) -> ImportedAdapter | Failure:
        self._check_alive()
        return Failure("the fake engine has no low-rank matrices to import an adapter to", "user")

    async def freeze(self, adapter_id: str, weights_id: str) -> Failure | None:
        self._check_alive()
        try:
            adapter = self._adapter(adapter_id)
            self._check_sampler_is_new(weights_id)
        except ValidationError as error:
            return _refusal(error)
        self._samplers[weights_id] = _Sampler(adapter.model.name, adapter.logprobs())
        return None

    async def load_sampler(self, weights_id: str, base_model: str, folder: Path) -> Failure | None:
        self._check_alive()
        try:
            model = self._model(base_model)
            self._check_sampler_is_new(weights_id)
            adapter = adapter_files.load(self._tables[model.name], folder)
        except ValidationError as error:
            return _refusal(error)
        self._samplers[weights_id] = _Sampler(model.name, adapter.logprobs())
        return None

    async def unload_sampler(self, weights_id: str) -> None:
        self._check_alive()
        self._samplers.pop(weights_id, None)

    # Sampling

    def sample(self, job: SampleJob) -> AsyncIterator[EngineSampleEvent]:
        self._check_alive()
        try:
            model = self._model(job.base_model)
            checks.check_sample(
                job, vocab_size=model.vocab_size, max_context_length=model.max_context_length
            )
            logprobs = self._sampler_table(job, model)
            shaper = self._shaper(job, model)
            if job.job_id in self._jobs:
                raise ValidationError(f"a sampling job called {job.job_id!r} is already under way")
        except ValidationError as error:
            return _just(_refusal(error))
        given_up = self._jobs[job.job_id] = asyncio.Event()
        return self._run_job(job, model, logprobs, shaper, given_up)

    def _shaper(self, job: SampleJob, model: FakeModel) -> Shaper | None:
        if job.shaping is None:
            return None
        matcher = None
        if job.shaping.grammar is not None:
            tokens = Tokens(model.tokenizer_folder, model.vocab_size)
            rule = StopRule.of(job.params, model.eos_token_ids, room=0)
            matcher = tokens.compile(job.shaping.grammar).start(rule.token_ids)
        return Shaper(job.shaping, job.prompt.tokens_np(), matcher)

    def _sampler_table(self, job: SampleJob, model: FakeModel) -> Array:
        if job.weights_id is None:
            return self._tables[model.name].own_logprobs
        sampler = self._samplers.get(job.weights_id)
        if sampler is None:
            raise ValidationError(f"no sampler called {job.weights_id!r}")
        if sampler.base_model != model.name:
            raise ValidationError(
                f"sampler {job.weights_id!r} belongs to {sampler.base_model!r}, not {model.name!r}"
            )
        return sampler.logprobs

    async def cancel(self, job_id: str) -> None:
        self._check_alive()
        if job_id in self._jobs:
            self._jobs[job_id].set()

    async def _run_job(
        self,
        job: SampleJob,
        model: FakeModel,
        logprobs: Array,
        shaper: Shaper | None,
        given_up: asyncio.Event,
    ) -> AsyncIterator[SampleEvent]:
        try:
            prompt = job.prompt.tokens_np()
            seed = secrets.randbits(63) if job.params.seed is None else job.params.seed
            table = self._tables[model.name]
            rule = StopRule.of(
                job.params, model.eos_token_ids, model.max_context_length - len(prompt)
            )
            source = TokenSource(table, logprobs, job.params)
            continuations = [
                Continuation(
                    source=source,
                    watch=StopWatch(rule, self.config.detokenize, prompt.tolist()),
                    random=np.random.default_rng([seed & (2**64 - 1), index]),
                    previous=int(prompt[-1]),
                    is_empty=rule.max_tokens == 0,
                    shaper=None if shaper is None else shaper.copy(),
                )
                for index in range(job.num_samples)
            ]
            num_drawn = 0
            while running := [c for c in enumerate(continuations) if c[1].stop_reason is None]:
                for index, continuation in running:
                    token, logprob = continuation.grow()
                    if continuation.problem is not None:
                        yield Failure(continuation.problem, "user")
                        return
                    self._num_decoded += 1
                    if job.stream:
                        yield TokensSampled(
                            index,
                            np.array([token], np.int32),
                            np.array([logprob], np.float32),
                            continuation.topk(job.topk_sample_logprobs, first=-1),
                        )
                num_drawn += len(running)
                if self.config.token_seconds or num_drawn >= _TOKENS_PER_PAUSE:
                    await _pause(self.config.token_seconds, given_up)
                    num_drawn = 0
                if given_up.is_set():
                    break
            self._check_alive()
            if given_up.is_set():
                yield Failure(f"sampling job {job.job_id!r} was cancelled", "user")
                return
            scores = PromptScores(job, prompt, table, logprobs, seed)
            yield SampleResponse(
                sequences=[
                    c.finish(f"{job.job_id}:{index}", job.topk_sample_logprobs)
                    for index, c in enumerate(continuations)
                ],
                prompt_logprobs_np=scores.logprobs(),
                topk_prompt_logprobs_np=scores.topk(),
                target_prompt_logprobs=scores.targets(),
                prompt_alt_tokens=scores.alternatives(),
            )
        finally:
            self._jobs.pop(job.job_id, None)

    # Shared by the calls above

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(self._death)

    def _model(self, name: str) -> FakeModel:
        if name not in self._models:
            known = ", ".join(self._models)
            raise ValidationError(f"no base model called {name!r}; known: {known}")
        return self._models[name]

    def _adapter(self, adapter_id: str) -> BigramAdapter:
        if adapter_id not in self._adapters:
            raise ValidationError(f"no adapter called {adapter_id!r}")
        return self._adapters[adapter_id]

    def _check_sampler_is_new(self, weights_id: str) -> None:
        if weights_id in self._samplers:
            raise ValidationError(f"a sampler called {weights_id!r} exists already")

    async def _work(self) -> None:
        """Wait as long as the device would be busy: with what came before, then with this."""
        if self.config.pass_seconds:
            now = asyncio.get_running_loop().time()
            self._busy_until = max(now, self._busy_until) + self.config.pass_seconds
            await asyncio.sleep(self._busy_until - now)
        self._check_alive()


def _refusal(error: ValidationError) -> Failure:
    return Failure(str(error), "user")


async def _just(event: SampleEvent) -> AsyncIterator[SampleEvent]:
    yield event


async def _pause(seconds: float, given_up: asyncio.Event) -> None:
    if not seconds:
        await asyncio.sleep(0)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await given_up.wait()
