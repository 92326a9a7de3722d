"""`EngineCore`: the engine's state and what is done with it, synchronously, on one thread.

It owns the base models, the adapters that train on them, the samplers, which are frozen copies, and
one generator for each base model that is being sampled. The mathematics is in the modules it
puts together; here is decided what a call means. Everything is checked before anything is
computed, so a user's mistake becomes a `Failure` and changes nothing. The worker
(`boundary/worker.py`) decides whose turn it is.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from tinsmith.detokenizer import read_detokenize
from tinsmith.engine import checks
from tinsmith.engine.base import (
    Capabilities,
    EngineSampleEvent,
    ExpertsChosen,
    Failure,
    FinishedPass,
    Health,
    ImportedAdapter,
    Pass,
    RefusedModel,
    SampleJob,
    SavedAdapter,
    SavedKind,
    Step,
    TokensSampled,
)
from tinsmith.engine.grammar import Tokens
from tinsmith.engine.local import device_memory, progress
from tinsmith.engine.local.adapter_files import checkpoints
from tinsmith.engine.local.boundary.company import Company
from tinsmith.engine.local.boundary.core import Later, PassResults
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.device import (
    arithmetic_of,
    describe,
    device_of,
    dtype_of,
    set_up_torch,
    used_bytes,
)
from tinsmith.engine.local.memory_plan import MemoryPlan, plan_memory
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.experts.steering import check_choices
from tinsmith.engine.local.model.families import DecoderConfig
from tinsmith.engine.local.model.lora import Adapter, AdapterPool
from tinsmith.engine.local.model.stacked_adapters import AdapterStacks
from tinsmith.engine.local.ranks import adapters as cut_adapters
from tinsmith.engine.local.ranks.adapters import adapter_pool
from tinsmith.engine.local.ranks.group import ALONE, Ranks
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.engine.local.train.adamw import adamw_step
from tinsmith.engine.local.train.batch_limits import BatchLimits
from tinsmith.engine.local.train.graph_memory import GraphMemory
from tinsmith.engine.local.train.passes import graphs_of, run_passes
from tinsmith.errors import EngineError, ValidationError
from tinsmith.types import LoraConfig

if TYPE_CHECKING:
    from tinsmith.engine.local.train.pass_graphs import PassGraphs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sampler:
    adapter: Adapter
    job_ids: set[str] = field(default_factory=set)
    """Jobs under way; the weights stay until the last of them is done."""

    is_loaded: bool = True


class EngineCore:
    def __init__(self, config: LocalEngineConfig, ranks: Ranks = ALONE) -> None:
        """`ranks` are the processes among which base models are divided; each makes the same
        calls."""
        self._config = config
        self._ranks = ranks
        self._device = device_of(config)
        set_up_torch(config, self._device)
        self._models = BaseModels(config, progress.tell, ranks)
        self._pools: dict[str, AdapterPool] = {}
        self._generators: dict[str, Generator] = {}
        self._graphs: WeakKeyDictionary[Decoder, PassGraphs | None] = WeakKeyDictionary()
        self._graph_memory = GraphMemory()
        self._adapters: dict[str, Adapter] = {}
        self._damaged: dict[str, str] = {}
        self._num_decoded = 0
        self._plan: MemoryPlan | None = None
        self._num_passing = 0
        """Calls for passes under way; each has begun to run."""
        self._company = Company()
        self._samplers: dict[str, _Sampler] = {}
        self._jobs: dict[str, tuple[str, _Sampler | None]] = {}
        """The base model and sampler of each job under way."""

    @property
    def device(self) -> torch.device:
        return self._device

    # Questions

    def has_room_for(self, base_model: str) -> bool:
        """Whether a base model is in memory or can come there now, beside those in use."""
        return self._models.has_room_for(base_model)

    def base_model_of(self, adapter_id: str) -> str | None:
        adapter = self._adapters.get(adapter_id)
        return None if adapter is None else adapter.base_model

    def capabilities(self) -> Capabilities:
        infos, refused = [], []
        for name in self._models.names:
            try:
                infos.append(self._models.info(name))
                if self._config.router_replay and _routes_itself(self._models.config(name)):
                    logger.warning("%r routes by itself: router_replay does nothing for it", name)
            except Exception as error:  # whatever is wrong with one model, others are served
                logger.warning("base model %r cannot be served: %s", name, error)
                refused.append(RefusedModel(name=name, reason=_without_paths(str(error))))
        logger.info("%s", self._planned())
        return Capabilities(
            models=tuple(infos),
            max_lora_rank=self._config.max_lora_rank,
            refused=tuple(refused),
            device=describe(self._device, dtype_of(self._config), self._ranks.count),
            arithmetic=arithmetic_of(self._device),
        )

    def health(self) -> Health:
        generators = self._generators.values()
        return Health(
            alive=True,
            num_adapters=len(self._adapters),
            num_samplers=len(self._samplers),
            running_samples=sum(generator.num_running for generator in generators),
            waiting_samples=sum(generator.num_waiting for generator in generators),
            decoded_tokens=self._num_decoded,
            memory_bytes=used_bytes(self._device),
            weights_bytes=self._models.nbytes,
            cache_bytes=sum(generator.cache_bytes for generator in generators),
            cache_limit_bytes=sum(generator.max_cache_bytes for generator in generators),
            adapter_bytes=self._adapter_bytes,
            sampler_bytes=self._stack_bytes
            + sum(sampler.adapter.nbytes for sampler in self._samplers.values()),
            adapter_limit_bytes=0 if self._plan is None else self._plan.adapter_bytes,
        )

    # Training

    def create_adapter(self, adapter_id: str, base_model: str, lora: LoraConfig) -> Failure | None:
        try:
            self._check_base_model(base_model)
            checks.check_lora(lora, self._config.max_lora_rank)
            if adapter_id in self._adapters:
                raise ValidationError(f"an adapter called {adapter_id!r} exists already")
            self._decoder(base_model)
            self._check_room(self._pool(base_model).training_bytes(lora))
            self._adapters[adapter_id] = self._pool(base_model).create(base_model, lora)
        except (ValidationError, EngineError) as error:
            return _failure(error)
        return None

    def unload_adapter(self, adapter_id: str) -> None:
        adapter = self._adapters.pop(adapter_id, None)
        self._damaged.pop(adapter_id, None)
        if adapter is not None:
            self._pool(adapter.base_model).release(adapter)

    def run_passes(self, passes: Sequence[Pass]) -> PassResults:
        """Results as each pass is finished; None where other work may be done in between.

        A pass that is given up by closing the iterator has no effect.
        """
        by_model: dict[str, dict[int, Pass]] = {}
        refused: list[FinishedPass] = []
        for index, item in enumerate(passes):
            try:
                adapter = self._adapter(item.adapter_id)
                config = self._models.config(adapter.base_model)
                checked = checks.check_pass(
                    item,
                    vocab_size=config.vocab_size,
                    max_context_length=config.max_context_length,
                    images=config.images,
                )
                _check_choices(checked, config)
            except (ValidationError, EngineError) as error:
                refused.append(FinishedPass(index, _failure(error), 0.0))
            except Exception as error:  # whatever is wrong with one pass, others run
                self._ranks.give_up(error)
                logger.exception("a pass of adapter %r could not be checked", item.adapter_id)
                failure = Failure(f"the pass could not be checked: {error}", "server")
                refused.append(FinishedPass(index, failure, 0.0))
            else:
                by_model.setdefault(adapter.base_model, {})[index] = checked
        if not by_model:
            yield from refused
        for base_model, chosen in by_model.items():
            yield from self._run_on(base_model, chosen, refused)
            refused = []

    def _run_on(
        self, base_model: str, chosen: dict[int, Pass], refused: Sequence[FinishedPass]
    ) -> PassResults:
        """Run passes, each under its index in the call. Refusals are yielded once the model is in
        use: the caller does other work at each yield, which could take the model's room."""
        try:
            self._decoder(base_model)
        except EngineError as error:
            yield from refused
            for index in chosen:
                yield FinishedPass(index, _failure(error), 0.0)
            return
        indices, passes = list(chosen), list(chosen.values())
        scopes = {each.scope for each in passes}
        self._company.came(scopes)

        def is_shared() -> bool:
            has_others = len(scopes) > 1 or self._num_passing > 1 or self.is_sampling
            return has_others or self._company.has_others(scopes)

        with self._passing(), self._models.use(base_model) as decoder:
            yield from refused
            limits = BatchLimits.of(self._config, decoder, self._planned().pass_bytes)
            graphs = self._pass_graphs(decoder)
            for finished in run_passes(
                passes,
                self._adapters,
                decoder,
                self._config,
                limits,
                is_shared=is_shared,
                graphs=graphs,
            ):
                if self._device.type == "cuda" and self.is_sampling:
                    # Turns go by time, and kernels still in the queue have not taken theirs.
                    torch.cuda.synchronize(self._device)
                if finished is None:
                    self._company.batch_ended()
                yield finished and replace(finished, index=indices[finished.index])
        device_memory.give_back(self._device, self._planned().pass_bytes)

    def _pass_graphs(self, decoder: Decoder) -> PassGraphs | None:
        """Those of a base model, which go when it leaves memory; None where activations are not to
        be kept, which captured passes do."""
        if self._config.checkpoint_layers:
            return None
        if decoder not in self._graphs:
            pass_bytes = self._planned().pass_bytes
            self._graphs[decoder] = graphs_of(decoder, pass_bytes, self._graph_memory)
        return self._graphs[decoder]

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        self._num_passing += 1
        try:
            yield
        finally:
            self._num_passing -= 1

    def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        return [self._step(step) for step in steps]

    def _step(self, step: Step) -> dict[str, float] | Failure:
        try:
            adapter = self._adapter(step.adapter_id)
            metrics = adamw_step(adapter, step.params, cut_adapters.measure(adapter))
            self._make_room()
            return metrics
        except (ValidationError, EngineError) as error:
            return _failure(error)
        except Exception as error:
            self._ranks.give_up(error)
            return self._damage(step.adapter_id, "an optimizer step", error)

    # Adapters in files, and samplers

    def save(
        self, adapter_id: str, folder: Path, kind: SavedKind
    ) -> SavedAdapter | Failure | Later[SavedAdapter | Failure]:
        """What is written is the adapter as it is now; others need not wait for the disk."""
        try:
            adapter = self._adapter(adapter_id)
            if self._ranks.count == 1:
                save = checkpoints.begin_save(adapter, folder, kind)
                return Later(partial(_written, save, folder), folder)
        except (ValidationError, EngineError) as error:
            return _failure(error)
        # Ranks end a call together.
        return _written(partial(cut_adapters.save, adapter, folder, kind), folder)

    def restore(self, adapter_id: str, folder: Path, kind: SavedKind) -> SavedAdapter | Failure:
        try:
            if adapter_id not in self._adapters:
                raise ValidationError(f"no adapter called {adapter_id!r}")
            info = cut_adapters.load(self._adapters[adapter_id], folder, kind)
        except (ValidationError, EngineError) as error:
            return _failure(error)
        except Exception as error:
            return self._damage(adapter_id, "a restore", error)
        self._damaged.pop(adapter_id, None)
        return info

    def freeze(self, adapter_id: str, weights_id: str) -> Failure | None:
        try:
            adapter = self._adapter(adapter_id)
            self._check_sampler_is_new(weights_id)
            self._check_room(self._pool(adapter.base_model).sampling_bytes(adapter.lora))
        except (ValidationError, EngineError) as error:
            return _failure(error)
        copy = self._pool(adapter.base_model).copy(adapter)
        self._samplers[weights_id] = _Sampler(copy)
        return None

    def import_adapter(
        self, base_model: str, source: Path, folder: Path, kind: SavedKind
    ) -> ImportedAdapter | Failure:
        try:
            adapter = self._load(base_model, source)
            try:
                info = cut_adapters.save(adapter, folder, kind)
            finally:
                self._pool(base_model).release(adapter)
        except (ValidationError, EngineError) as error:
            return _failure(error)
        except OSError as error:
            return Failure(f"the adapter could not be written to {folder}: {error}", "server")
        return ImportedAdapter(lora=adapter.lora, size_bytes=info.size_bytes, files=info.files)

    def load_sampler(self, weights_id: str, base_model: str, folder: Path) -> Failure | None:
        try:
            self._check_sampler_is_new(weights_id)
            self._samplers[weights_id] = _Sampler(self._load(base_model, folder))
        except (ValidationError, EngineError) as error:
            return _failure(error)
        return None

    def _load(self, base_model: str, folder: Path) -> Adapter:
        """A new adapter with the weights of a checkpoint, whoever wrote it."""
        self._check_base_model(base_model)
        config = self._models.config(base_model)
        lora = self._ranks.first(lambda: checkpoints.read_lora(folder, config))
        checks.check_lora(lora, self._config.max_lora_rank)
        pool = self._pool(base_model)
        self._check_room(pool.sampling_bytes(lora))
        adapter = pool.create_empty(base_model, lora)
        try:
            cut_adapters.load(adapter, folder, "sampler")
        except BaseException:
            pool.release(adapter)
            raise
        return adapter

    def unload_sampler(self, weights_id: str) -> None:
        sampler = self._samplers.pop(weights_id, None)
        if sampler is not None:
            sampler.is_loaded = False
            self._release_if_unused(sampler)

    # Sampling

    @property
    def is_sampling(self) -> bool:
        return any(generator.busy for generator in self._generators.values())

    def submit_sample(self, job: SampleJob) -> Failure | None:
        """Take on a job; its events come from later sampling turns."""
        try:
            self._check_base_model(job.base_model)
            sampler = self._sampler(job)
            config = self._models.config(job.base_model)
            job = checks.check_sample(
                job,
                vocab_size=config.vocab_size,
                max_context_length=config.max_context_length,
                images=config.images,
            )
            if job.job_id in self._jobs:
                raise ValidationError(f"a sampling job called {job.job_id!r} is already under way")
            generator = self._generator(job.base_model)
        except (ValidationError, EngineError) as error:
            return _failure(error)
        self._models.pin(job.base_model)
        self._jobs[job.job_id] = (job.base_model, sampler)
        if sampler is not None:
            sampler.job_ids.add(job.job_id)
        self._company.came([job.scope])
        generator.submit(job, sampler.adapter if sampler is not None else None)
        return None

    def cancel(self, job_id: str) -> None:
        """Forget a job without a further event. Unknown ids are ignored."""
        if job_id in self._jobs:
            base_model, _ = self._jobs[job_id]
            self._generators[base_model].cancel(job_id)
            self._finish_job(job_id)

    def sampling_turn(self, *, ahead: bool = True) -> list[tuple[str, EngineSampleEvent]]:
        """One decoding step of every generator that has work; (job id, event) in order.

        With `ahead` the device may go on with what the next turn reports.
        """
        events = []
        for generator in self._generators.values():
            if generator.busy:
                before = generator.num_decoded
                events += generator.step(ahead=ahead)
                self._num_decoded += generator.num_decoded - before
        for job_id, event in events:
            if not isinstance(event, TokensSampled | ExpertsChosen):
                self._finish_job(job_id)
        return events

    def _finish_job(self, job_id: str) -> None:
        base_model, sampler = self._jobs.pop(job_id)
        self._models.unpin(base_model)
        if sampler is not None:
            sampler.job_ids.discard(job_id)
            self._release_if_unused(sampler)

    def _release_if_unused(self, sampler: _Sampler) -> None:
        if sampler.is_loaded or sampler.job_ids:
            return
        base_model = sampler.adapter.base_model
        if base_model in self._generators:
            self._generators[base_model].forget(sampler.adapter)
        self._pool(base_model).release(sampler.adapter)

    # Memory

    def _planned(self) -> MemoryPlan:
        """How memory is divided; made once, by all ranks together."""
        if self._plan is None:
            sizes, num_names = self._models.sizes(), len(self._models.names)
            self._plan = plan_memory(
                self._config, self._device, sizes, self._ranks, num_names=num_names
            )
        return self._plan

    def _check_room(self, num_bytes: int) -> None:
        """Refuse an adapter for which there is no memory, on all ranks if on one."""
        self._make_room(num_bytes)
        needed, held = self._ranks.numbers(num_bytes), self._ranks.numbers(self._adapter_bytes)
        self._planned().check_adapter(int(max(needed)), int(max(held)))

    def _make_room(self, num_bytes: int = 0) -> None:
        """Give back what adapters hold only to save time, where their share is too small for it."""
        if num_bytes > self._free_adapter_bytes():
            for generator in self._generators.values():
                generator.drop_stacks()
            for pool in self._pools.values():
                pool.drop_spares()

    @property
    def _adapter_bytes(self) -> int:
        return self._stack_bytes + sum(pool.nbytes for pool in self._pools.values())

    @property
    def _stack_bytes(self) -> int:
        return sum(generator.stack_bytes for generator in self._generators.values())

    def _free_adapter_bytes(self) -> int:
        """What is left of the adapters' share."""
        return self._planned().adapter_bytes - self._adapter_bytes

    # Finding things

    def _check_base_model(self, name: str) -> None:
        if name not in self._models.names:
            known = ", ".join(self._models.names) or "none"
            raise ValidationError(f"no base model called {name!r}; known: {known}")

    def _adapter(self, adapter_id: str) -> Adapter:
        if adapter_id not in self._adapters:
            raise ValidationError(f"no adapter called {adapter_id!r}")
        if adapter_id in self._damaged:
            raise EngineError(self._damaged[adapter_id])
        return self._adapters[adapter_id]

    def _damage(self, adapter_id: str, what: str, error: Exception) -> Failure:
        """An adapter may be half changed: refuse it until it has been restored or made anew."""
        logger.error("%s of adapter %r failed", what, adapter_id, exc_info=error)
        reason = (
            f"{what} of adapter {adapter_id!r} failed half-way ({type(error).__name__}: {error}); "
            "its state is in doubt until it is restored"
        )
        if adapter_id in self._adapters:
            self._damaged[adapter_id] = reason
        return Failure(reason, "server")

    def _sampler(self, job: SampleJob) -> _Sampler | None:
        if job.weights_id is None:
            return None
        if job.weights_id not in self._samplers:
            raise ValidationError(f"no sampler called {job.weights_id!r}")
        sampler = self._samplers[job.weights_id]
        if sampler.adapter.base_model != job.base_model:
            raise ValidationError(
                f"sampler {job.weights_id!r} belongs to base model "
                f"{sampler.adapter.base_model!r}, not {job.base_model!r}"
            )
        return sampler

    def _check_sampler_is_new(self, weights_id: str) -> None:
        if weights_id in self._samplers:
            raise ValidationError(f"a sampler called {weights_id!r} exists already")

    def _pool(self, base_model: str) -> AdapterPool:
        """Adapters stay when their base model leaves memory, so their memory is not the model's."""
        if base_model not in self._pools:
            config = self._models.config(base_model)
            dtype = dtype_of(self._config)
            self._pools[base_model] = adapter_pool(config, self._device, dtype, self._ranks)
        return self._pools[base_model]

    def _decoder(self, base_model: str) -> Decoder:
        if base_model not in self._models.loaded and self._config.memory_budget_bytes is not None:
            # A generator holds on to its model: idle ones let go before room is made.
            for name in [name for name, each in self._generators.items() if not each.busy]:
                self._generators.pop(name).close()
        return self._models.get(base_model)

    def _generator(self, base_model: str) -> Generator:
        decoder = self._decoder(base_model)
        if base_model not in self._generators:
            folder = self._models.folder(base_model)
            tokens = Tokens(folder, decoder.config.vocab_size)
            self._generators[base_model] = Generator(
                decoder,
                self._config,
                read_detokenize(folder),
                tokens,
                cache_bytes=self._planned().cache_bytes,
                adapter_stacks=AdapterStacks(self._planned().stack_bytes, self._free_adapter_bytes),
            )
        return self._generators[base_model]


def _routes_itself(config: DecoderConfig) -> bool:
    """Whether the model has experts, and routers that cannot be told where to send tokens."""
    has_experts = any(projection.experts is not None for projection in config.projections)
    return has_experts and config.routed is None


def _without_paths(text: str) -> str:
    """A text for those who may not know where files lie on this machine: names without folders."""
    return re.sub(r"(?<![\w.~])/(?:[^\s/'\":;,()]+/)+", "", text)


def _check_choices(request: Pass, config: DecoderConfig) -> None:
    for index, (datum, choices) in enumerate(zip(request.data, request.choices, strict=False)):
        if choices is not None:
            try:
                check_choices(choices, datum.model_input.length, config.routed)
            except ValidationError as error:
                raise error.under(f"data[{index}]") from None


def _failure(error: ValidationError | EngineError) -> Failure:
    return Failure(str(error), "user" if isinstance(error, ValidationError) else "server")


def _written(save: Callable[[], SavedAdapter], folder: Path) -> SavedAdapter | Failure:
    try:
        return save()
    except (ValidationError, EngineError) as error:
        return _failure(error)
    except OSError as error:
        return Failure(f"the adapter could not be written to {folder}: {error}", "server")
