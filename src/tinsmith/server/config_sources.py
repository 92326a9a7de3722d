"""Where the server's settings come from, and their checks.

They come from defaults, a TOML file, the environment (`TINSMITH_` and the name in capitals) and the
command line, each overriding the one before.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from tinsmith.errors import ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.transport.config import CLIENT_VARIABLES
from tinsmith.types.convert import converter

ENVIRONMENT_PREFIX = "TINSMITH_"

_ENGINE_PREFIX = "engine."


def load_config(
    file: Path | None = None,
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServerConfig:
    """The settings of this process; `options` are those of the command line."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values |= _flat(tomllib.loads(file.read_text()))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValidationError(f"cannot read the settings in {file}: {error}") from None
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in CLIENT_VARIABLES:
            # A variable's name cannot have a dot.
            values[name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")] = text
    values |= {name: value for name, value in (options or {}).items() if value is not None}
    return build_config(values)


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file; those of its `[engine]` table as `engine.NAME`."""
    engine = table.get("engine")
    if not isinstance(engine, dict):
        return table
    others = {name: value for name, value in table.items() if name != "engine"}
    return others | {_ENGINE_PREFIX + name: value for name, value in engine.items()}


def build_config(values: Mapping[str, Any]) -> ServerConfig:
    """A config of plain values, as a file or the environment has them."""
    # A file that has an `[engine]` table says there which engine it is.
    kind = f"{_ENGINE_PREFIX}kind"
    values = {("engine" if name == kind else name): value for name, value in values.items()}
    engine = {n: v for n, v in values.items() if n.startswith(_ENGINE_PREFIX)}
    settings = check_settings(ServerConfig, {n: values[n] for n in values.keys() - engine.keys()})
    if engine:
        settings["engine_settings"] = {n.removeprefix(_ENGINE_PREFIX): v for n, v in engine.items()}
    return ServerConfig(**settings)


def check_settings(kind: type, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of a configuration class by name, each of the type that its field has.

    `prefix` is what users write before the names.
    """
    hints = get_type_hints(kind)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"; did you mean '{prefix}{near[0]}'?" if near else ""
            raise ValidationError(f"there is no setting called '{prefix}{name}'{hint}")
        checked[name] = _checked(prefix + name, value, hints[name])
    return checked


def _checked(name: str, value: Any, annotation: Any) -> Any:
    if annotation is Path:
        return Path(value).expanduser()
    if isinstance(value, str) and annotation is not str:
        value = _from_text(name, value, annotation)
    try:
        return converter(annotation)(value)
    except ValidationError as error:
        raise error.under(name) from None


def _from_text(name: str, text: str, annotation: Any) -> Any:
    if annotation is bool or bool in getattr(annotation, "__args__", ()):
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ValidationError(f"expected true or false, got {text!r}", name)
        return words[text.lower()]
    for kind in (int, float):
        if kind is annotation or kind in getattr(annotation, "__args__", ()):
            try:
                return kind(text)
            except ValueError:
                raise ValidationError(f"expected a number, got {text!r}", name) from None
    if name == "models":
        return parse_models(text.split(","))
    return text


def parse_models(entries: list[str] | tuple[str, ...]) -> dict[str, str]:
    """`NAME` or `NAME=SOURCE` each; a bare name is its own source."""
    models = {}
    for entry in entries:
        name, _, source = entry.partition("=")
        if not name:
            raise ValidationError(
                f"{entry!r} names no model; expected NAME or NAME=SOURCE", "models"
            )
        models[name] = source or name
    return models
