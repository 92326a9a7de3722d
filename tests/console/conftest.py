"""One server and one browser for all tests of the console; each test has an owner of its own.

The browser is Playwright's blocking one: it keeps an event loop in this thread while it is there,
so tests of this package are plain functions, and it is gone when the package's last test has run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

from tests.support import byte_tokenizer
from tests.support.in_process_server import MODEL
from tests.support.listening import serving_app
from tinsmith import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.server.config_sources import build_config
from tinsmith.server.edge.app import build_app
from tinsmith.server.edge.auth import create_key
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.metrics import Metrics
from tinsmith.server.service import Service
from tinsmith.server.serving import claim_store

T = TypeVar("T")

PATIENCE_MS = 30_000
_owners = itertools.count(1)


@dataclass
class Console:
    """A server of this process that listens on a port, on an event loop in another thread."""

    service: Service
    url: str
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def new_key(self, owner: str, name: str = "laptop") -> str:
        return self.call(create_key(self.service.store, owner, name))[0]

    def revoke_all(self, owner: str) -> None:
        async def revoke() -> None:
            for key in await self.service.store.keys.list():
                if key.owner == owner:
                    await self.service.store.keys.revoke(key.key_id, 1.0)
            self.service.auth.forget_keys()

        self.call(revoke())


@pytest.fixture(scope="package")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder = tmp_path_factory.mktemp("console")
    model = FakeModel(name=MODEL, tokenizer_folder=byte_tokenizer.save(folder / "tokenizer"))
    engine = FakeEngineConfig(models=(model,), token_seconds=0.01)
    ready: list[Console] = []
    is_ready, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        config = build_config(
            {"data_dir": folder / "data", "hold_seconds": 0.5, "keep_examples": 2}
        )
        store = await claim_store(config)
        secret = await store.keys.secret("signing")
        service = Service(config, store, secret, _factory(engine), Metrics())
        await service.start()
        async with serving_app(build_app(service), service) as ((_, port), _):
            service.url = f"http://127.0.0.1:{port}"
            ready.append(Console(service, service.url, asyncio.get_running_loop()))
            is_ready.set()
            await is_over.wait()
            service.begin_drain()
        await service.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="console server")
    thread.start()
    assert is_ready.wait(30)
    yield ready[0]
    ready[0].loop.call_soon_threadsafe(is_over.set)
    thread.join(30)


def _factory(config: FakeEngineConfig) -> Callable[[SlotPlan], Coroutine[Any, Any, FakeEngine]]:
    async def factory(plan: SlotPlan) -> FakeEngine:
        return FakeEngine(config)

    return factory


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def expect(what: Any) -> Any:
    """Playwright's, imported when a browser is there: tests are collected without it, too. Patient:
    a busy machine may take many times as long as an idle one."""
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    return expect(what)


@dataclass
class User:
    """Somebody with a key, and a browser that was let in with it."""

    owner: str
    key: str
    console: Console
    page: Any
    faults: list[str] = field(default_factory=list)
    """What a page must not do: errors, breaches of the policy, requests to other hosts."""

    def open(self, path: str) -> Any:
        self.page.goto(self.console.url + path)
        return self.page

    def in_thread(self, work: Callable[[User], T]) -> T:
        """Calls of our client, which may not block a thread that has an event loop."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work, self).result(60)

    @contextlib.contextmanager
    def client(self) -> Iterator[ServiceClient]:
        with ServiceClient(base_url=self.console.url, api_key=self.key) as service:
            yield service


@pytest.fixture
def new_user(console: Console, browser: Any) -> Iterator[Callable[..., User]]:
    contexts: list[Any] = []
    users: list[User] = []

    def make(**options: Any) -> User:
        owner = f"owner-{next(_owners)}"
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        user = User(owner, console.new_key(owner), console, context.new_page())
        answer = context.request.post(f"{console.url}/console/login", data={"key": user.key})
        assert answer.status == 204, answer.text()
        _watch(user)
        users.append(user)
        return user

    yield make
    for context in contexts:
        context.close()
    for user in users:
        assert user.faults == []


@pytest.fixture
def user(new_user: Callable[..., User]) -> User:
    return new_user()


def _watch(user: User) -> None:
    host = urlsplit(user.console.url).netloc

    def said(message: Any) -> None:
        # The browser notes every answer of 400 and above; what pages make of it is tested.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            user.faults.append(message.text)

    user.page.on("console", said)
    user.page.on("pageerror", lambda error: user.faults.append(str(error)))
    user.page.on(
        "request",
        lambda request: (
            urlsplit(request.url).netloc in (host, "")
            or user.faults.append(f"a request to {request.url}")
        ),
    )


DATA = [
    Datum(
        model_input=ModelInput.from_ints(byte_tokenizer.ids("the smith ")),
        loss_fn_inputs={"target_tokens": byte_tokenizer.ids("he smith b"), "weights": [1.0] * 10},
    )
]


def train(training: TrainingClient, num_steps: int) -> None:
    for _ in range(num_steps):
        passed = training.forward_backward(DATA, "cross_entropy")
        stepped = training.optim_step(AdamParams(learning_rate=0.1))
        passed.result()
        stepped.result()


def trained_run(
    user: User, num_steps: int = 3, *checkpoints: str, name: str = "a run", seed: int = 1
) -> str:
    """The id of a run that was trained a little and saved under these names."""

    def work(user: User) -> str:
        with user.client() as service:
            training = service.create_lora_training_client(
                MODEL, rank=4, seed=seed, user_metadata={"name": name}
            )
            train(training, num_steps)
            for checkpoint in checkpoints:
                training.save_weights_for_sampler(checkpoint).result()
            return training.model_id

    return user.in_thread(work)
