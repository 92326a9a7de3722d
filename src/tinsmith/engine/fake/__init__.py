"""The fake engine: the whole engine interface without torch, for tests and demonstrations."""

from tinsmith.engine.fake.config import FakeEngineConfig, FakeModel
from tinsmith.engine.fake.engine import FakeEngine

__all__ = ["FakeEngine", "FakeEngineConfig", "FakeModel"]
