"""Rewards: a Python function, a list of checks, or a URL; each gives answers their numbers.

file.py:function   def function(answer: str, record: dict) -> float
https://…          POST {"cases": [{"prompt", "answer", "record"}, …]} → {"rewards": [1.0, …]}
checks             the share of them that an answer passes
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import TinkerError, ValidationError

_URL_SECONDS = 300.0
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_CHECKS = "exact[:TEXT], contains[:TEXT], regex:PATTERN, length:MIN..MAX, json[:KEY]"


@dataclass(frozen=True, slots=True)
class Case:
    """An answer to be judged."""

    prompt: str
    answer: str
    record: dict[str, Any]


Reward = Callable[[Sequence[Case]], list[float]]
Check = Callable[[Case], bool]


def build(source: str | None, checks: Sequence[str]) -> Reward:
    if (source is None) == (not checks):
        raise ValidationError(
            "give a reward (--reward file.py:function, or a URL) or checks "
            f"(--check {_CHECKS}), and not both"
        )
    if source is None:
        return _of_checks([check(text) for text in checks])
    if source.startswith(("http://", "https://")):
        return _of_url(source)
    return _of_function(source)


def check(text: str) -> Check:
    """A check from its words. Without a TEXT the record's own `answer` is looked for; in a TEXT or
    PATTERN `{field}` stands for a field of the record.

    >>> check("contains:Paris")(Case("", "In Paris.", {}))
    True
    """
    kind, _, argument = text.partition(":")
    if kind == "exact":
        return lambda case: case.answer.strip() == _filled(argument or "{answer}", case).strip()
    if kind == "contains":
        return lambda case: _filled(argument or "{answer}", case) in case.answer
    if kind == "regex" and argument:
        _compiled(_FIELD.sub("x", argument))
        return lambda case: bool(_compiled(_filled(argument, case, re.escape)).search(case.answer))
    if kind == "length" and (bounds := re.fullmatch(r"(\d*)\.\.(\d*)", argument)):
        low, high = int(bounds[1] or 0), float(bounds[2] or "inf")
        return lambda case: low <= len(case.answer) <= high
    if kind == "json":
        return lambda case: _is_json(case.answer, argument)
    raise ValidationError(f"no such check: {text!r}; known: {_CHECKS}", "check")


def _of_checks(checks: Sequence[Check]) -> Reward:
    return lambda cases: [sum(each(case) for each in checks) / len(checks) for case in cases]


def _of_function(source: str) -> Reward:
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ValidationError(
            f"expected file.py:function or a URL, and there is no file {file or source!r}", "reward"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a file always has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValidationError(f"there is no function {name!r} in {file}", "reward")
    return lambda cases: [_number(function(case.answer, case.record), source) for case in cases]


def _of_url(url: str) -> Reward:
    def reward(cases: Sequence[Case]) -> list[float]:
        body = {"cases": [asdict(case) for case in cases]}
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_URL_SECONDS) as response:
                found = json.load(response)
        except (OSError, ValueError) as error:
            raise TinkerError(f"cannot get rewards from {url}: {error}") from error
        values = found.get("rewards") if isinstance(found, dict) else None
        if not isinstance(values, list) or len(values) != len(cases):
            raise TinkerError(
                f"the reward at {url} must answer with 'rewards', a list of {len(cases)} numbers, "
                "one for each case"
            )
        return [_number(value, url) for value in values]

    return reward


def _number(value: Any, source: str) -> float:
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    raise TinkerError(f"the reward {source} gave {value!r}; it must be a finite number")


def _filled(text: str, case: Case, escape: Callable[[str], str] = str) -> str:
    """`text` with `{field}` replaced by the record's field; other braces stay as they are."""

    def field(match: re.Match[str]) -> str:
        name = match[1]
        if name not in case.record:
            raise ValidationError(
                f"the record has no field {name!r}, which the check {text!r} reads", "check"
            )
        return escape(str(case.record[name]))

    return _FIELD.sub(field, text)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValidationError(f"not a regular expression: {pattern!r} ({error})", "check") from None


def _is_json(text: str, key: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return not key or (isinstance(found, dict) and key in found)
