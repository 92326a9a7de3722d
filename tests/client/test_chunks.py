"""Cutting a call into requests, and joining their outputs again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.client.calls.chunking import split
from tinsmith.client.calls.combining import combine, combine_metrics
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput, TensorData


def datum(num_tokens: int) -> Datum:
    return Datum(ModelInput.from_ints(list(range(num_tokens))), {})


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=50),
    max_items=st.integers(1, 10),
    max_bytes=st.integers(1, 300),
)
def test_runs_keep_the_order_and_the_limits(
    sizes: list[int], max_items: int, max_bytes: int
) -> None:
    data = [datum(size) for size in sizes]
    runs = list(split(data, max_items=max_items, max_bytes=max_bytes))
    assert [each for run in runs for each in run] == data
    for run, following in zip(runs, [*runs[1:], []], strict=True):
        size = sum(each.nbytes for each in run)
        assert len(run) <= max_items
        assert size <= max_bytes or len(run) == 1
        if following:
            # No run is closed before it has to be.
            assert len(run) == max_items or size + following[0].nbytes > max_bytes


def test_no_data_gives_no_runs() -> None:
    assert list(split([], max_items=3, max_bytes=10)) == []


def output(values: list[float], metrics: dict[str, float]) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData.from_numpy(np.array([v], "f4"))} for v in values]
    return ForwardBackwardOutput("ArrayRecord", outputs, metrics)


@given(
    st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=5), min_size=1, max_size=5)
)
def test_combined_runs_equal_one_run_over_the_same_data(runs: list[list[float]]) -> None:
    """S47: outputs concatenated; sums, means, extremes as over all of the data."""

    def metrics(values: list[float]) -> dict[str, float]:
        return {
            "x:sum": float(np.sum(values)),
            "x:mean": float(np.mean(values)),
            "x:min": min(values),
            "x:max": max(values),
        }

    everything = [value for run in runs for value in run]
    joined = combine([output(run, metrics(run)) for run in runs])
    whole = output(everything, metrics(everything))
    assert joined.loss_fn_outputs == whole.loss_fn_outputs
    assert joined.metrics.keys() == whole.metrics.keys()
    for key, value in whole.metrics.items():
        assert joined.metrics[key] == pytest.approx(value, abs=1e-5)


def test_the_other_rules() -> None:
    metrics = [
        {"a:slack": 1.0, "h:hash2": 2.0**63, "u:unique": 7.0, "n:new": 1.0, "once:sum": 1.0},
        {"a:slack": 4.0, "h:hash2": 2.0**63 + 4096, "u:unique": 8.0, "n:new": 1.0},
        {"a:slack": 4.0, "h:hash2": -1.0, "u:unique": 9.0, "n:new": 1.0},
    ]
    assert combine_metrics(metrics, [2, 1, 1]) == {
        "a:slack": 4.0 - 2.5,
        "h:hash2": 4096 - 1,
        "u:unique": 7.0,
        "u:unique_1": 8.0,
        "u:unique_2": 9.0,
    }


@pytest.mark.parametrize("name", ["loss", "a:b:sum", "a:"])
def test_a_metric_without_exactly_one_rule_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="must be named"):
        combine_metrics([{name: 1.0}], [1])


def test_our_rules_are_the_official_ones() -> None:
    """S47: the official reduction is the reference."""
    helpers = pytest.importorskip("tinker.lib.chunked_fwdbwd_helpers")
    draw = np.random.default_rng(0)
    names = ["a:mean", "b:sum", "c:min", "d:max", "e:slack", "f:hash2", "g:unique", "h:other"]
    outputs = [
        output([0.0] * int(count), {name: float(draw.normal() * 1e3) for name in names})
        for count in (3, 1, 5)
    ]
    ours, theirs = combine(outputs), helpers.combine_fwd_bwd_output_results(outputs)
    assert ours.metrics == pytest.approx(theirs.metrics)
