"""SQLite's write-ahead log is copied back beside the commits, and not by one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinsmith.server.store.database import create_engine
from tinsmith.server.store.wal import WalKeeper

MANY_BYTES = 6 * 2**20
"""More than the 4 MB after which SQLite's own commits copy back."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'store.db'}")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE t (x BLOB)"))
    yield engine
    engine.dispose()


def add(engine: sa.Engine, num_bytes: int) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO t VALUES (:x)"), {"x": b"x" * num_bytes})


def test_commits_leave_the_log_to_the_thread(engine: sa.Engine, tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    for _ in range(6):
        add(engine, MANY_BYTES // 6)
    assert file.stat().st_size < MANY_BYTES // 6, "a commit has copied it back"
    keeper = WalKeeper(engine, seconds=0.01)
    keeper.committed()
    deadline = time.monotonic() + 30
    while file.stat().st_size < MANY_BYTES:
        assert time.monotonic() < deadline, "nobody has copied it back"
        time.sleep(0.01)
    keeper.close()


def test_who_reads_or_writes_meanwhile_is_not_disturbed(engine: sa.Engine) -> None:
    others = set(threading.enumerate())
    keeper = WalKeeper(engine, seconds=0.0)
    for number in range(1, 51):
        add(engine, 10_000)
        keeper.committed()
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT count(*) FROM t")) == number
    keeper.close()
    assert not [each for each in set(threading.enumerate()) - others if each.name == "store-wal"]


def test_trouble_of_the_database_does_not_end_the_thread(
    engine: sa.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = WalKeeper(engine, seconds=0.0)
    blocker = engine.raw_connection()
    engine.dispose()
    (tmp_path / "store.db").rename(tmp_path / "moved.db")
    (tmp_path / "store.db").mkdir()
    keeper.committed()
    deadline = time.monotonic() + 30
    while "could not be copied back" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    blocker.close()
    keeper.close()
