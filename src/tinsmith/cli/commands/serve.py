"""`tinsmith serve`: run the service on this machine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.output import Output, with_output
from tinsmith.errors import TinkerError

if TYPE_CHECKING:
    from tinsmith.engine.base import Capabilities
    from tinsmith.engine.cluster import Cluster
    from tinsmith.server.config import ServerConfig
    from tinsmith.server.engines.slot import EngineFactory


@click.command("serve")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="A TOML file of settings."
)
@click.option("--host", help="Address to listen on (127.0.0.1).")
@click.option("--port", type=int, help="Port to listen on (8000; 0 takes a free one).")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where everything is kept.")
@click.option(
    "--model", "models", multiple=True, metavar="NAME[=SOURCE]", help="A base model to serve."
)
@click.option("--engine", help="Which engine does the mathematics: local or fake.")
@click.option("--device", help="auto, cpu, cuda or mps.")
@click.option("--engines", type=int, help="How many engine processes (one for each device).")
@click.option("--devices", help="Devices, dealt out to the engines in order: cuda:0,cuda:1.")
@click.option("--ranks", type=int, help="Divide each base model among so many processes (1).")
@click.option(
    "--roles", "engine_roles", help="Roles, dealt out to the engines in order: train, sample, both."
)
@click.option("--cluster", help="Run engines on other machines: auto or a Ray address, or manual.")
@click.option("--engine-host", help="Address that engines of a cluster connect to (127.0.0.1).")
@click.option(
    "--warm-up/--no-warm-up", default=None, help="Compile and load before it is ready (on CUDA)."
)
@click.option("--dtype", help="auto, float32 or bfloat16.")
@click.option("--base-weights", help="full, int8, fp8 or nf4: base models in less memory.")
@click.option(
    "--deterministic/--no-deterministic", default=None, help="Equal to the last bit; slower."
)
@click.option(
    "--on-policy", help="close, or exact: sampling and training agree in every bit; slower."
)
@click.option("--seed", type=int, help="Seed for adapters that are created without one.")
@click.option("--database-url", help="A Postgres URL instead of a file.")
@click.option(
    "--advertise", metavar="URL", help="Where other servers of the same database reach this one."
)
@click.option("--storage", help="Where weights are kept: s3://…, gs://…, az://… or file:///….")
@click.option(
    "--auth/--no-auth", default=None, help="Whether a key is required; without, only on loopback."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Any other setting.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="warning",
    show_default=True,
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@with_output
def command(
    output: Output,
    /,
    config_file: Path | None,
    models: tuple[str, ...],
    settings: tuple[str, ...],
    log_level: str,
    log_format: str,
    **options: Any,
) -> None:
    """Run the service. With no option at all it serves a small model on this machine.

    It prints how to reach it, and with --json the same as one object.
    """
    from tinsmith.assembly import engine_cluster, engine_factory
    from tinsmith.server.config_sources import load_config, parse_models
    from tinsmith.server.serving import run

    _log_to_stderr(log_level, log_format)
    try:
        for entry in settings:
            name, has_value, value = entry.partition("=")
            if not has_value:
                raise click.UsageError(f"--set takes NAME=VALUE, not {entry!r}")
            options[name.replace("-", "_")] = value
        if models:
            options["models"] = parse_models(models)
        config = load_config(config_file, options)

        def announce(url: str, key: str | None, link: str | None) -> None:
            _announce(output, config, url, key, link)

        def new_engines() -> tuple[EngineFactory, Cluster | None]:
            cluster = engine_cluster(config)
            return engine_factory(config, cluster), cluster

        run(config, new_engines, announce, _report_models)
    except TinkerError as error:
        raise click.ClickException(str(error)) from None


def _announce(
    output: Output, config: ServerConfig, url: str, key: str | None, link: str | None
) -> None:
    """The address and how to get in: a new key, where to make one, or that none is needed."""
    from tinsmith.transport.tokens import NO_KEY

    if not config.auth:
        key = NO_KEY
    if output.is_json:
        output.show_json({"base_url": url, "api_key": key, "console_url": link})
    else:
        click.echo(f"Tinsmith serves at {url}")
        click.echo(f"export TINKER_BASE_URL={url}")
        if key is not None:
            click.echo(f"export TINKER_API_KEY={key}")
        click.echo(_about_key(config, key))
        if link is not None:
            once = ", once and within 15 minutes" if config.auth else ""
            click.echo(f"See it in a browser{once}: {link}")
    sys.stdout.flush()


def _about_key(config: ServerConfig, key: str | None) -> str:
    if not config.auth:
        return "Without authentication any key will do; the official SDK requires one of this form."
    if key is not None:
        return "The key is shown this once; it is stored as a hash."
    from tinsmith.server.config import default_data_dir

    where = "" if config.data_dir == default_data_dir() else f" --data-dir {config.data_dir}"
    return (
        "Use the key of the first start, or make another (keys are stored as hashes): "
        f"tinsmith key create{where}"
    )


def _report_models(capabilities: Capabilities) -> None:
    """Name the models that are served, and those that are not, while the user is looking."""
    for served in capabilities.models:
        click.echo(
            f"Serves {served.name} ({served.max_context_length:,} tokens) on {capabilities.device}",
            err=True,
        )
    for model in capabilities.refused:
        click.echo(f"Not served: {model.name}: {model.reason}", err=True)
    if not capabilities.models:
        click.echo(
            "There is no model that can be served; name one with --model NAME[=SOURCE].", err=True
        )


def _log_to_stderr(level: str, form: str) -> None:
    from tinsmith.engine.local import progress
    from tinsmith.server.logs import TEXT_FORMAT, JsonFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Converting a model takes a while, and somebody is looking.
    progress.LOGGER.setLevel(logging.INFO)
