"""Bringing a database's tables up to date, from any released version.

Each change of the tables is a step in `migrations/versions`; alembic knows which have been taken.
A database with a step that is not among ours comes from a later version, and is left alone.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from tinsmith.server.store.errors import StoreTooNewError


def migrate(engine: sa.Engine) -> None:
    """Take the steps that are missing, all or none."""
    config = alembic_config()
    steps = ScriptDirectory.from_config(config)
    with engine.begin() as connection:
        present = version_of(connection)
        if present == steps.get_current_head():
            return
        known = {step.revision for step in steps.walk_revisions()}
        if present is not None and present not in known:
            raise StoreTooNewError(
                f"the database has version {present} of the tables, this software knows them up "
                f"to {steps.get_current_head()}: it was used by a later version, so use that one"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def version_of(connection: sa.Connection) -> str | None:
    """Which step a database's tables have reached."""
    return MigrationContext.configure(connection).get_current_revision()


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    # Alembic's default splits on spaces, which a path may contain.
    config.set_main_option("path_separator", "os")
    return config
