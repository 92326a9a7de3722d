"""Where stores can be: an SQLite file, and a real Postgres in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinsmith.server.store.database import create_engine, sqlite_url
from tinsmith.server.store.migrations.migrate import migrate


def provide_tables(file: Path) -> None:
    """Make an SQLite file what a first start makes of it, if there is none: all tables, no rows.

    To take every step of the migrations costs more than all else that starts a server.
    """
    if not file.exists():
        file.write_bytes(_tables())


@cache
def _tables() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "store.db"
        engine = create_engine(sqlite_url(file))
        migrate(engine)
        engine.dispose()
        return file.read_bytes()


def _as_postgres_user() -> list[str]:
    """Postgres refuses to run as root; its own user does."""
    if os.geteuid() != 0:
        return []
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("Postgres does not run as root, and there is no user called postgres")
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    binaries = [Path(p) for p in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    folder = next((b for b in binaries if (b / "initdb").exists()), None)
    if folder is None:
        pytest.skip("Postgres is not installed (Debian: apt install postgresql)")
    pytest.importorskip("psycopg", reason="the Postgres driver is not installed")
    prefix = _as_postgres_user()
    root = Path(subprocess.check_output([*prefix, "mktemp", "-d"], text=True).strip())
    data = root / "data"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
    # Nothing is to survive a power cut: no test waits for the disk.
    made = ["--no-sync", "-D", str(data), "-U", "t", "-A", "trust", "-E", "UTF8"]
    subprocess.run(
        [*prefix, str(folder / "initdb"), *made],
        check=True,
        **quiet,  # type: ignore[call-overload]  # plain keywords of run
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["-h", "127.0.0.1", "-p", str(port), "-k", str(root), "-c", "fsync=off"]
    server = subprocess.Popen(
        [*prefix, str(folder / "postgres"), "-D", str(data), *options],
        **quiet,  # type: ignore[call-overload]  # plain keywords of Popen
    )
    url = f"postgresql+psycopg://t@127.0.0.1:{port}/postgres"
    try:
        _wait_for(url)
        yield url
    finally:
        server.send_signal(signal.SIGINT)  # Postgres's fast stop
        server.wait(timeout=20)
        shutil.rmtree(root, ignore_errors=True)


def _wait_for(url: str) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    for _ in range(200):
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            time.sleep(0.05)
    raise AssertionError("Postgres did not start")


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, once of each kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_url")
    return emptied(url)


def emptied(url: str) -> str:
    """A Postgres database, with nothing in it any more."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    return url
