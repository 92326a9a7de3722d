"""A model of experts in the whole engine: created, trained, frozen, sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import save_tokenizer
from tests.support.tiny_families import save_tiny
from tinsmith.engine.base import Pass, SampleJob, Step
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.types import AdamParams, Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams

SENTENCE = [10, 40, 20, 60, 30, 50, 12, 44]


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """A core sets torch's thread count, which in these tests is this process's own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("model_type", "learning_rate"), [("qwen3_moe", 0.02), ("gpt_oss", 0.01)])
def test_a_model_of_experts_learns_a_sentence_and_says_it(
    model_type: str, learning_rate: float, tmp_path: Path
) -> None:
    save_tiny(model_type, tmp_path)
    save_tokenizer(tmp_path)
    core = EngineCore(
        LocalEngineConfig(models={"tiny": str(tmp_path)}, device="cpu", deterministic=True)
    )
    assert core.create_adapter("a", "tiny", LoraConfig(rank=8, seed=1)) is None
    datum = Datum(ModelInput.from_ints(SENTENCE[:-1]), {"target_tokens": SENTENCE[1:]})
    request = Pass(adapter_id="a", data=[datum], loss_fn="cross_entropy")
    for _ in range(30):
        (done,) = [finished for finished in core.run_passes([request]) if finished]
        core.step([Step(adapter_id="a", params=AdamParams(learning_rate=learning_rate))])
    assert done.result.metrics["loss:sum"] < 0.5
    assert core.freeze("a", "s") is None
    params = SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    job = SampleJob(
        job_id="j",
        base_model="tiny",
        weights_id="s",
        prompt=ModelInput.from_ints(SENTENCE[:2]),
        params=params,
    )
    assert core.submit_sample(job) is None
    ((_, answer),) = [pair for _ in range(20) for pair in core.sampling_turn()]
    assert isinstance(answer, SampleResponse)
    assert answer.sequences[0].tokens == SENTENCE[2:]
