"""Our types against the installed official package: names, fields, defaults, literals, policy.

The official types are found by introspection, so a field that a new release adds fails here
first. A difference is possible only through the tables below, each entry with its reason, and an
entry that no longer describes a difference fails as well.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, get_args, get_origin

import annotated_types
import numpy as np
import pydantic
import pytest
import tinker.types as official

from tinsmith import types as ours
from tinsmith.types import model as our_models
from tinsmith.types.convert import Bounds

# Official names that have no counterpart of ours, each with the reason.
ABSENT: dict[str, str] = {}

# (type, aspect): reason. The aspect is what `differences` prints first.
DIFFERENT: dict[tuple[str, str], str] = {
    ("TensorData", "data"): "any sequence is taken, so the annotation is wider",
    ("TensorData", "sparse_crow_indices"): "numpy arrays are taken too",
    ("TensorData", "sparse_col_indices"): "numpy arrays are taken too",
    ("EncodedTextChunk", "tokens"): "numpy arrays are taken too",
    ("TryAgainResponse", "queue_state_reason"): "read from the raw answer there, declared here",
    ("ModelInput", "chunks"): "the JSON form of a chunk is taken too, and any sequence of them",
}

# Aliases, likewise.
DIFFERENT_ALIASES: dict[str, str] = {
    "FutureRetrieveResponse": "a hint that nobody validates against; a union of late imports there",
}

POLICIES = {"forbid": "refuse", "ignore": "ignore", "allow": "keep"}


# --- Finding the official types ---------------------------------------------------------------


def official_types() -> dict[str, Any]:
    """Every public name of `tinker.types`, and of its public modules where that has it alone."""
    found = {
        name: value
        for name, value in vars(official).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    for info in pkgutil.walk_packages(official.__path__, "tinker.types."):
        if "._" in info.name:
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            home = getattr(value, "__module__", "")
            if (
                not name.startswith("_")
                and home.startswith("tinker.types")
                and inspect.isclass(value)
            ):
                found.setdefault(name, value)
    return found


OFFICIAL = official_types()
MODELS = {
    name: value
    for name, value in OFFICIAL.items()
    if inspect.isclass(value) and issubclass(value, pydantic.BaseModel)
}
RECORDS = {n: v for n, v in OFFICIAL.items() if inspect.isclass(v) and dataclasses.is_dataclass(v)}
ENUMS = {n: v for n, v in OFFICIAL.items() if inspect.isclass(v) and issubclass(v, enum.Enum)}
ALIASES = {n: v for n, v in OFFICIAL.items() if n not in MODELS | RECORDS | ENUMS}


def our(name: str) -> Any:
    """Our type of a name; a few live in their module only, like the official ones."""
    for module in (ours, *(importlib.import_module(f"tinsmith.types.{m}") for m in OUR_MODULES)):
        if hasattr(module, name):
            return getattr(module, name)
    return None


OUR_MODULES = [info.name for info in pkgutil.iter_modules(ours.__path__)]


# --- One description for both sides -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Described:
    """What matters about one field or parameter; two sides are equal if these are."""

    kind: str
    default: str
    bounds: str = ""


def spelled(annotation: Any) -> str:
    """An annotation in one spelling: `Optional[List[int]]` and `list[int] | None` are alike."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (Any, object):
        return "anything"
    if annotation is np.ndarray or origin is np.ndarray:
        return "array"
    if annotation is pydantic.AwareDatetime:
        return spelled(datetime)
    if origin is typing.Annotated:
        return spelled(args[0])
    if origin is Literal:
        return f"Literal[{', '.join(sorted(map(repr, args)))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(sorted({spelled(member) for member in without_subclasses(args)}))
    if origin in (list, Sequence):
        return f"list[{spelled(args[0])}]"
    if origin in (dict, Mapping):
        return f"dict[{spelled(args[0])}, {spelled(args[1])}]"
    if origin is tuple:
        return f"tuple[{', '.join(map(spelled, args))}]"
    return str(getattr(annotation, "__name__", annotation))


def without_subclasses(members: tuple[Any, ...]) -> list[Any]:
    """Union members whose base class is a member too say nothing new."""
    bare = [get_args(m)[0] if get_origin(m) is typing.Annotated else m for m in members]
    flat = [x for m in bare for x in (get_args(m) if is_union(m) else (m,))]
    classes = [m for m in flat if inspect.isclass(m)]
    return [
        m
        for m in flat
        if not (inspect.isclass(m) and any(m is not c and issubclass(m, c) for c in classes))
    ]


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)


def plain(value: Any) -> str:
    """A default value in one spelling, nested messages as plain data."""
    return repr(value.model_dump() if hasattr(value, "model_dump") else value)


def describe_official(cls: type[pydantic.BaseModel]) -> dict[str, Described]:
    finite = cls.model_config.get("allow_inf_nan") is False
    described = {}
    for name, field in cls.model_fields.items():
        default = (
            "required"
            if field.is_required()
            else plain(field.get_default(call_default_factory=True))
        )
        bounds = {}
        for mark in field.metadata:
            for bound in ("ge", "gt", "le", "lt", "min_length", "max_length"):
                if isinstance(mark, annotated_types.BaseMetadata) and hasattr(mark, bound):
                    bounds[bound] = getattr(mark, bound)
        if finite and field.annotation is float:
            bounds["finite"] = True
        described[name] = Described(spelled(field.annotation), default, spelled_bounds(bounds))
    return described


def describe_ours(cls: type[our_models.Model]) -> dict[str, Described]:
    described = {}
    for name, field in cls.model_fields.items():
        default = "required" if field.is_required() else plain(field.make_default())
        marks = field.annotation.__metadata__ if hasattr(field.annotation, "__metadata__") else ()
        bounds = {
            key: value
            for mark in marks
            if isinstance(mark, Bounds)
            for key, value in vars(mark).items()
            if value is not None and value is not False
        }
        described[name] = Described(spelled(field.annotation), default, spelled_bounds(bounds))
    return described


def spelled_bounds(bounds: dict[str, Any]) -> str:
    return ", ".join(f"{name}={bounds[name]:g}" for name in sorted(bounds))


def describe_parameters(cls: Any) -> dict[str, Described]:
    """Constructor parameters, without the private ones."""
    hints = typing.get_type_hints(cls.__init__)
    return {
        name: Described(
            spelled(hints[name]),
            "required" if p.default is p.empty else default_of(cls, name, p.default),
        )
        for name, p in inspect.signature(cls.__init__).parameters.items()
        if name != "self" and not name.startswith("_")
    }


def default_of(cls: Any, name: str, default: Any) -> str:
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name == name and field.default_factory is not dataclasses.MISSING:
            return plain(field.default_factory())
    return plain(default)


def positional(cls: Any) -> list[str]:
    return [
        name
        for name, p in inspect.signature(cls).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD and not name.startswith("_")
    ]


def differences(theirs: Any, mine: Any) -> list[tuple[str, str]]:
    """(aspect, what differs) for one type."""
    found = []
    is_model = issubclass(theirs, pydantic.BaseModel)
    expected = describe_official(theirs) if is_model else describe_parameters(theirs)
    if issubclass(mine, our_models.Model):
        actual = describe_ours(mine)
        if POLICIES[str(theirs.model_config["extra"])] != mine.__unknown__:
            found.append(("policy", f"{theirs.model_config['extra']} is {mine.__unknown__}"))
    else:
        actual = describe_parameters(mine)
        if not is_model and positional(theirs) != positional(mine):
            found.append(("order", f"{positional(theirs)} is {positional(mine)}"))
    for name in expected.keys() | actual.keys():
        if expected.get(name) != actual.get(name):
            found.append((name, f"{expected.get(name)} is {actual.get(name)}"))
    return found


# --- The comparison ---------------------------------------------------------------------------


def test_every_official_name_exists():
    """S1"""
    missing = {name for name in OFFICIAL if our(name) is None}
    assert missing == ABSENT.keys()


@pytest.mark.parametrize("name", sorted(MODELS | RECORDS))
def test_fields_defaults_and_policy_are_the_official_ones(name):
    """S1, S4, S7, S8"""
    found = differences(OFFICIAL[name], our(name))
    unexplained = [entry for entry in found if (name, entry[0]) not in DIFFERENT]
    assert not unexplained


def test_no_listed_difference_is_stale():
    """S1, S115"""
    real = {
        (name, aspect)
        for name in MODELS | RECORDS
        for aspect, _ in differences(OFFICIAL[name], our(name))
    }
    assert DIFFERENT.keys() <= real


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_literals_and_unions_are_the_official_ones(name):
    """S1, S5, S6, S17"""
    assert (spelled(our(name)) == spelled(OFFICIAL[name])) != (name in DIFFERENT_ALIASES)


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_enum_members_are_the_official_ones(name):
    """S19, S20: the category words on the wire are lower case."""
    assert {m.name: m.value for m in our(name)} == {m.name: m.value for m in OFFICIAL[name]}


@pytest.mark.parametrize("name", sorted(MODELS | RECORDS))
def test_public_methods_and_properties_are_there(name):
    theirs, mine = OFFICIAL[name], our(name)
    inherited = set(dir(pydantic.BaseModel)) if name in MODELS else set(dir(object))
    if name in MODELS:
        hooks = theirs.__pydantic_decorators__
        inherited |= hooks.field_validators.keys() | hooks.field_serializers.keys()
    public = {n for n in dir(theirs) if not n.startswith("_")} - inherited
    fields = mine.model_fields if hasattr(mine, "model_fields") else {}
    assert not {n for n in public if not hasattr(mine, n) and n not in fields}
    for method in public:
        if callable(getattr(theirs, method)):
            expected = inspect.signature(getattr(theirs, method)).parameters
            actual = inspect.signature(getattr(mine, method)).parameters
            assert {(p.name, p.default) for p in actual.values()} == {
                (p.name, p.default) for p in expected.values()
            }, method


def test_error_categories_of_any_case_are_understood():
    """S19"""
    category = ours.RequestErrorCategory
    assert {category(word) for word in ("user", "User", "USER")} == {category.User}
    assert category("fatal") is category.Unknown


# --- The comparison would notice --------------------------------------------------------------


def patched(cls: type[our_models.Model], name: str, annotation: Any, default: Any) -> Any:
    body = {"__annotations__": {name: annotation}, "__module__": __name__}
    if default is not our_models.REQUIRED:
        body[name] = default
    return type("Patched", (cls,), body)


@pytest.mark.parametrize("name", sorted(n for n in MODELS if issubclass(our(n), our_models.Model)))
def test_changing_any_default_or_literal_by_hand_is_noticed(name):
    """S1: a sabotaged copy of each class differs in exactly the sabotaged field."""
    mine = our(name)
    normal = {aspect for aspect, _ in differences(OFFICIAL[name], mine)}
    for field in mine.model_fields.values():
        copies = []
        if not field.is_required():
            copies.append(patched(mine, field.name, field.annotation, "sabotage"))
        if get_origin(field.annotation) is Literal:
            wider = Literal[*get_args(field.annotation), "sabotage"]
            copies.append(patched(mine, field.name, wider, field.default))
        for copy in copies:
            found = {aspect for aspect, _ in differences(OFFICIAL[name], copy)}
            assert found == normal | {field.name}


def test_an_unknown_official_field_or_another_policy_is_noticed():
    """S1"""

    class Loose(ours.AdamParams):
        __unknown__ = "ignore"

    class Newer(official.AdamParams):
        momentum: float = 0.0

    assert [aspect for aspect, _ in differences(official.AdamParams, Loose)] == ["policy"]
    assert [aspect for aspect, _ in differences(Newer, ours.AdamParams)] == ["momentum"]


def test_a_changed_default_of_a_plain_record_is_noticed():
    """S1"""

    @dataclasses.dataclass(frozen=True)
    class Patched:
        loss_fn_output_type: str
        loss_fn_outputs: list[ours.LossFnOutput]
        metrics: dict[str, float] | None = None

    found = differences(official.ForwardBackwardOutput, Patched)
    assert [aspect for aspect, _ in found] == ["metrics"]
