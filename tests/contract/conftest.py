"""The engines and the stores that the contracts are tried on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa

from tests.support.databases import (  # fixtures among them
    database_url,  # noqa: F401
    postgres_url,  # noqa: F401
    provide_tables,
)
from tests.support.engine_calls import create, running
from tinsmith.engine.base import Engine
from tinsmith.server.store.store import Store


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(
    scope="session",
    params=[
        "fake",
        "local",
        pytest.param("remote", marks=pytest.mark.slow),
        pytest.param("two_ranks", marks=pytest.mark.slow),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(kind: str, model_folder: Path) -> AsyncIterator[Engine]:
    """Shared by all tests, which use names of their own for what they create."""
    async with running(kind, model_folder) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def adapter(engine: Engine) -> AsyncIterator[str]:
    name = await create(engine)
    yield name
    await engine.unload_adapter(name)


@pytest.fixture
async def store(database_url: str, tmp_path: Path) -> AsyncIterator[Store]:  # noqa: F811
    if (url := sa.make_url(database_url)).get_backend_name() == "sqlite":
        provide_tables(Path(str(url.database)))
    store = Store(database_url, tmp_path / "blobs")
    yield store
    await store.close()
