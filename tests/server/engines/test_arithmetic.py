"""The page about 64 GPUs says what the formula says, and the formula what a simulation says."""

from __future__ import annotations

from pathlib import Path

import pytest

import cluster_arithmetic
from cluster_arithmetic import Load, predicted_steps_per_second, simulated_steps_per_second

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "arithmetic.md"


def test_the_page_has_the_table_of_the_formula() -> None:
    assert "\n".join(cluster_arithmetic.table()) in PAGE.read_text()


@pytest.mark.parametrize(
    "load",
    [
        Load(16, 512),
        Load(16, 32_768),
        Load(64, 512),
        Load(2000, 32_768),
        Load(2000, 512, servers=4),
        Load(512, 4096, servers=4),
    ],
    ids=str,
)
def test_queues_that_are_simulated_agree_with_the_formula(load: Load) -> None:
    simulated = simulated_steps_per_second(load, seconds=30.0)
    assert simulated == pytest.approx(predicted_steps_per_second(load), rel=0.1)
