"""The server of this machine, for commands that work on its data folder and store themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinsmith.cli.failures import CommandError

if TYPE_CHECKING:
    from tinsmith.server.config import ServerConfig
    from tinsmith.server.store.store import Store

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def which_server(function: F) -> F:
    """The options that say which server is meant; the same as those of `serve`."""
    for option in (
        click.option("--storage", help="The server's object storage, if it uses one."),
        click.option("--database-url", help="The server's Postgres URL, if it uses one."),
        click.option(
            "--data-dir", type=click.Path(path_type=Path), help="The server's data folder."
        ),
        click.option(
            "--config", "config_file", type=click.Path(path_type=Path), help="Its settings file."
        ),
    ):
        function = option(function)
    return function


def config_of(config_file: Path | None, **options: Any) -> ServerConfig:
    """The settings of the server that those options mean."""
    from tinsmith.server.config_sources import load_config

    config = load_config(config_file, options)
    if config.database_url is None and not config.data_dir.exists():
        raise CommandError(
            f"There is no data folder {config.data_dir}",
            "Give the server's with --data-dir, or start it once: tinsmith serve",
        )
    return config


def with_store(config: ServerConfig, use: Callable[[Store], Awaitable[T]]) -> T:
    """Do something with the server's store, whether or not the server runs."""
    from tinsmith.server.serving import open_store

    async def run() -> T:
        store = await asyncio.to_thread(open_store, config)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())
