"""The console on the real small model: a curve that grows while it learns, and an answer of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.console.conftest import expect
from tests.support.server_process import ServerProcess, serving
from tinsmith import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PATIENCE_MS = 60_000
"""The model computes on this machine's cores, which may be busy."""

SENTENCE = list(range(1000, 1024))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("real")
    with serving(folder, "--engine", "local", "--device", "cpu") as server:
        yield server


def test_a_curve_grows_while_the_real_model_trains_and_it_answers(
    server: ServerProcess, browser: Any
) -> None:
    datum = Datum(
        model_input=ModelInput.from_ints(SENTENCE[:-1]),
        loss_fn_inputs={"target_tokens": SENTENCE[1:], "weights": [1.0] * (len(SENTENCE) - 1)},
    )

    def create() -> tuple[ServiceClient, TrainingClient]:
        service = ServiceClient(base_url=server.url, api_key=server.key)
        (model,) = service.get_server_capabilities().supported_models
        return service, service.create_lora_training_client(str(model.model_name), rank=8)

    def learn(training: TrainingClient) -> None:
        passed = training.forward_backward([datum], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-3)).result()
        passed.result()

    context = browser.new_context()
    page = context.new_page()
    with ThreadPoolExecutor(1) as pool:  # our client may not block a thread with an event loop
        service, training = pool.submit(create).result()
        context.set_default_timeout(PATIENCE_MS)
        assert context.request.post(f"{server.url}/console/login", data={"key": server.key}).ok
        page.goto(f"{server.url}/training_runs/{training.model_id}")
        expect(page.get_by_text("No steps yet")).to_be_visible()
        expect(page.locator("#live")).to_have_text("Live")
        plot = page.locator('[data-key="Loss per token"] .plot')
        for number in range(1, 6):
            pool.submit(learn, training).result(120)
            expect(plot).to_have_attribute("data-points", str(number), timeout=PATIENCE_MS)
        page.locator('[data-key="Loss per token"]').get_by_role("button", name="Table").click()
        losses = page.locator('[data-key="Loss per token"] tbody tr td:nth-child(3)')
        last, *_, first = map(float, losses.all_inner_texts())
        assert last < first / 2, "the curve shows that it learned"
        pool.submit(service.close, "success").result()
    page.goto(f"{server.url}/playground")
    expect(page.locator("#prompt")).to_be_focused()  # the page listens, and moves it no more
    page.get_by_text("Options").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("12")
    page.get_by_label("Message").fill("What is the capital of France?")
    page.keyboard.press("Enter")
    expect(page.locator(".reply .tokens")).to_contain_text("Paris", timeout=PATIENCE_MS)
    context.close()
