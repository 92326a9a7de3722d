"""Runs in a browser: found, watched while they learn, compared, and their operations."""

from __future__ import annotations

import math
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import pytest

from tests.console.conftest import User, expect, trained_run
from tests.support.in_process_server import MODEL

PATIENCE_SECONDS = 30
"""For what takes a moment on an idle machine."""

HOSTILE = '<img src=x onerror="document.title=1">'


def test_metrics_posted_for_an_earlier_step_are_shown_in_their_place(user: User) -> None:
    posted: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
    created: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work() -> None:
        with user.client() as service:
            training = service.create_lora_training_client(MODEL, rank=4, seed=1)
            training.log_metrics({"reward": 0.5}, 4).result(PATIENCE_SECONDS)
            created.put(training.model_id)
            while (point := posted.get()) is not None:
                step, reward = point
                training.log_metrics({"reward": reward}, step).result(PATIENCE_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            page = user.open(f"/training_runs/{created.get(timeout=PATIENCE_SECONDS)}")
            plot = page.locator('[data-key="reward"] .plot')
            expect(plot).to_have_attribute("aria-label", "reward: 0.5000 at 4 to 0.5000 at 4")
            expect(page.locator("#live")).to_have_text("Live")
            posted.put((2, 0.25))
            expect(plot).to_have_attribute("aria-label", "reward: 0.2500 at 2 to 0.5000 at 4")
            posted.put((2, 0.125))
            expect(plot).to_have_attribute("aria-label", "reward: 0.1250 at 2 to 0.5000 at 4")
            expect(plot).to_have_attribute("data-points", "2")
        finally:
            posted.put(None)
        done.result(PATIENCE_SECONDS)


def test_the_numbers_of_a_curve_are_a_table_too(user: User) -> None:
    run = trained_run(user, 4)
    page = user.open(f"/training_runs/{run}")
    chart = page.locator('[data-key="Loss per token"]')
    chart.get_by_role("button", name="Table").click()
    rows = chart.get_by_role("region", name="Loss per token as numbers").locator("tbody tr")
    expect(rows).to_have_count(4)
    shown = float(rows.last.locator("td").nth(2).inner_text())
    assert shown > float(rows.first.locator("td").nth(2).inner_text()), "it has learned"


def test_metrics_can_be_filtered_and_smoothed(user: User) -> None:
    run = trained_run(user, 3)
    page = user.open(f"/training_runs/{run}")
    expect(page.locator("figure.chart").first).to_be_visible()
    page.get_by_label("Filter metrics").fill("tokens:sum")
    expect(page.locator("figure.chart")).to_have_count(1)
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_label("Axis").select_option("time")
    expect(page.locator("figure.chart canvas")).to_be_visible()
    page.get_by_label("Filter metrics").fill("no such metric")
    expect(page.get_by_text("No metric fits")).to_be_visible()


def test_runs_are_found_by_their_metadata_and_compared(user: User) -> None:
    first, second = trained_run(user, 2, name="warm"), trained_run(user, 2, name="cold", seed=2)
    page = user.open("/")
    expect(page.get_by_role("row")).to_have_count(3)
    page.keyboard.press("/")
    page.keyboard.type("WARM")
    expect(page.get_by_role("row")).to_have_count(2)
    page.get_by_label("Search").fill("")
    page.get_by_label("Choose warm").check()
    page.get_by_label("Choose cold").check()
    page.get_by_role("link", name="Compare 2").click()
    expect(page.locator('[data-key="Loss per token"] .legend')).to_contain_text("warm")
    expect(page.locator('[data-key="Loss per token"] .plot')).to_have_attribute("data-points", "4")
    expect(page.locator("tr.differs")).to_contain_text(["LoRA seed", "name"])
    assert unquote(page.url).endswith(f"?runs={first},{second}")


def test_a_new_run_appears_by_itself(user: User) -> None:
    page = user.open("/")
    expect(page.get_by_text("No runs yet")).to_be_visible()
    expect(page.locator("#live")).to_have_text("Live")
    trained_run(user, 1, name="just made")
    expect(page.get_by_role("link", name="just made")).to_be_visible()


def test_hostile_names_are_shown_as_text(user: User) -> None:
    run = trained_run(user, 1, name=HOSTILE)
    page = user.open("/")
    expect(page.get_by_role("link", name=HOSTILE)).to_be_visible()
    page.get_by_role("link", name=HOSTILE).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    page.goto(f"{user.console.url}/compare?runs={run}")
    expect(page.get_by_role("link", name=HOSTILE)).to_be_visible()
    assert page.locator("main img").count() == 0


def test_operations_are_listed_with_how_long_they_waited_and_took(user: User) -> None:
    run = trained_run(user, 2)
    page = user.open(f"/training_runs/{run}/operations")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.first).to_contain_text("optim_step")
    page.get_by_label("Show").select_option("failed")
    expect(page.get_by_text("None has this status")).to_be_visible()


def test_an_operation_has_a_page_with_its_numbers(user: User) -> None:
    run = trained_run(user, 1)
    page = user.open(f"/training_runs/{run}/steps/1")
    expect(page.get_by_role("heading", name="Operation 1")).to_be_visible()
    expect(page.locator("#facts")).to_contain_text("forward_backward")
    expect(page.locator("#facts")).to_contain_text("Loss per token")
    user.open(f"/training_runs/{run}/steps/2")
    expect(page.get_by_text("No examples of this operation")).to_be_visible()


@pytest.mark.parametrize("path", ["/sessions", "/usage", "/server", "/keys"])
def test_pages_about_the_account_and_the_server_show_what_is_there(user: User, path: str) -> None:
    trained_run(user, 1)
    page = user.open(path)
    expect(page.locator("main table").first).to_be_visible()


def test_the_server_s_page_shows_its_engines(user: User) -> None:
    page = user.open("/server")
    row = page.locator("#slots tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("training and sampling")
    expect(row).to_contain_text("Up")
    expect(page.locator("#facts")).to_contain_text("the server's data folder")
    expect(page.locator("#facts")).to_contain_text("of sampler and trainer are close")
    expect(page.locator("#nodes-section")).to_be_hidden()


def test_the_server_s_page_shows_what_is_elsewhere(user: User) -> None:
    """Ranks and machines of engines, what their memory holds, who leads and where weights are."""

    def with_more(route: Any) -> None:
        answer = route.fetch()
        found = answer.json()
        if "slots" in found:
            memory = {"weights_bytes": 2**30, "adapter_bytes": 2**20, "adapter_limit_bytes": 2**31}
            found["slots"][0] |= {**memory, "ranks": 2, "host": "10.0.0.7"}
            found["nodes"] = [
                {"node": "abc", "address": "10.0.0.7", "is_alive": False}
                | {"cpus": 8.0, "gpus": 2.0, "memory_bytes": 2**35}
            ]
            found["trouble"] = "the cluster has no room"
        else:
            found |= {"storage": "s3", "epoch": 3, "on_policy": "exact"}
        route.fulfill(response=answer, json=found)

    user.page.route("**/api/v1/cluster", with_more)
    user.page.route("**/api/v1/console/server", with_more)
    page = user.open("/server")
    row = page.locator("#slots tbody tr")
    expect(row).to_contain_text("2 ranks, on 10.0.0.7")
    expect(row).to_contain_text("base 1.0 GiB · adapters 1.0 MiB of 2.0 GiB")
    expect(page.locator("#nodes tbody tr")).to_contain_text("Gone")
    expect(page.locator("#trouble")).to_have_text("the cluster has no room")
    for fact in ("Leads the servers of this store", "an S3 bucket", "agree to the last bit"):
        expect(page.locator("#facts")).to_contain_text(fact)


def test_a_session_leads_to_its_runs(user: User) -> None:
    trained_run(user, 1, name="in a session")
    page = user.open("/sessions")
    page.locator("tbody a").first.click()
    expect(page.get_by_role("link", name="in a session")).to_be_visible()


def test_the_run_page_is_painted_within_300_ms(user: User) -> None:
    """The best of several, or as quickly as a page of one sentence where the machine is busy."""
    run = trained_run(user, 20)
    excesses: list[float] = []
    while min(excesses, default=math.inf) >= 300 and len(excesses) < 20:
        plain = painted_ms(user.open("/nowhere"))
        page = user.open(f"/training_runs/{run}")
        expect(page.locator("figure.chart").first).to_be_visible()
        excesses.append(painted_ms(page) - plain)
    assert min(excesses) < 300, excesses


def painted_ms(page: Any) -> float:
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    while (found := page.evaluate(paint)) is None:  # the page forbids Playwright's own waiting
        page.wait_for_timeout(10)
    return float(found)
