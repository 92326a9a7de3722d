"""Talking to models in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from tests.console.conftest import User, expect, trained_run
from tests.support.in_process_server import MODEL

SEED = "1"
"""What the fake model answers with it is long enough for these tests."""


def playground(user: User, query: str = "") -> Any:
    """The page, once it listens to keys."""
    page = user.open(f"/playground{query}")
    expect(page.locator("#prompt")).to_be_focused()
    return page


def ask_for(page: Any, most_tokens: int) -> None:
    """Set the options for an answer that is always the same."""
    page.get_by_text("Options").click()
    page.get_by_label("Most tokens").fill(str(most_tokens))
    page.get_by_label("Seed").fill(SEED)


def test_an_answer_streams_and_can_be_stopped(user: User) -> None:
    page = playground(user)
    ask_for(page, 2000)
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    tokens = page.locator(".reply .token")
    expect(tokens.nth(2)).to_be_attached()  # one of blanks only has no size
    early = tokens.count()
    expect(tokens.nth(early + 5)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped by you")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_checkpoints_side_by_side_answer_with_the_same_seed(user: User) -> None:
    run = trained_run(user, 5, "a")
    path = f"tinker://{run}/sampler_weights/a"
    query = f"checkpoint={quote(path, safe='')}"
    page = playground(user, f"?mode=checkpoint&{query}&{query}&model={quote(MODEL, safe='')}")
    expect(page.locator(".lane")).to_have_count(3)
    ask_for(page, 12)
    page.get_by_label("Message").fill("the")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Regenerate")).to_have_count(3)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    texts = [lane.inner_text() for lane in page.locator(".reply .tokens").all()]
    assert texts[0] == texts[1] != texts[2], texts


def test_a_token_shows_its_probability_and_alternatives(user: User) -> None:
    page = playground(user)
    ask_for(page, 6)
    page.get_by_label("Message").fill("ab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Ended: most tokens reached")).to_be_visible()
    page.get_by_role("group", name="Answer, token by token").focus()
    page.keyboard.press("ArrowRight")
    card = page.locator(".token-card")
    expect(card).to_contain_text("Probability")
    expect(card.locator("li")).to_have_count(5)
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)


def test_a_text_is_completed_where_it_ends(user: User) -> None:
    page = playground(user, "?as=completion")
    ask_for(page, 6)
    page.get_by_label("Text to complete").fill("once upon")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_text("Ended: most tokens reached")).to_be_visible()
    reply = page.locator(".reply.completion")
    expect(reply).to_contain_text("once upon")
    assert reply.locator(".token").count() > 0


def test_a_message_is_edited_and_answered_anew_and_copied_as_code(user: User) -> None:
    page = playground(user)
    ask_for(page, 4)
    page.get_by_label("System prompt").fill("be brief")
    for text in ("first", "second"):
        page.get_by_label("Message").fill(text)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_role("button", name="Edit").nth(1).click()
    expect(page.get_by_label("Message")).to_have_value("second")
    expect(page.locator(".said")).to_have_count(1)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_role("button", name="Copy as code").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("pre").first).to_contain_text("/oai/api/v1/chat/completions")
    expect(dialog.locator("pre").nth(1)).to_contain_text('"content": "be brief"')
    assert user.key not in page.content()


def test_hostile_text_of_a_model_and_of_a_user_is_shown_as_text(user: User) -> None:
    hostile = '<img src=x onerror="document.title=1">'
    page = playground(user)

    def answer(route: Any) -> None:
        choice = {"index": 0, "delta": {"content": hostile}, "logprobs": None}
        text = f"data: {json.dumps({'choices': [choice]})}\n\n"
        route.fulfill(headers={"content-type": "text/event-stream"}, body=text)

    page.route("**/chat/completions", answer)
    expect(page.locator(".lane")).to_be_visible()
    page.get_by_label("Message").fill(hostile)
    page.keyboard.press("Enter")
    expect(page.locator(".reply .tokens")).to_have_text(hostile)
    expect(page.locator(".said p")).to_have_text(hostile)
    assert page.locator("main img").count() == 0


def test_a_refusal_is_said_where_the_answer_would_be(user: User) -> None:
    page = playground(user, "?model=no-such-model")
    expect(page.locator(".lane")).to_be_visible()
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    expect(page.get_by_text("no model called 'no-such-model'")).to_be_visible()


def test_a_revoked_key_ends_a_conversation(new_user: Callable[..., User]) -> None:
    user = new_user()
    page = playground(user)
    expect(page.locator("#live")).to_have_text("Live")
    user.console.revoke_all(user.owner)
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
