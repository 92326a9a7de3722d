"""The fake engine: the whole engine interface without torch, for tests and demonstrations."""

from tinsmith.engine.fake.engine import FakeEngine, FakeEngineConfig, FakeModel

__all__ = ["FakeEngine", "FakeEngineConfig", "FakeModel"]
