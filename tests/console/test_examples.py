"""Examples of what was trained and answered, where the server keeps any."""

from __future__ import annotations

from tests.console.conftest import User, expect, train, trained_run
from tests.support import byte_tokenizer
from tests.support.in_process_server import MODEL
from tinsmith import ModelInput, SamplingParams


def test_an_operation_shows_its_examples_token_by_token(user: User) -> None:
    run = trained_run(user, 1)
    page = user.open(f"/training_runs/{run}/steps/1")
    expect(page.locator("article .token")).to_have_count(10)
    expect(page.locator("article .tokens")).to_have_text("he smith b")
    page.locator("article .tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card")).to_contain_text("Weight")
    expect(page.locator(".token-card")).to_contain_text("Probability")


def test_the_operation_that_saved_weights_shows_what_they_answered(user: User) -> None:
    def work(user: User) -> str:
        with user.client() as service:
            training = service.create_lora_training_client(MODEL, rank=4, seed=1)
            train(training, 1)
            sampler = training.save_weights_and_get_sampling_client()
            prompt = ModelInput.from_ints(byte_tokenizer.ids("the <b>smith</b>"))
            sampler.sample(prompt, 2, SamplingParams(max_tokens=5, seed=1)).result()
            return training.model_id

    run = user.in_thread(work)
    page = user.open(f"/training_runs/{run}/steps/3")
    answers = page.locator("article")
    expect(answers).to_have_count(2)
    expect(answers.first.locator(".prompt")).to_have_text("the <b>smith</b>")
    expect(answers.last.locator(".prompt")).to_have_count(0)  # the same: shown once
    expect(answers.last.get_by_role("heading")).to_contain_text("5 tokens")
    answers.last.locator("[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-card")).to_contain_text("Probability")
