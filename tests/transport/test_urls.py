"""Base URLs in one form."""

from __future__ import annotations

import pytest

from tinsmith.errors import TinkerError
from tinsmith.transport.urls import join, normalise, origin


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        (
            [
                "https://host",
                "https://host/",
                "https://host:443",
                "https://host:443/",
                "HTTPS://Host",
            ],
            "https://host",
        ),
        (["http://host", "http://host:80", "http://HOST:80/"], "http://host"),
        (["http://host:443"], "http://host:443"),
        (["https://host:8443/"], "https://host:8443"),
        (["https://host/a/b/", " https://host/a/b "], "https://host/a/b"),
        (["http://[::1]:80/x"], "http://[::1]/x"),
        (["http://user:pw@Host/"], "http://user:pw@host"),
    ],
)
def test_equal_addresses_are_equal_strings(forms: list[str], expected: str) -> None:
    """S70, S112"""
    assert {normalise(form) for form in forms} == {expected}


@pytest.mark.parametrize(
    "wrong", ["", "host", "ftp://host", "https://", "https://host:x", "//host"]
)
def test_what_is_no_address_is_refused_with_an_example(wrong: str) -> None:
    with pytest.raises(TinkerError, match="https://host"):
        normalise(wrong)


def test_ids_stay_as_they_are_and_values_are_quoted() -> None:
    path = "/api/v1/training_runs/s:train:0/checkpoints/weights/a"
    url = join("https://h/base", path, {"day": "a b", "flag": True, "n": 3, "many": ["x", "y"]})
    assert url == f"https://h/base{path}?day=a%20b&flag=true&n=3&many=x,y"


def test_origins_decide_where_a_credential_goes() -> None:
    assert origin("https://h/a") == origin("https://h:443/b") != origin("http://h/a")
