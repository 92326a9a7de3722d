"""Who is let in, and that a page ends with its session."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from tests.console.conftest import Console, User, expect, trained_run
from tinsmith.server.console import browsers

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_a_stranger_is_led_to_the_login_and_back_to_where_he_wanted(
    console: Console, browser: Browser
) -> None:
    key = console.new_key("stranger")
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{console.url}/usage?by=day")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.get_by_label("API key").fill("tml-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("does not know that key")
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Usage")).to_be_visible()
    assert page.url == f"{console.url}/usage?by=day"
    assert key not in str(context.cookies()), "a page never holds a key"
    context.close()


@pytest.mark.parametrize("wanted", ["/.//evil.example/x", "//evil.example/x", "/\\\\evil.example"])
def test_a_link_to_the_login_leads_to_a_page_of_this_server_only(
    console: Console, browser: Browser, wanted: str
) -> None:
    page = browser.new_page()
    page.goto(f"{console.url}/login?{urlencode({'next': wanted})}")
    page.get_by_label("API key").fill(console.new_key("stranger"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Runs", exact=True)).to_be_visible()
    assert page.url.startswith(f"{console.url}/")
    page.close()


def test_signing_out_ends_the_session(user: User) -> None:
    page = user.open("/")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    user.open("/keys")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_page_and_its_stream_end_when_the_key_is_revoked(user: User) -> None:
    run = trained_run(user, 1)
    page = user.open(f"/training_runs/{run}")
    expect(page.locator("#live")).to_have_text("Live")
    user.console.revoke_all(user.owner)
    expect(page.get_by_text("Your session is over")).to_be_visible()
    assert "next=" in page.url


def test_a_page_ends_when_its_session_expires(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    page = user.open("/")
    expect(page.get_by_text("No runs yet")).to_be_visible()
    expect(page.locator("#live")).to_have_text("Live")
    later = SimpleNamespace(time=lambda: time.time() + browsers.SESSION_SECONDS)
    monkeypatch.setattr(browsers, "time", later)
    expect(page.get_by_text("Your session is over")).to_be_visible()
    user.open("/")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_key_can_be_revoked_here_and_the_page_with_it(user: User) -> None:
    user.console.new_key(user.owner, "for <b>ci</b>")
    page = user.open("/keys")
    page.get_by_role("button", name="Revoke for <b>ci</b>").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("row", name="for <b>ci</b>")).to_contain_text("Revoked")
    page.get_by_role("button", name="Revoke laptop").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_two_users_see_only_their_own(new_user: Callable[..., User]) -> None:
    one, other = new_user(), new_user()
    run = trained_run(one, 1, "mine", name="of one")
    expect(one.open("/").get_by_role("link", name="of one")).to_be_visible()
    expect(other.open("/").get_by_text("No runs yet")).to_be_visible()
    expect(other.open("/checkpoints").get_by_text("No checkpoints")).to_be_visible()
    for path in (f"/training_runs/{run}", f"/training_runs/{run}/operations"):
        expect(other.open(path).get_by_text("Not found")).to_be_visible()


def test_a_link_that_was_used_leads_to_the_login_with_the_reason(
    console: Console, browser: Browser
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{console.url}/console/login?token=used")
    expect(page.get_by_text("That link was used already")).to_be_visible()
    context.close()


def test_an_address_that_is_no_pages_is_a_page_with_a_way_back(user: User) -> None:
    page = user.page
    for path in ("/nowhere", "/training_runs/a/steps/none", "/server/attic"):
        assert page.goto(user.console.url + path).status == 404
        expect(page.get_by_role("heading", name="Not found")).to_be_visible()
        expect(page.locator("#owner")).to_have_text(user.owner)
        page.get_by_role("link", name="To your runs").click()
        expect(page.get_by_text("No runs yet")).to_be_visible()


def test_a_program_at_a_wrong_address_is_answered_in_json(user: User) -> None:
    for path, accept in {
        "/nowhere": "*/*",
        "/api/v1/nowhere": "text/html",
        "/console/nowhere": "text/html",
        "/oai/nowhere": "text/html",
    }.items():
        answer = user.page.request.get(user.console.url + path, headers={"accept": accept})
        assert answer.status == 404, path
        assert answer.json() == {"detail": "Not Found"}, path
