"""The same recipes on the official client and on ours, against one server with the real engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.server_process import StartServer


@pytest.mark.slow
def test_recipes_see_the_same_numbers_through_both_clients(
    start_local_server: StartServer,
) -> None:
    """S114: losses, log-probabilities, samples and metrics, to the last bit."""
    server = start_local_server()
    theirs, ours = (json.loads(server.run("recipes.py", each)) for each in ("tinker", "tinsmith"))
    assert (theirs.pop("client"), ours.pop("client")) == (["tinker"], ["tinsmith"])
    assert list(ours) == ["supervised", "reinforcement", "preferences", "distillation"]
    for recipe, facts in theirs.items():
        assert ours[recipe] == facts, recipe
        assert len(set(map(str, facts))) > 3, "numbers that never change prove nothing"
