"""On a screen as narrow as a phone's: nothing is beyond its edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.console.conftest import MODEL, User, expect, train, trained_run
from tests.console.test_accessibility import pages
from tinsmith import Datum, ModelInput, TinkerError

WIDTH = 390
EDGES = "all => all.map(e => [e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
BEYOND = """all => all.filter(e => e.scrollWidth > e.clientWidth)
    .map(e => `${e.getAttribute("aria-label")}: ${e.scrollWidth - e.clientWidth} pixels`)"""


@pytest.fixture
def user(new_user: Callable[..., User]) -> User:
    return new_user(viewport={"width": WIDTH, "height": 844})


def test_the_bars_of_the_timeline_are_on_the_screen(user: User) -> None:
    run = trained_run(user, 3, "a")
    page = user.open(f"/training_runs/{run}/operations")
    bars = page.locator("svg.bar")
    expect(bars).to_have_count(8)
    for left, right in bars.evaluate_all(EDGES):
        assert 0 <= left < right - WIDTH / 2 and right <= WIDTH


@pytest.mark.slow
def test_no_list_goes_beyond_the_edge_of_the_screen(user: User) -> None:
    run = user.in_thread(_run_with_a_failure)
    found: dict[str, Any] = {}
    for path, sign in pages(run).items():
        page = user.open(path)
        expect(page.locator(sign).first).to_be_visible()
        expect(page.locator("[aria-busy]")).to_have_count(0)
        if beyond := page.locator(".scroll").evaluate_all(BEYOND):
            found[path] = beyond
    assert found == {}


def _run_with_a_failure(user: User) -> str:
    """The id of a run with a long name, one of whose errors has a long word."""
    wrong = Datum(
        model_input=ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [1, 10**6], "weights": [1.0, 1.0]},
    )
    name = "a run whose name is as long as people make them"
    with user.client() as service:
        training = service.create_lora_training_client(MODEL, rank=4, user_metadata={"name": name})
        train(training, 2)
        training.save_weights_for_sampler("a").result()
        with pytest.raises(TinkerError, match="vocabulary"):
            training.forward_backward([wrong], "cross_entropy").result()
        return training.model_id
