"""Experts of sampled tokens are kept by owner, for a time, and within a bound on bytes."""

from __future__ import annotations

import numpy as np

from tinsmith.engine.base import ExpertsChosen, SampleJob
from tinsmith.server.sampling.kept_experts import KeptExperts
from tinsmith.types import (
    ImageChunk,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)

NUM_BYTES = 4 * (10 + 2) + 6 * (10 + 1)
"""Of a request of ten tokens with a sample of two: tokens, and six numbers for all but one."""


def keep(kept: KeptExperts, owner: str, job_id: str, num_samples: int = 1) -> None:
    tokens = np.array([5, 6], np.int32)
    response = SampleResponse(
        sequences=[
            SampledSequence(stop_reason="length", sequence_id=f"{job_id}:{n}", tokens_np=tokens)
            for n in range(num_samples)
        ]
    )
    chosen = ExpertsChosen(
        np.zeros((10, 3, 2), np.uint8), (np.ones((1, 3, 2), np.uint8),) * num_samples
    )
    kept.keep(owner, job(job_id, ModelInput.from_ints(range(10))), response, chosen)


def job(job_id: str, prompt: ModelInput) -> SampleJob:
    return SampleJob(
        job_id=job_id, base_model="m", weights_id=None, prompt=prompt, params=SamplingParams()
    )


def test_a_sequence_is_found_by_its_id_and_owner() -> None:
    kept = KeptExperts(10_000, 60.0)
    keep(kept, "one", "a", num_samples=2)
    assert kept.num_bytes == NUM_BYTES + 4 * 2 + 6
    found = kept.find("one", "a:1")
    assert found is not None and found.num_known == 11 and found.base_model == "m"
    for owner, sequence_id in (
        ("two", "a:1"),
        ("one", "a:2"),
        ("one", "b:0"),
        ("one", "a"),
        ("one", "a:-1"),
        ("one", "a:²"),
        ("one", "a:\u0661"),
        ("one", "a:01"),
        ("one", "a:" + "9" * 5000),
        ("one", ""),
    ):
        assert kept.find(owner, sequence_id) is None, sequence_id


def test_the_owner_who_takes_most_gives_way_oldest_first() -> None:
    kept = KeptExperts(4 * NUM_BYTES, 60.0)
    keep(kept, "small", "s")
    for number in range(10):
        keep(kept, "large", f"l{number}")
        assert kept.num_bytes <= 4 * NUM_BYTES
    assert kept.find("small", "s:0") is not None
    assert [n for n in range(10) if kept.find("large", f"l{n}:0")] == [7, 8, 9]


def test_what_is_larger_than_all_room_is_not_kept_and_costs_nobody_anything() -> None:
    kept = KeptExperts(2 * NUM_BYTES, 60.0)
    keep(kept, "one", "a")
    keep(kept, "two", "b", num_samples=100)
    assert kept.find("one", "a:0") is not None and kept.find("two", "b:0") is None


def test_what_is_too_old_is_not_found_and_leaves_no_bytes() -> None:
    kept = KeptExperts(10_000, 0.0)
    keep(kept, "one", "a")
    assert kept.find("one", "a:0") is None
    kept.expire()
    assert kept.num_bytes == 0


def test_a_request_that_ran_again_counts_once() -> None:
    kept = KeptExperts(10_000, 60.0)
    for _ in range(3):
        keep(kept, "one", "a")
    assert kept.num_bytes == NUM_BYTES


def test_a_prompt_with_an_image_is_not_kept() -> None:
    kept = KeptExperts(10_000, 60.0)
    prompt = ModelInput(chunks=[ImageChunk(data=b"x", format="png", expected_tokens=10)])
    chosen = ExpertsChosen(np.zeros((10, 3, 2), np.uint8), ())
    kept.keep("one", job("a", prompt), SampleResponse(sequences=[]), chosen)
    assert kept.num_bytes == 0


def test_choices_are_copied_from_both_sides_of_the_prompts_end() -> None:
    kept = KeptExperts(10_000, 60.0)
    keep(kept, "one", "a")
    found = kept.find("one", "a:0")
    assert found is not None
    for start, stop in ((0, 11), (0, 4), (9, 11), (10, 11), (3, 10)):
        into = np.full((stop - start, 3, 2), 9, np.uint8)
        found.copy_choices(start, stop, into)
        assert into[:, 0, 0].tolist() == [int(place >= 10) for place in range(start, stop)]
