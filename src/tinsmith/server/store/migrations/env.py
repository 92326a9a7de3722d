"""Runs the steps on the connection that `migrate` gives; alembic loads this file by its name."""

from __future__ import annotations

from alembic import context

from tinsmith.server.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
