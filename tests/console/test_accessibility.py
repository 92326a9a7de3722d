"""axe finds nothing, in either theme and at either width; the keyboard reaches everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.console.conftest import User, expect, trained_run

AXE = Path(__file__).parent / "vendor" / "axe.js"


def pages(run: str) -> dict[str, str]:
    """Each page, and something that is there when it has loaded."""
    return {
        "/": "tbody tr",
        "/login": "form",
        f"/training_runs/{run}": "figure.chart canvas",
        f"/training_runs/{run}/operations": "tbody tr",
        f"/training_runs/{run}/steps/1": "#facts dd",
        "/sessions": "tbody tr",
        "/checkpoints": "tbody tr",
        f"/checkpoints/{quote(run, safe='')}/{quote('sampler_weights/a', safe='')}": "#facts dd",
        f"/compare?runs={run}": "figure.chart canvas",
        "/playground": ".lane",
        "/usage": "tbody tr",
        "/server": "tbody tr",
        "/keys": "tbody tr",
        "/training_runs/nothing": ".empty",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_no_page_has_a_fault_that_axe_knows(
    new_user: Callable[..., User], theme: str, width: int
) -> None:
    user = new_user(color_scheme=theme, viewport={"width": width, "height": 844}, bypass_csp=True)
    run = trained_run(user, 2, "a")
    found: list[str] = []
    for path, sign in pages(run).items():
        page = user.open(path)
        expect(page.locator(sign).first).to_be_visible()
        page.add_script_tag(path=AXE)
        result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        found += [
            f"{path}: {violation['id']}: {[node['html'][:120] for node in violation['nodes']]}"
            for violation in result["violations"]
        ]
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        found += [f"{path} is {wide} pixels wider than the window"] if wide > 0 else []
    assert found == []


def test_the_theme_is_chosen_and_stays(user: User) -> None:
    page = user.open("/")
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate(ground) != before
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def _is_reached(page: Any, url: str) -> bool:
    from playwright.sync_api import TimeoutError

    try:
        page.wait_for_url(url, timeout=5000)
    except TimeoutError:
        return False
    return True


def test_the_keyboard_leads_to_pages_and_says_how(user: User) -> None:
    page = user.open("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    for _ in range(10):
        # One right after the other, which a busy machine may not manage at once.
        page.keyboard.press("g")
        page.keyboard.press("k")
        if _is_reached(page, "**/keys"):
            break
    expect(page.get_by_role("heading", name="Keys", exact=True)).to_be_visible()
