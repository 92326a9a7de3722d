"""The settings of a run: one definition for the option, the key in a TOML file and the run's file.

A method's settings are those of every run and a few of its own. Nothing here imports more than the
command line's help needs.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from tinsmith.cli.failures import CommandError
from tinsmith.cli.training import METHOD_NAMES
from tinsmith.cli.training.schedule import SCHEDULES

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="Settings")

TRACKERS = ("wandb", "trackio", "tensorboard")

_POSITIVE = click.FloatRange(min=0, min_open=True)
_FRACTION = click.FloatRange(0, 0.9)
_COUNT = click.IntRange(1)


def _setting(
    default: Any,
    about: str,
    kind: click.ParamType[Any] | None = None,
    *,
    option: tuple[str, ...] = (),
    is_path: bool = False,
) -> Any:
    """A field of settings. `option` is what it is called on the command line, where that differs;
    `is_path`: in a TOML file it is relative to that file."""
    return field(
        default=default,
        metadata={"about": about, "kind": kind, "option": option, "is_path": is_path},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every run has."""

    data: str = _setting(
        "",
        "A file (JSON lines, JSON, CSV, Parquet, text) or a data set's name, owner/name[:split].",
        is_path=True,
    )
    model: str | None = _setting(None, "Base model.  [default: the server's, if it has one only]")
    start: str | None = _setting(
        None, "Begin with the weights of this checkpoint, tinker://…/weights/….", option=("--from",)
    )
    name: str | None = _setting(None, "The run's name.  [default: the data's name and the method]")
    output: str | None = _setting(
        None,
        "Folder for the run's files.  [default: the run's name, beside the data]",
        option=("--output", "-o"),
        is_path=True,
    )
    rank: int = _setting(32, "Rank of the adapter.", _COUNT)
    learning_rate: float = _setting(2e-4, "Its peak.", _POSITIVE)
    schedule: str = _setting(
        "linear", "How the learning rate falls after the warm-up.", click.Choice(SCHEDULES)
    )
    warm_up: int | None = _setting(
        None, "Steps until the peak.  [default: a tenth, at most 10]", click.IntRange(0)
    )
    batch_size: int = _setting(8, "Examples in a step.", _COUNT)
    epochs: float = _setting(3.0, "Times that each example is seen.", _POSITIVE)
    steps: int | None = _setting(None, "Steps, whatever --epochs says.", _COUNT)
    max_length: int = _setting(
        2048, "Longest example, in tokens; longer ones are left out and counted.", click.IntRange(2)
    )
    held_out: float = _setting(0.1, "Part of the data that is only evaluated on.", _FRACTION)
    validation: str | None = _setting(
        None, "A file to evaluate on, in place of --held-out.", is_path=True
    )
    eval_every: int = _setting(20, "Steps between evaluations.", _COUNT)
    patience: int | None = _setting(
        None, "Stop after so many evaluations without a better one.", _COUNT
    )
    save_every: int = _setting(50, "Steps between checkpoints.", _COUNT)
    keep: int = _setting(
        2, "Checkpoints of the training state that are kept; older ones are deleted.", _COUNT
    )
    ttl_hours: float | None = _setting(
        None, "The server deletes the run's checkpoints after so long.  [default: never]", _POSITIVE
    )
    samples: int = _setting(
        3, "Prompts that are answered before and after, for the report.", click.IntRange(0)
    )
    sample_tokens: int = _setting(64, "Longest of these answers, in tokens.", _COUNT)
    seed: int = _setting(0, "Seed of the adapter, the order of the data and all samples.")
    tokenizer: str | None = _setting(
        None, "A folder or hub name of another tokenizer.", is_path=True
    )
    log: tuple[str, ...] = _setting(
        (), "Where metrics go besides the run's folder; repeatable.", click.Choice(TRACKERS)
    )
    project: str = _setting("tinsmith", "The project's name there.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings(Settings):
    """Learn from examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSettings(Settings):
    """Learn from pairs of answers."""

    learning_rate: float = _setting(1e-5, "Its peak.", _POSITIVE)
    epochs: float = _setting(1.0, "Times that each pair is seen.", _POSITIVE)
    beta: float = _setting(0.1, "How closely the model is held to where it began.", _POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSettings(Settings):
    """Learn from the model's own answers."""

    epochs: float = _setting(1.0, "Times that each prompt is seen.", _POSITIVE)
    group_size: int = _setting(8, "Answers to each prompt in a step.", _COUNT)
    max_tokens: int = _setting(256, "Longest answer, in tokens.", _COUNT)
    temperature: float = _setting(1.0, "Temperature at which answers are sampled.", _POSITIVE)
    system: str | None = _setting(None, "A system prompt before every prompt.")
    loss: str = _setting(
        "importance_sampling",
        "Loss that the answers are trained with.",
        click.Choice(["importance_sampling", "ppo", "cispo"]),
    )
    passes: int = _setting(
        1, "Optimizer steps on the same answers; with more than one use ppo or cispo.", _COUNT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings(SampledSettings):
    """Learn from a reward."""

    learning_rate: float = _setting(4e-5, "Its peak.", _POSITIVE)
    group_size: int = _setting(
        8, "Answers to each prompt, compared with each other.", click.IntRange(2)
    )
    reward: str | None = _setting(
        None, "A Python function, file.py:function, or a URL.", is_path=True
    )
    check: tuple[str, ...] = _setting(
        (),
        "Part of the reward: exact, contains:TEXT, regex:PATTERN, length:MIN..MAX, json; "
        "repeatable.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings(SampledSettings):
    """Learn from a teacher's opinion of the model's own answers."""

    learning_rate: float = _setting(1e-4, "Its peak.", _POSITIVE)
    group_size: int = _setting(4, "Answers to each prompt in a step.", _COUNT)
    teacher: str | None = _setting(
        None, "A base model, or a tinker:// path of sampler weights.  [default: the model itself]"
    )
    teacher_system: str | None = _setting(None, "A system prompt that only the teacher sees.")
    kl_coefficient: float = _setting(1.0, "Weight of the difference to the teacher.", _POSITIVE)


METHODS: dict[str, type[Settings]] = dict(
    zip(METHOD_NAMES, (SftSettings, DpoSettings, RlSettings, DistillSettings), strict=True)
)


# --- from options, a TOML file, the run's file ------------------------------------------------


def with_settings(kind: type[Settings]) -> Callable[[F], F]:
    """Options for all settings; those that are not given are None, or empty."""

    def decorate(function: F) -> F:
        for each in reversed(dataclasses.fields(kind)):
            default = each.default
            shown = f"  [default: {default:g}]" if isinstance(default, (int, float)) else ""
            if isinstance(default, str) and default:
                shown = f"  [default: {default}]"
            function = click.option(
                *(each.metadata["option"] or (f"--{each.name.replace('_', '-')}",)),
                each.name,
                type=_click_type(kind, each),
                multiple=_is_list(kind, each),
                help=each.metadata["about"] + shown,
            )(function)
        return function

    return decorate


def build(kind: type[S], file: Path | None, options: Mapping[str, Any]) -> S:
    """Settings of a TOML file, and over them what was given as options."""
    values = {} if file is None else _from_toml(kind, file)
    values.update({name: value for name, value in options.items() if value not in (None, ())})
    return kind(**values)


def path_names(settings: Settings) -> list[str]:
    """Settings that may name a file."""
    return [each.name for each in dataclasses.fields(settings) if each.metadata["is_path"]]


def saved(settings: Settings) -> dict[str, Any]:
    return dataclasses.asdict(settings)


def restored(method: str, values: Mapping[str, Any]) -> Settings:
    """The settings of a run's file."""
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return METHODS[method](**{**values, **lists})


def _from_toml(kind: type[Settings], file: Path) -> dict[str, Any]:
    import tomllib

    try:
        found = tomllib.loads(file.read_text("utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise CommandError(f"{file} is not TOML: {error}") from None
    names = {
        (each.metadata["option"] or (each.name,))[0].lstrip("-"): each
        for each in dataclasses.fields(kind)
    }
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(names))}"
            raise CommandError(f"{file}: there is no setting {key!r} here", hint)
        each = names[name]
        checked = _checked(kind, each, value, f"{file}: {key}")
        values[each.name] = _located(checked, file) if each.metadata["is_path"] else checked
    return values


def _located(value: str, file: Path) -> str:
    """A path relative to the file that names it; what is no file there stays as it is."""
    path = file.parent / value.partition(":")[0]
    if value.startswith(("http://", "https://")) or not path.exists():
        return value
    return str(file.parent / value)


def _checked(kind: type[Settings], each: dataclasses.Field[Any], value: Any, place: str) -> Any:
    is_list = _is_list(kind, each)
    if is_list and not isinstance(value, list):
        raise CommandError(f"{place}: expected a list, got {value!r}")
    wanted = _plain_type(kind, each)
    accepted = (int, float) if wanted is float else (wanted,)
    checked = []
    for item in value if is_list else [value]:
        if isinstance(item, bool) or not isinstance(item, accepted):
            raise CommandError(f"{place}: expected {wanted.__name__}, got {item!r}")
        try:
            checked.append(_click_type(kind, each).convert(item, None, None))
        except click.BadParameter as error:
            raise CommandError(f"{place}: {error.message}") from None
    return tuple(checked) if is_list else checked[0]


def _click_type(kind: type[Settings], each: dataclasses.Field[Any]) -> click.ParamType[Any]:
    given = each.metadata["kind"]
    return given or click.types.convert_type(_plain_type(kind, each))


def _is_list(kind: type[Settings], each: dataclasses.Field[Any]) -> bool:
    return typing.get_origin(_annotation(kind, each)) is tuple


def _plain_type(kind: type[Settings], each: dataclasses.Field[Any]) -> type:
    annotation = _annotation(kind, each)
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType):
        annotation = next(t for t in typing.get_args(annotation) if t is not types.NoneType)
    return cast("type", annotation)


def _annotation(kind: type[Settings], each: dataclasses.Field[Any]) -> Any:
    known = _ANNOTATIONS.setdefault(kind.__name__, {})
    if not known:
        known.update(typing.get_type_hints(kind))
    return known[each.name]


_ANNOTATIONS: dict[str, dict[str, Any]] = {}
"""A cache by class: evaluating annotations takes as long as all the rest of --help."""
