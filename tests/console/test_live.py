"""Every page hears of what happens within a second, and a tab that nobody sees costs nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from tests.console.conftest import PATIENCE_MS, Console, User, expect, train, trained_run
from tests.support.in_process_server import MODEL
from tinsmith import ServiceClient, TrainingClient
from tinsmith.server.console.events import GATHER_SECONDS
from tinsmith.server.console.watching import WATCH_SECONDS
from tinsmith.server.edge.auth import note_key_change

ATTEMPTS = 5
"""A busy machine may hold up any one of them."""

TABS_OF_A_WINDOW = 4
"""A browser keeps six connections to a server, and a tab that is seen has one for its events."""

_NOTE = """([selector, attribute]) => {
  const read = () => [...document.querySelectorAll(selector)]
    .map((e) => (attribute ? e.getAttribute(attribute) : e.textContent)).join("|");
  const before = read();
  document.body.dataset.changed = "";
  window.noting?.disconnect();
  window.noting = new MutationObserver(() => {
    if (document.body.dataset.changed || read() === before) return;
    document.body.dataset.changed = String(Date.now() / 1000);
  });
  window.noting.observe(document.querySelector("main"),
    { subtree: true, childList: true, characterData: true, attributes: true });
}"""

_HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, value: isHidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@dataclass
class Watched:
    """A page, what of it changes, and after what."""

    path: str
    shows: str
    event: str
    attribute: str = ""


def watched(run: str, step: int) -> dict[str, Watched]:
    """Every page that shows something that may change; `step` is the next operation of the run."""
    of_run = f"/training_runs/{run}"
    first = f"/checkpoints/{quote(run, safe='')}/{quote('sampler_weights/first', safe='')}"
    return {
        "runs": Watched("/", f'[data-now="{run}"]', "step"),
        "run": Watched(of_run, '[data-key="Loss per token"] .plot', "step", "data-points"),
        "operations": Watched(f"{of_run}/operations", "tbody a", "step"),
        "step": Watched(f"{of_run}/steps/{step}", "#facts dd", "step"),
        "compare": Watched(
            f"/compare?runs={run}", '[data-key="Loss per token"] .plot', "step", "data-points"
        ),
        "usage": Watched("/usage", "#numbers dd:first-of-type", "step"),
        "checkpoints": Watched("/checkpoints", "tbody a", "checkpoint"),
        "checkpoint": Watched(first, "#lineage li", "checkpoint"),
        "playground": Watched("/playground", ".lane-head option", "checkpoint"),
        "server": Watched("/server", "#slots td:nth-child(5)", "run"),
        "session": Watched(f"/sessions/{run.partition(':')[0]}", "#runs tbody a", "run"),
        "sessions": Watched("/sessions", "tbody a", "session"),
        "keys": Watched("/keys", "#keys tbody td:nth-child(3)", "key"),
    }


class Work:
    """What a client does, in a thread of its own."""

    def __init__(self, user: User, pool: ThreadPoolExecutor, stack: ExitStack) -> None:
        self._user = user
        self._pool = pool
        self._stack = stack
        self._number = 0
        self._service: ServiceClient
        self._training: TrainingClient

    def begin(self) -> str:
        def begin() -> str:
            self._service = self._stack.enter_context(self._user.client())
            self._training = self._service.create_lora_training_client(MODEL, rank=4, seed=1)
            train(self._training, 2)
            self._training.save_weights_for_sampler("first").result()
            return self._training.model_id

        return self._pool.submit(begin).result(60)

    def do(self, event: str) -> None:
        self._number += 1
        work: dict[str, Callable[[], object]] = {
            "step": lambda: train(self._training, 1),
            "checkpoint": lambda: self._training.save_weights_for_sampler(
                f"another-{self._number}"
            ).result(),
            "run": lambda: self._service.create_lora_training_client(MODEL, rank=4, seed=2),
            "session": lambda: self._stack.enter_context(
                self._user.client()
            ).create_sampling_client(base_model=MODEL),
            "key": self._revoke,
        }
        self._pool.submit(work[event]).result(60)

    def _revoke(self) -> None:
        """As the command line does it, beside the server."""
        console = self._user.console
        (key, *_) = [
            key
            for key in console.call(console.service.store.keys.list())
            if key.owner == self._user.owner and key.name == "spare" and key.revoked_at is None
        ]
        console.call(console.service.store.keys.revoke(key.key_id, time.time()))
        note_key_change(console.service.config.data_dir)


@contextmanager
def at_work(user: User) -> Iterator[Work]:
    with ThreadPoolExecutor(1) as pool:
        stack = ExitStack()
        try:
            yield Work(user, pool, stack)
        finally:
            pool.submit(stack.close).result(60)


def window(browser: Any, console: Console, user: User) -> Any:
    context = browser.new_context()
    assert context.request.post(f"{console.url}/console/login", data={"key": user.key}).ok
    return context


@pytest.mark.slow
def test_every_page_shows_what_happens_within_a_second(
    user: User, browser: Any, console: Console
) -> None:
    for _ in range(ATTEMPTS):
        console.new_key(user.owner, "spare")
    with at_work(user) as work, ExitStack() as windows:
        run = work.begin()
        pages: dict[str, Any] = {}
        # A busy machine is slow at everything: how slow, the same page's loading says.
        loading: dict[str, float] = {}
        best = dict.fromkeys(watched(run, 0), math.inf)
        for attempt in range(ATTEMPTS):
            # Operations so far: a model, two passes and steps and a checkpoint; then as many again
            # as each attempt sends.
            places = watched(run, 6 + 3 * attempt)
            waiting = {name: place for name, place in places.items() if best[name] >= 1}
            if not waiting:
                break
            for name, place in waiting.items():
                if name not in pages:
                    if len(pages) % TABS_OF_A_WINDOW == 0:
                        context = window(browser, console, user)
                        windows.callback(context.close)
                    pages[name] = context.new_page()
                began = time.time()
                if name == "step" or attempt == 0:
                    pages[name].goto(console.url + place.path)
                expect(pages[name].locator("#live")).to_have_text("Live")
                expect(pages[name].locator(place.shows).first).to_be_attached()
                loading.setdefault(name, time.time() - began)
            for event in dict.fromkeys(place.event for place in places.values()):
                told = {name: place for name, place in waiting.items() if place.event == event}
                for name, place in told.items():
                    pages[name].evaluate(_NOTE, [place.shows, place.attribute])
                work.do(event)
                happened = time.time()
                for name in told:
                    body = pages[name].locator('body:not([data-changed=""])')
                    body.wait_for(timeout=PATIENCE_MS)
                    seconds = float(body.get_attribute("data-changed")) - happened
                    best[name] = min(best[name], seconds - 2 * loading[name])
        assert max(best.values()) < 1, best
    # However busy the machine: what is waited for on purpose, 0.3 seconds of it in the pages.
    assert GATHER_SECONDS + WATCH_SECONDS + 0.3 < 1


def test_nothing_moves_when_operations_begin_to_wait(user: User) -> None:
    waiting = {"waiting": 0, "ahead_tokens": 0, "reason": "nothing of this run is waiting"}
    with at_work(user) as work:
        run = work.begin()
        user.page.route("**/queue", lambda route: route.fulfill(json=waiting))
        page = user.open(f"/training_runs/{run}")
        chart = page.locator("figure.chart").first
        expect(chart).to_be_visible()
        expect(page.locator("#live")).to_have_text("Live")
        expect(page.locator("#queue")).to_have_text("Queue: nothing of this run is waiting.")
        before = chart.bounding_box()
        waiting |= {"waiting": 1, "reason": "it is running"}
        work.do("step")
        expect(page.locator("#queue")).to_have_text("Queue: 1 waiting, it is running.")
        assert chart.bounding_box() == before


def test_a_checkpoint_s_page_says_when_another_tab_has_deleted_it(user: User) -> None:
    run = trained_run(user, 1, "a")
    quoted = quote(run, safe="")
    page = user.open(f"/checkpoints/{quoted}/{quote('sampler_weights/a', safe='')}")
    expect(page.locator("#live")).to_have_text("Live")
    deleted = page.context.request.delete(
        f"{user.console.url}/api/v1/training_runs/{quoted}/checkpoints/sampler_weights/a",
        headers={"sec-fetch-site": "same-origin"},
    )
    assert deleted.ok
    expect(page.locator("#facts")).to_contain_text("it may have expired or been deleted")
    expect(page.get_by_role("button", name="Delete")).to_have_count(0)


def test_a_tab_that_nobody_sees_has_no_stream_and_catches_up_when_it_is_seen(user: User) -> None:
    events = user.console.service.events
    with at_work(user) as work:
        page = user.open(f"/training_runs/{work.begin()}")
        plot = page.locator('[data-key="Loss per token"] .plot')
        expect(plot).to_have_attribute("data-points", "2")
        expect(page.locator("#live")).to_have_text("Live")
        num_readers = events.num_readers
        page.evaluate(_HIDE, True)
        until(lambda: events.num_readers == num_readers - 1)
        work.do("step")
        expect(plot).to_have_attribute("data-points", "2")
        page.evaluate(_HIDE, False)
        expect(plot).to_have_attribute("data-points", "3")
        until(lambda: events.num_readers == num_readers)


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
