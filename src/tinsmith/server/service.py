"""The service: its parts put together, started and stopped in order.

Routes get this object, and reach the parts through it. What needs doing now and then (expiry,
sweeping, counting) is done by one housekeeping task here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tinsmith.engine.base import BaseModelInfo, Capabilities, RefusedModel
from tinsmith.engine.cluster import Cluster
from tinsmith.errors import EngineError
from tinsmith.server.chat.forms import FormChecks
from tinsmith.server.chat.text import TextModels
from tinsmith.server.checkpoints import Checkpoints
from tinsmith.server.config import ServerConfig
from tinsmith.server.console.browsers import Browsers
from tinsmith.server.console.events import Events
from tinsmith.server.console.posting import Posted
from tinsmith.server.console.sample_examples import SampledExamples
from tinsmith.server.console.watching import watch
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.admission import Admission
from tinsmith.server.edge.auth import KEY_CHANGES, Auth
from tinsmith.server.edge.sockets import Sockets
from tinsmith.server.edge.workers import Workers
from tinsmith.server.engines.draining import Draining
from tinsmith.server.engines.likeness import alike
from tinsmith.server.engines.plan import slot_plans
from tinsmith.server.engines.pool import EnginePool
from tinsmith.server.engines.slot import EngineFactory, Slot
from tinsmith.server.engines.warm_up import warmed
from tinsmith.server.futures import Promises
from tinsmith.server.imports import Imports
from tinsmith.server.metadata import MetadataRoom
from tinsmith.server.metrics import Metrics
from tinsmith.server.operations.dispatcher import Dispatcher
from tinsmith.server.operations.endings import Endings
from tinsmith.server.operations.execution import Executor
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.live_models import LiveModels
from tinsmith.server.operations.recorder import Recorder
from tinsmith.server.operations.runner import Free
from tinsmith.server.operations.scheduler import Scheduler
from tinsmith.server.operations.snapshots import Snapshots
from tinsmith.server.operations.uploaded_losses import UploadedLosses
from tinsmith.server.sampling.loaded import LoadedSamplers
from tinsmith.server.sampling.requests import Sampling
from tinsmith.server.sampling.samplers import Samplers
from tinsmith.server.sampling.stats import SamplerStats
from tinsmith.server.sessions import Sessions
from tinsmith.server.storage import binding
from tinsmith.server.storage.opening import open_storage
from tinsmith.server.store.records import ModelRecord, StepRecord, StepSource
from tinsmith.server.store.store import Store
from tinsmith.server.tracing import Spans
from tinsmith.server.tuning import TUNING, Tuning
from tinsmith.server.uploads import Uploads
from tinsmith.server.usage import Usage
from tinsmith.server.weights import WeightsFolders
from tinsmith.wire.limits import Limits

logger = logging.getLogger(__name__)

_ROUNDS_PER_RESULT_SWEEP = 12
_FORGET_SECONDS = 300.0
_DRAIN_SECONDS = 30.0
_UNDRAWN_STEPS = 8192
"""Steps that a run has before they are merged into blocks: reading this many takes 30 ms."""

_RECENT_RESULT_BYTES = 64 * 1024 * 1024
"""Memory for results of training operations; the store has them all."""


_NO_SPANS = Spans()


class Service:
    def __init__(
        self,
        config: ServerConfig,
        store: Store,
        secret: bytes,
        engine_factory: EngineFactory,
        metrics: Metrics,
        spans: Spans = _NO_SPANS,
        cluster: Cluster | None = None,
        *,
        epoch: int | None = None,
        sockets: Sockets | None = None,
        tuning: Tuning = TUNING,
    ) -> None:
        """`epoch` is that of the lease, where several servers share a store; `sockets` are those
        of the process, where it has had connections before."""
        self.epoch = epoch
        self.config = config
        self._tuning = tuning
        self.store = store
        self.metrics = metrics
        self.spans = spans
        self.cluster = cluster
        """Where the engines run, if not as processes of this server."""
        self.limits = Limits(max_body_bytes=config.max_body_bytes, allows_nul=False)
        self.admission = Admission(
            config.max_active_requests,
            config.max_active_body_bytes,
            config.key_max_requests_per_second,
        )
        self.sockets = sockets or Sockets(config.max_connections)
        self.workers = Workers("bodies")
        self.texts = Workers("texts", num_threads=4)
        """For chats that are read and answered, and curves and examples that are written."""
        self.disk = Workers("disk", num_threads=4)
        """For files that owners send, fetch or have encrypted: a large one takes seconds."""
        changes = Path(config.data_dir) / KEY_CHANGES
        self.auth = Auth(store, secret, is_required=config.auth, changes=changes)
        self.browsers = Browsers(store, self.auth)
        self.events = Events(store, tuning)
        self.posted = Posted(store, config.key_max_posted_bytes)
        self.folder = DataFolder(config.data_dir)
        self.storage = open_storage(config)
        self.weights = WeightsFolders(self.storage, store)
        self.engines = EnginePool(
            slot_plans(config, epoch or 0),
            warmed(
                alike(engine_factory) if config.deterministic else engine_factory, config.warm_up
            ),
            self.weights.sweep_drafts,
            lambda: LoadedSamplers(self.weights.reading, config.max_loaded_samplers),
            tuning.health_seconds,
        )
        self.promises = Promises(_RECENT_RESULT_BYTES)
        self.models = LiveModels(store, self.promises, tuning.history_bytes)
        self.sessions = Sessions(store, self.models, config)
        self.metadata = MetadataRoom(store, config.key_max_metadata_bytes, tuning.count_pause)
        self.checkpoints = Checkpoints(store, self.weights, self.metadata)
        self.uploads = Uploads(self.folder.uploads, config.key_max_upload_bytes, self.disk, epoch)
        self.imports = Imports(
            store, self.uploads, self.weights, self.checkpoints, self.engines, self.metadata
        )
        self.samplers = Samplers(store)
        self.usage = Usage(store)
        self.sampler_stats = SamplerStats(store)
        self.sampled_examples = SampledExamples(store, config.keep_examples)
        self.text_models = TextModels()
        self.forms = FormChecks()
        self.sampling = Sampling(
            engines=self.engines,
            usage=self.usage,
            stats=self.sampler_stats,
            examples=self.sampled_examples,
            metrics=metrics,
            config=config,
            tuning=tuning,
            spans=spans,
            on_sample=lambda s: self.events.changed_often(s.owner, "sample", s.model_id),
        )
        self.recorder = Recorder(
            store,
            self.models,
            self.promises,
            self.workers,
            self._queued,
            config.max_queued_memory_bytes,
            spans,
        )
        self.losses = UploadedLosses(store.losses)
        executor = Executor(
            store,
            self.weights,
            self.checkpoints,
            self.metadata,
            self.losses,
            # Requests that an earlier release recorded are replayed as they are.
            dataclasses.replace(self.limits, allows_nul=True),
            self.workers,
            self.disk,
        )
        self.snapshots = Snapshots(store, self.weights, config)
        endings = Endings(
            store=store,
            weights=self.weights,
            models=self.models,
            promises=self.promises,
            snapshots=self.snapshots,
            usage=self.usage,
            metrics=metrics,
            on_step=self.recorded,
            spans=spans,
        )

        def new_scheduler(slot: Slot, let_go: Free) -> Scheduler:
            return Scheduler(
                store=store,
                slot=slot,
                endings=endings,
                executor=executor,
                snapshots=self.snapshots,
                metrics=metrics,
                config=config,
                tuning=tuning,
                let_go=let_go,
                take_history=self.models.take_history,
            )

        self.scheduler = Dispatcher(
            self.engines,
            self.models,
            new_scheduler,
            Draining(Path(config.data_dir)),
            config.engine_lost_seconds,
        )
        self.retrieved: dict[str, float] = {}
        """Results of training operations that were fetched, not yet written down."""
        self._undrawn: Counter[tuple[str, StepSource]] = Counter()
        """How many steps of a run are not in its curves' blocks yet."""
        self.started_at = time.time()
        self.url = ""
        """What clients call this server; set once it listens."""
        self.is_draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._add_gauges()

    async def start(self) -> None:
        await self.weights.sweep_unknown(is_start=True)
        await asyncio.to_thread(self.uploads.clear)
        await self.storage.sweep_trash(self.store.confirm)
        await self.engines.start()
        await self.sessions.welcome_back()
        lately = min(_FORGET_SECONDS, self.config.session_timeout_seconds)
        await self.models.bring_back(time.time() - lately, self.config.max_loaded_models)
        looks = {"server": self._engines_at_a_glance, "key": self.auth.last_change}
        self._tasks = [
            asyncio.create_task(self.scheduler.run(), name="scheduler"),
            asyncio.create_task(self._keep_house(), name="housekeeping"),
            asyncio.create_task(self.admission.watch_lag(), name="lag"),
            asyncio.create_task(watch(self.events, looks), name="watching"),
        ]

    def begin_drain(self) -> None:
        """No longer hold polls open; called when the server has been asked to stop."""
        self.is_draining = True
        self.promises.close()
        self.events.close()
        self.sampling.begin_drain()

    async def stop(self) -> None:
        """Finish what the engine has in hand, record it, and let go of everything."""
        self.begin_drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.sampling.close()
        await self.imports.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self.scheduler.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                for model in self.models:
                    await model.recorded()
        try:
            await self.tidy()
            await binding.advance(self.storage, self.store)
        except Exception:
            logger.exception("the last housekeeping failed")
        await self._let_go()

    async def abandon(self) -> None:
        """Let go of everything as it is: another server has taken over."""
        self.begin_drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._let_go()

    async def _let_go(self) -> None:
        await self.engines.close()
        if self.cluster is not None:
            await self.cluster.close()
        self.workers.close()
        self.forms.close()
        self.texts.close()
        self.disk.close()
        await self.store.close()
        await asyncio.to_thread(self.spans.close)

    async def capabilities(self) -> Capabilities:
        """What the engine can do; waits, but not for ever, for the first engine to be up."""
        if self.engines.capabilities is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.hold_seconds):
                    await self.engines.first()
        if self.engines.capabilities is None:
            raise EngineError(self.engines.trouble)
        return self.engines.capabilities

    async def base_model(self, name: str) -> BaseModelInfo | None:
        return next((m for m in (await self.capabilities()).models if m.name == name), None)

    def why_refused(self, name: str) -> str | None:
        """Why the engine does not serve a base model that it was asked to serve."""
        return next((m.reason for m in self.refused_models if m.name == name), None)

    @property
    def refused_models(self) -> tuple[RefusedModel, ...]:
        """Those that were asked for and that the engine cannot serve."""
        capabilities = self.engines.capabilities
        return () if capabilities is None else capabilities.refused

    @property
    def trouble(self) -> str | None:
        """Why the server is not ready, in words that anybody may read; None if it is."""
        if self.is_draining:
            return "the server is stopping"
        if not self.engines.is_up:
            return f"the engine is {'restarting' if self.engines.has_been_up else 'starting'}"
        capabilities = self.engines.capabilities
        if capabilities is not None and not capabilities.models:
            return "there is no model that can be served"
        return None

    async def tidy(self) -> None:
        """What is done every few seconds: expiry, counting, sweeping."""
        now = time.time()
        retrieved, self.retrieved = self.retrieved, {}
        await self.store.log.mark_retrieved(retrieved)
        await self.usage.flush()
        await self.sampler_stats.flush()
        await self.sampled_examples.flush()
        await self.draw_curves()
        await self.sessions.sweep()
        for session_id in await self.sessions.without_samplers():
            await self.samplers.forget(session_id)
        for checkpoint in await self.checkpoints.delete_expired():
            self.events.checkpoint_changed(checkpoint)
        await self.uploads.sweep()
        await self.weights.sweep()
        await self.sampling.give_up_abandoned(self.sessions.silence)
        self.sampling.expire()
        self.promises.expire(retrieved_before=now - 60, finished_before=now - 600)
        self.models.forget_idle(now - _FORGET_SECONDS)

    def _queued(self, model: LiveModel) -> None:
        """An operation of a model is on disk and waits for its turn."""
        self.scheduler.wake(model)
        self.events.changed_often(model.owner, "queue", model.model_id)

    def _engines_at_a_glance(self) -> object:
        """Changes whenever the console should show the engines anew."""
        return self.trouble, [(slot.state, slot.num_restarts) for slot in self.engines.slots]

    def recorded(self, model: ModelRecord, number: int, step: StepRecord) -> None:
        """An end, or metrics that a client posted, is on disk under a number."""
        self._undrawn[model.model_id, step.source] += 1
        self.events.recorded(model, number, step)

    async def draw_curves(self) -> None:
        """Merge the steps of runs that have many new ones into their curves' blocks; of those that
        are no longer used, also what earlier servers left. A few are read as they are."""
        for (model_id, source), count in list(self._undrawn.items()):
            if count >= _UNDRAWN_STEPS or not self.models.is_live(model_id):
                del self._undrawn[model_id, source]
                await self.store.curves.draw(model_id, source, least=_UNDRAWN_STEPS)

    async def tidy_results(self) -> None:
        """What is done every minute or so, because it looks at everything that is kept."""
        now = time.time()
        # First of all: a storage that belongs to another store by now is not tidied.
        await binding.advance(self.storage, self.store)
        if all(model.committing is None for model in self.models):
            # During a commit a folder may be waiting for its record, however long the store was
            # away.
            await self.weights.sweep_unknown()
        await self.storage.empty_trash(
            now - self.config.trash_seconds,
            self.config.key_max_stored_bytes,
            self.store.file_names,
        )
        await self.sessions.retire_models()
        await self.store.retention.drop_results(
            retrieved_before=now - self.config.retrieved_retention_seconds,
            finished_before=now - self.config.training_retention_seconds,
            max_bytes=self.config.training_result_bytes,
        )
        await self.store.retention.trim(
            keep=self.config.log_keep_operations,
            ended_before=now - self.config.training_retention_seconds,
        )
        await self.losses.delete_unused(now - self.config.loss_retention_seconds)

    async def _keep_house(self) -> None:
        for round_number in itertools.count(1):
            await asyncio.sleep(self._tuning.housekeeping_seconds)
            try:
                await self.tidy()
                if round_number % _ROUNDS_PER_RESULT_SWEEP == 0:
                    await self.tidy_results()
            except Exception:
                logger.exception("housekeeping failed; it will be tried again")

    def _add_gauges(self) -> None:
        gauges: dict[str, Callable[[], float]] = {
            "connections": lambda: self.sockets.total,
            "active_requests": lambda: self.admission.requests.total,
            "event_loop_lag_seconds": lambda: self.admission.lag_seconds,
            "active_body_bytes": lambda: self.admission.body_bytes.total,
            "queued_operations": lambda: sum(len(m.queue) for m in self.models),
            "live_models": lambda: len(self.models),
            "loaded_models": lambda: sum(model.is_loaded for model in self.models),
            "running_samples": lambda: self.sampling.num_running,
            "sample_result_bytes": lambda: self.sampling.promises.nbytes,
            "kept_experts_bytes": lambda: (
                0 if self.sampling.experts is None else self.sampling.experts.num_bytes
            ),
            "event_streams": lambda: self.events.num_readers,
            "engine_up": lambda: float(self.engines.is_up),
            "engine_restarts": lambda: self.engines.num_restarts,
            "engine_busy_seconds": lambda: self.engines.health.busy_seconds,
            "engine_decoded_tokens": lambda: self.engines.health.decoded_tokens,
            "engine_memory_bytes": lambda: self.engines.health.memory_bytes,
            "engine_weights_bytes": lambda: self.engines.health.weights_bytes,
            "engine_cache_bytes": lambda: self.engines.health.cache_bytes,
            "engine_cache_limit_bytes": lambda: self.engines.health.cache_limit_bytes,
            "engine_adapter_bytes": lambda: self.engines.health.adapter_bytes,
            "engine_adapter_limit_bytes": lambda: self.engines.health.adapter_limit_bytes,
        }
        for name, read in gauges.items():
            self.metrics.gauge(name, read)
        for slot in self.engines.slots:
            for name, read in _slot_gauges(slot).items():
                self.metrics.gauge(name, read, slot=str(slot.number))


def _slot_gauges(slot: Slot) -> dict[str, Callable[[], float]]:
    return {
        "slot_up": lambda: float(slot.is_up),
        "slot_restarts": lambda: slot.num_restarts,
        "slot_models": lambda: len(slot.models),
        "slot_running_samples": lambda: slot.num_jobs,
        "slot_busy_seconds": lambda: slot.health.busy_seconds,
        "slot_memory_bytes": lambda: slot.health.memory_bytes,
    }
