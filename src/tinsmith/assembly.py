"""The one place that picks concrete parts: which engines a server gets, and where they run.

Engines are imported when they are asked for, so that a server on the fake one needs no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinsmith.engine.base import Engine
from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.config_sources import check_settings
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.slot import EngineFactory

if TYPE_CHECKING:
    from tinsmith.engine.local.config import LocalEngineConfig
    from tinsmith.engine.ray.ray_placer import RayPlacer
    from tinsmith.engine.remote.cluster import RemoteCluster

ENGINES = ("fake", "local")


def engine_factory(config: ServerConfig, cluster: RemoteCluster | None = None) -> EngineFactory:
    """A factory that starts the configured engine for a slot, in the cluster if there is one. It is
    called again when an engine has died."""
    if cluster is not None and config.engine != "local":
        raise ValidationError(
            f"works with the local engine only, not with {config.engine!r}", "cluster"
        )
    if config.engine == "fake":
        return _fake_factory(config)
    if config.engine == "local":
        return _local_factory(config, cluster)
    known = ", ".join(ENGINES)
    raise ValidationError(f"no engine called {config.engine!r}; known: {known}", "engine")


def engine_cluster(config: ServerConfig) -> RemoteCluster | None:
    """The cluster that runs the engines; None where they are child processes of the server."""
    if not config.cluster:
        return None
    from tinsmith.engine.remote.cluster import RemoteCluster
    from tinsmith.engine.remote.listener import EngineListener

    if ":" in config.devices:
        raise ValidationError(
            "cannot name numbers, as in cuda:0, together with 'cluster', which assigns the devices",
            "devices",
        )
    if config.engine_host in ("0.0.0.0", "::"):
        raise ValidationError(
            "must be an address of this machine that the engines' machines can reach, not a "
            "wildcard",
            "engine_host",
        )
    folder = config.data_dir.absolute() / "engines"
    listener = EngineListener(config.engine_host, config.engine_port, folder)
    return RemoteCluster(listener, None if config.cluster == "manual" else _ray_placer(config))


def _ray_placer(config: ServerConfig) -> RayPlacer:
    from tinsmith.engine.ray.config import check_ray
    from tinsmith.engine.ray.ray_placer import RayPlacer

    check_ray()
    num_gpus = config.engine_gpus
    if num_gpus is None:
        num_gpus = float(config.ranks) if "cuda" in (config.device, config.devices) else 0.0
    return RayPlacer(config.cluster, config.engine_cpus, num_gpus)


def _fake_factory(config: ServerConfig) -> EngineFactory:
    from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel

    passed_on = {
        "models": tuple(FakeModel(name=name) for name in config.models) or (FakeModel(),),
        "pass_seconds": config.fake_pass_seconds,
        "token_seconds": config.fake_token_seconds,
    }
    renamed = {"pass_seconds": "fake_pass_seconds", "token_seconds": "fake_token_seconds"}
    settings = FakeEngineConfig(**_engine_settings(FakeEngineConfig, config, passed_on, renamed))

    async def start(plan: SlotPlan) -> Engine:
        return FakeEngine(settings)

    return start


def _local_factory(config: ServerConfig, cluster: RemoteCluster | None) -> EngineFactory:
    from tinsmith.engine.local.boundary.messages import Patience, Start
    from tinsmith.engine.local.config import LocalEngineConfig
    from tinsmith.engine.local.engine import LocalEngine, core_of

    passed_on: dict[str, Any] = {
        "device": config.device,
        "dtype": config.dtype,
        "base_weights": config.base_weights,
        "deterministic": config.deterministic,
        "on_policy": config.on_policy,
        "router_replay": config.router_replay,
        "ranks": config.ranks,
        **({"models": config.models} if config.models else {}),
    }
    settings = LocalEngineConfig(**_engine_settings(LocalEngineConfig, config, passed_on))
    patience = Patience(config.engine_silence_seconds, config.engine_turn_seconds)

    async def start_in_cluster(plan: SlotPlan) -> Engine:
        assert cluster is not None, "chosen only with a cluster"
        threads = settings.num_threads or (None if settings.deterministic else config.engine_cpus)
        device = plan.device.partition("+")[0]
        own: dict[str, Any] = {
            "device": device,
            "num_threads": threads,
            "memory_fraction": settings.memory_fraction * _part_of_gpu(config),
        }
        config_of_slot = dataclasses.replace(settings, **own)
        start = Start(core_of(settings), config_of_slot, patience)
        return await cluster.start(plan.number, start)

    async def start(plan: SlotPlan) -> Engine:
        devices = [device.partition(":") for device in plan.device.split("+")]
        own: dict[str, Any] = {
            "device": devices[0][0],
            "num_threads": _num_threads(settings, plan),
            "memory_fraction": settings.memory_fraction / plan.num_on_device,
        }
        return await LocalEngine.start(
            dataclasses.replace(settings, **own),
            patience=patience,
            cuda_devices=[int(number) for _, _, number in devices if number],
        )

    return start if cluster is None else start_in_cluster


def _num_threads(settings: LocalEngineConfig, plan: SlotPlan) -> int | None:
    """Engine processes share the cores evenly: if each used all of them, they would wait for one
    another at every operation. In deterministic mode one thread is the engine's own choice."""
    num_processes = plan.num_slots * settings.ranks
    if settings.num_threads is not None or settings.deterministic or num_processes == 1:
        return settings.num_threads
    return max(1, _num_cores() // num_processes)


def _part_of_gpu(config: ServerConfig) -> float:
    """An engine that asks the cluster for a fraction of a GPU gets that fraction of its memory."""
    if not config.engine_gpus:
        return 1.0
    return min(1.0, config.engine_gpus / config.ranks)


def _num_cores() -> int:
    """Cores that this process may use; where the system does not say (macOS), all of them."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def _engine_settings(
    kind: type,
    config: ServerConfig,
    passed_on: Mapping[str, Any],
    renamed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The `engine.NAME` settings, and those that the server passes on under names of its own."""
    for name in config.engine_settings.keys() & {*passed_on, "models"}:
        own = (renamed or {}).get(name, name)
        raise ValidationError(f"is set as {own!r}, without 'engine.'", f"engine.{name}")
    return {**check_settings(kind, config.engine_settings, "engine."), **passed_on}
