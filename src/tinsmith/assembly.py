"""The one place that picks concrete parts: which engine a server gets.

Engines are imported when they are asked for, so that a server on the fake one needs no torch.
"""

from __future__ import annotations

from typing import Any

from tinsmith.engine.base import Engine
from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.engines import EngineFactory

ENGINES = ("fake", "local")


def engine_factory(config: ServerConfig) -> EngineFactory:
    """What starts the engine that the configuration names; called again when an engine died."""
    if config.engine == "fake":
        return lambda: _start_fake(config)
    if config.engine == "local":
        return lambda: _start_local(config)
    known = ", ".join(ENGINES)
    raise ValidationError(f"no engine called {config.engine!r}; known: {known}", "engine")


async def _start_fake(config: ServerConfig) -> Engine:
    from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel

    models = tuple(FakeModel(name=name) for name in config.models) or (FakeModel(),)
    return FakeEngine(
        FakeEngineConfig(
            models=models,
            pass_seconds=config.fake_pass_seconds,
            token_seconds=config.fake_token_seconds,
        )
    )


async def _start_local(config: ServerConfig) -> Engine:
    from tinsmith.engine.local.boundary.messages import Patience
    from tinsmith.engine.local.config import LocalEngineConfig
    from tinsmith.engine.local.engine import LocalEngine

    # The configuration's own checks know which words are allowed.
    settings: dict[str, Any] = {
        "device": config.device,
        "dtype": config.dtype,
        "deterministic": config.deterministic,
    }
    if config.models:
        settings["models"] = config.models
    patience = Patience(config.engine_silence_seconds, config.engine_turn_seconds)
    return await LocalEngine.start(LocalEngineConfig(**settings), patience=patience)
