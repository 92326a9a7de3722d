"""When an engine holds too much, and which models have to go to disk."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tinsmith.engine.base import Health
from tinsmith.server.operations.residence import in_order_of_leaving, is_full


@dataclass(frozen=True)
class Model:
    owner: str
    last_used_at: float


def test_of_one_owners_models_the_one_idle_longest_goes_first() -> None:
    models = [Model("a", at) for at in (3.0, 1.0, 2.0)]
    assert [model.last_used_at for model in in_order_of_leaving(models)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("seed", range(50))
def test_who_holds_an_even_part_loses_none_whatever_others_bring(seed: int) -> None:
    """However long his are idle, and however many owners bring however many."""
    rng = random.Random(seed)
    owners = [f"owner {number}" for number in range(rng.randint(1, 8))]
    models = [
        Model(owner, rng.uniform(0, 100)) for owner in owners for _ in range(rng.randint(0, 40))
    ]
    most = rng.randint(1, 60)
    modest = [Model("modest", rng.uniform(0, 1)) for _ in range(most // (len(owners) + 1))]
    everybody = [*models, *modest]
    rng.shuffle(everybody)
    leaving = in_order_of_leaving(everybody)[: max(0, len(everybody) - most)]
    assert not set(modest) & set(leaving)


@pytest.mark.parametrize(
    ("health", "max_bytes", "wanted"),
    [
        (Health(alive=True, memory_bytes=10), None, False),
        (Health(alive=True, memory_bytes=10), 10, False),
        (Health(alive=True, memory_bytes=11), 10, True),
        (Health(alive=True, adapter_bytes=11), None, False),
        (Health(alive=True, adapter_bytes=10, adapter_limit_bytes=10), None, False),
        (Health(alive=True, adapter_bytes=11, adapter_limit_bytes=10), None, True),
        (Health(alive=True, adapter_bytes=11, adapter_limit_bytes=10), 100, True),
    ],
)
def test_an_engine_is_full_beyond_its_limit_or_when_adapters_exceed_their_share(
    health: Health, max_bytes: int | None, wanted: bool
) -> None:
    assert is_full(health, max_bytes) == wanted
