"""The error tree: its API branch is the official one, by name, ancestry and constructor."""

from __future__ import annotations

import inspect
import pickle

import httpx
import pytest
import tinker._exceptions as official

from tinsmith import errors
from tinsmith.types import RequestErrorCategory

OFFICIAL = {
    name: cls
    for name, cls in vars(official).items()
    if not name.startswith("_") and inspect.isclass(cls) and issubclass(cls, Exception)
}
RESPONSE = httpx.Response(418, request=httpx.Request("GET", "http://test"))


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_official_error_exists_with_its_ancestors_and_constructor(name):
    """S1"""
    mine, theirs = getattr(errors, name), OFFICIAL[name]
    ancestors = [cls.__name__ for cls in theirs.__mro__]
    assert [cls.__name__ for cls in mine.__mro__ if cls.__name__ in ancestors] == ancestors
    expected, actual = (inspect.signature(cls.__init__).parameters for cls in (theirs, mine))
    assert [(p.name, p.kind, p.default) for p in actual.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]
    assert getattr(mine, "status_code", None) == getattr(theirs, "status_code", None)


def test_everything_we_raise_on_purpose_has_one_root():
    for cls in vars(errors).values():
        if inspect.isclass(cls) and issubclass(cls, Exception):
            assert issubclass(cls, errors.TinkerError)
            assert cls.__doc__


def instances() -> list[errors.TinkerError]:
    statuses = [
        cls
        for cls in vars(errors).values()
        if inspect.isclass(cls) and issubclass(cls, errors.APIStatusError)
    ]
    return [
        *(cls("no", RESPONSE, {"error": "x"}) for cls in statuses),
        errors.APIResponseValidationError(RESPONSE, "body", "odd"),
        errors.APIConnectionError(RESPONSE.request, "gone"),
        errors.APITimeoutError(RESPONSE.request),
        errors.RequestFailedError("failed", "r-1", RequestErrorCategory.User),
        errors.ValidationError("too long", "a.b"),
        errors.TooLargeError("limit is 5", "a"),
        errors.EngineError("out of memory"),
        errors.EngineDiedError("killed"),
    ]


@pytest.mark.parametrize("error", instances(), ids=lambda e: type(e).__name__)
def test_errors_pickle_with_what_they_know(error):
    """They cross process borders: from the engine, and to workers that share a client."""
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error) and str(twin) == str(error)
    plain = {k: v for k, v in vars(error).items() if k not in ("request", "response")}
    assert {k: getattr(twin, k) for k in plain} == plain


def test_a_status_error_tells_the_status_of_its_answer():
    error = errors.NotFoundError("no", RESPONSE, None)
    assert error.status_code == 418 and error.response is RESPONSE
    assert error.request is RESPONSE.request


def test_a_validation_error_is_a_value_error():
    """Programs written for the official package catch ValueError."""
    assert issubclass(errors.ValidationError, ValueError)
    assert issubclass(errors.TooLargeError, errors.ValidationError)
    too_large = errors.TooLargeError("limit is 5", "[2]").under("data").under("input")
    assert isinstance(too_large, errors.TooLargeError)
    assert str(too_large) == "input.data[2]: limit is 5"
