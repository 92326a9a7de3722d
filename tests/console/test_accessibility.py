"""axe finds nothing, in either theme and at either width; the keyboard reaches everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.console.conftest import User, expect, trained_run
from tests.console.test_playground import ask_for, playground
from tinsmith.server.console.pages.routing import PAGES

AXE = Path(__file__).parent / "vendor" / "axe.js"
FORMS = tuple(itertools.product(("light", "dark"), (1280, 390)))
"""Theme and width; each page is loaded once and looked at in all of them."""


def pages(run: str) -> dict[str, str]:
    """Each page, and something that is there when it has loaded."""
    return {
        "/": "tbody tr",
        "/login": "form",
        f"/training_runs/{run}": "figure.chart canvas",
        f"/training_runs/{run}/operations": "tbody tr",
        f"/training_runs/{run}/steps/1": "#facts dd",
        "/sessions": "tbody tr",
        f"/sessions/{run.partition(':')[0]}": "tbody tr",
        "/checkpoints": "tbody tr",
        f"/checkpoints/{quote(run, safe='')}/{quote('sampler_weights/a', safe='')}": "#facts dd",
        f"/compare?runs={run}": "figure.chart canvas",
        "/playground": ".lane",
        "/usage": "tbody tr",
        "/server": "#slots tbody tr",
        "/keys": "tbody tr",
    }


def empty_pages(run: str) -> dict[str, str]:
    """What is said when there is nothing to show, or something is wrong; `run` has no steps."""
    return {
        "/": ".empty",
        "/login?reason=ended": "form",
        f"/training_runs/{run}": ".empty",
        f"/training_runs/{run}/steps/9": "#facts dd",
        "/sessions": ".empty",
        "/checkpoints": ".empty",
        "/compare": ".empty",
        "/usage": ".empty",
        "/keys?new_key=1": "#new",
        "/training_runs/nothing": ".empty",
    }


def faults(page: Any, where: str) -> list[str]:
    """What axe finds on the page as it is, and whether it is wider than the window, in any form."""
    found: list[str] = []
    page.add_script_tag(path=AXE)
    for theme, width in FORMS:
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 844})
        result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        found += [
            f"{where}, {theme}, {width}: {violation['id']}: "
            f"{[node['html'][:120] for node in violation['nodes']]}"
            for violation in result["violations"]
        ]
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        found += [f"{where}, {theme}, {width}: {wide} pixels too wide"] if wide > 0 else []
    return found


@pytest.mark.slow
def test_no_page_has_a_fault_that_axe_knows(new_user: Callable[..., User]) -> None:
    user = new_user(bypass_csp=True)
    run = trained_run(user, 2, "a")
    found: list[str] = []
    seen: set[str] = set()
    for path, sign in pages(run).items():
        page = user.open(path)
        expect(page.locator(sign).first).to_be_visible()
        seen.add(page.locator("body").get_attribute("data-page"))
        found += faults(page, path)
    assert found == []
    assert seen == set(PAGES.values())


@pytest.mark.slow
def test_what_pages_say_when_nothing_is_there_has_no_fault_that_axe_knows(
    new_user: Callable[..., User],
) -> None:
    user, other = new_user(bypass_csp=True), new_user(bypass_csp=True)
    run = trained_run(other, 0)
    found: list[str] = []
    for path, sign in empty_pages(run).items():
        page = (other if run in path else user).open(path)
        expect(page.locator(sign).first).to_be_visible()
        found += faults(page, path)
    assert found == []


@pytest.mark.slow
def test_no_dialog_card_or_answer_has_a_fault_that_axe_knows(
    new_user: Callable[..., User],
) -> None:
    user = new_user(bypass_csp=True)
    trained_run(user, 1, "a")
    page = user.open("/checkpoints")
    page.get_by_label("Choose all shown").check()
    page.get_by_role("button", name="Delete 1").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    found = faults(page, "before checkpoints are deleted")
    page = user.open("/keys")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    found += faults(page, "the list of keys")
    page = playground(user)
    ask_for(page, 6)
    page.get_by_label("Message").fill("ab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Ended: most tokens reached")).to_be_visible()
    found += faults(page, "an answer")
    page.get_by_role("group", name="Answer, token by token").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card")).to_be_visible()
    found += faults(page, "an answer's token")
    page.get_by_role("button", name="Copy as code").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    found += faults(page, "an answer as code")
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
