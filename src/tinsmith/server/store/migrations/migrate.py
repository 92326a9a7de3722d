"""Bringing a database's tables up to date, from any released version.

Each change of the tables is a step in `versions`; alembic knows which have been taken.
A database with a step that is not among ours comes from a later version, and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from tinsmith.server.store.errors import StoreTooNewError

_LOCK_NUMBER = 0x71A5_1715
"""What is locked in a Postgres database while its tables are changed."""


def migrate(
    engine: sa.Engine, fence: Callable[[sa.Connection], object] = lambda connection: None
) -> None:
    """Take the steps that are missing, all or none; `fence` says first whether we may."""
    config = alembic_config()
    with engine.begin() as connection:
        fence(connection)
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_NUMBER)))
        if not is_behind(connection):
            return
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def is_behind(connection: sa.Connection) -> bool:
    """Whether a database's tables lack steps of ours; one of a later version is refused."""
    steps = _steps()
    present = version_of(connection)
    if present == steps.get_current_head():
        return False
    known = {step.revision for step in steps.walk_revisions()}
    if present is not None and present not in known:
        raise StoreTooNewError(
            f"the database has version {present} of the tables; this release knows them up "
            f"to {steps.get_current_head()}; start the later release that it was used with"
        )
    return True


@cache
def _steps() -> ScriptDirectory:
    """Reading them takes longer than all else that is done when a server takes over."""
    return ScriptDirectory.from_config(alembic_config())


def version_of(connection: sa.Connection) -> str | None:
    """Which step a database's tables have reached."""
    return MigrationContext.configure(connection).get_current_revision()


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    # Alembic's default splits on spaces, which a path may contain.
    config.set_main_option("path_separator", "os")
    return config
