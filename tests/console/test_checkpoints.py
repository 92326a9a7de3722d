"""Checkpoints in a browser: looked at, published, deleted by the dozen."""

from __future__ import annotations

from urllib.parse import quote

from tests.console.conftest import User, expect, trained_run


def test_many_checkpoints_are_deleted_at_once(user: User) -> None:
    run = trained_run(user, 1, *(f"step-{n}" for n in range(8)), "keep")
    page = user.open("/checkpoints")
    expect(page.locator("tbody tr")).to_have_count(9)
    page.get_by_label("Search checkpoints").fill("step-")
    expect(page.locator("tbody tr")).to_have_count(8)
    page.get_by_label("Choose all shown").check()
    page.get_by_role("button", name="Delete 8").click()
    dialog = page.get_by_role("dialog", name="Delete 8 checkpoints?")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.locator("tbody tr")).to_have_count(8)
    page.get_by_role("button", name="Delete 8").click()
    dialog.get_by_role("button", name="Delete 8").click()
    expect(page.get_by_text("No checkpoint fits")).to_be_visible()
    page.get_by_label("Search checkpoints").fill("")
    expect(page.locator("tbody tr")).to_have_count(1)
    left = user.console.call(user.console.service.store.checkpoints.of_model(run))
    assert [c.checkpoint_id for c in left] == ["sampler_weights/keep"]


def test_a_checkpoint_is_published_expires_and_is_found_by_the_clients_link(user: User) -> None:
    run = trained_run(user, 1, "final")
    # As `get_console_url()` of the official client writes it.
    page = user.open(
        f"/checkpoints/{quote(run, safe='')}/{quote('sampler_weights/final', safe='')}"
    )
    expect(page.get_by_role("heading", level=1)).to_have_text("sampler_weights/final")
    page.get_by_role("button", name="Publish").click()
    expect(page.locator("#facts")).to_contain_text("Everybody")
    page.get_by_role("button", name="Make private").click()
    expect(page.locator("#facts")).not_to_contain_text("Everybody")
    page.get_by_label("Expires").select_option("in a week")
    expect(page.locator("#facts")).to_contain_text("in 7 d")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename.endswith(".tar")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No checkpoints")).to_be_visible()
