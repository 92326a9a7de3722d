"""Examples of what was trained, where the server keeps any."""

from __future__ import annotations

from tests.console.conftest import User, expect, trained_run


def test_an_operation_shows_its_examples_token_by_token(user: User) -> None:
    run = trained_run(user, 1)
    page = user.open(f"/training_runs/{run}/steps/1")
    expect(page.locator("article .token")).to_have_count(10)
    page.locator("article .tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card")).to_contain_text("Weight")
    expect(page.locator(".token-card")).to_contain_text("Probability")
