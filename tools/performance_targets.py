"""What each figure of docs/performance.md should be, and where its report has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Result = dict[str, Any]
Figure = str | Callable[[Result], float]
"""Where a report has it, as keys with dots between, or how it follows from what is there."""


class Target(NamedTuple):
    what: str
    part: str
    figure: Figure
    bound: float | None
    """None where nothing was asked: the figure is only told."""

    is_at_least: bool = True

    def read(self, result: Result) -> float:
        if not isinstance(self.figure, str):
            return self.figure(result)
        found: Any = result
        for key in self.figure.split("."):
            found = found[key]
        return float(found)

    def is_met(self, value: float) -> bool:
        if self.bound is None:
            return True
        return value >= self.bound if self.is_at_least else value <= self.bound


def _told(what: str, part: str, figure: Figure) -> Target:
    return Target(what, part, figure, None)


def _at_most(what: str, part: str, figure: Figure, bound: float) -> Target:
    return Target(what, part, figure, bound, is_at_least=False)


def _peak(name: str) -> Figure:
    return lambda r: r["cases"][name]["ours_peak_gb"] / r["cases"][name]["peft_peak_gb"]


def _largest_peak(result: Result) -> float:
    """Of the largest case in which both sides had enough memory."""
    shared = [case for case in result["cases"].values() if "peft_peak_gb" in case]
    largest = max(shared, key=lambda case: case["tokens"])
    return float(largest["ours_peak_gb"] / largest["peft_peak_gb"])


SECTIONS: dict[str, list[Target]] = {
    "Client and codec, beside `tinker` 0.36.0": [
        Target("encode a pass", "codec", "encode_request.times_faster", 2),
        Target("decode a pass", "codec", "decode_request.times_faster", 2),
        Target("samples a second", "client", "ours_is_better_by.samples_per_s", 5),
        Target("processor time a sample", "client", "ours_is_better_by.cpu_ms_per_sample", 4),
        Target("forward_backward round trip", "client", "ours_is_better_by.forward_backward_ms", 2),
        Target("optim_step round trip", "client", "ours_is_better_by.optim_step_ms", 2),
        Target("datums from lists", "client", "ours_is_better_by.build_datums_ms", 2),
        Target("cold start to first sample", "client", "ours_is_better_by.cold_start_s", 3),
        Target("peak memory", "client", "ours_is_better_by.peak_memory_mb", 2),
    ],
    "Server, from call to result": [
        _at_most("a small `forward_backward`, ms", "server", "tinsmith.forward_backward_ms", 8),
        _at_most("a `sample`, ms", "server", "tinsmith.sample_ms", 5),
        _at_most(
            "SFT of 8x256: time outside the engine, %",
            "loop",
            "supervised_8x256.percent_outside_engine",
            3,
        ),
        _at_most("first training step of a new client, s", "loop", "first_training_step_s", 3),
        _at_most(
            "ready after `kill -9`, 50 models and 1,000 operations, s",
            "recovery",
            "ready_after_kill_s",
            10,
        ),
    ],
    "Several engines, on two CPU cores": [
        Target("two engines of one core, times one", "engines", "local.ratio", 1.85),
        Target("four engines of a fixed time, times one", "engines", "fake.ratio", 3.9),
        _at_most("what TCP with TLS adds to a call, ms", "engines", "wire.step.added_ms", 0.3),
        _at_most(
            "from `kill -9` of an engine until its models have trained, s",
            "engines",
            lambda r: max(r["death"]["all_answered_after_kill_s"]),
            5,
        ),
        _at_most(
            "from the loss of a node of Ray's until its models have trained, s",
            "engines",
            lambda r: max(r["node"]["all_answered_after_loss_s"]),
            10,
        ),
        _at_most(
            "choosing among 64 slots with 2,000 models, 99 of 100 times, ms",
            "engines",
            "placement.p99_ms",
            1,
        ),
        _at_most(
            "1,000 operations a second of these, pretended engines included, cores",
            "operations",
            "operations.cpu_ms",  # of 1,000 a second, so as many cores
            0.5,
        ),
    ],
    "Being looked at": [
        _at_most(
            "recording a run's curves, % of the event loop's time",
            "console",
            "recording.percent_more_on_loop.estimate",
            2,
        ),
        _at_most(
            "the same, % of all threads' time, the store's among them",
            "console",
            "recording.percent_more.estimate",
            2,
        ),
        _at_most(
            "the same with what long runs cost later, drawn together and moved out of the log",
            "console",
            "recording.percent_more_in_the_end.estimate",
            2,
        ),
        _at_most("200 open tabs, five operations a second, cores", "console", "tabs.cores", 0.1),
    ],
    "Training on two CPU cores, SmolLM2-135M in float32": [
        Target("ragged batch, times PEFT", "training", "cases.ragged.times_faster", 2.5),
        Target("4x128, times PEFT", "training", "cases.4x128.times_faster", 1.2),
        Target("8x256, times PEFT", "training", "cases.8x256.times_faster", 1.2),
        Target("8x256, share of matmul rate", "training", "cases.8x256.ours_of_matmul_rate", 0.75),
        _at_most("8x256, peak memory over PEFT's", "training", _peak("8x256"), 1),
        _at_most("ragged, peak memory over PEFT's", "training", _peak("ragged"), 1),
        Target(
            "four tenants of 1x32, times PEFT", "tenants", "tenants.4.times_faster_than_peft", 1.6
        ),
        _at_most("resident adapters, memory over their own", "tenants", "resident.ratio", 1.0),
        _at_most(
            "`optim_step`, times the bandwidth floor",
            "tenants",
            "optim_step.times_the_bandwidth_floor",
            2,
        ),
    ],
    "Sampling on two CPU cores, SmolLM2-135M in float32": [
        Target("1 at a time, times generate", "sampling", "1.times_generate", 1.4),
        Target("16 at once, times generate", "sampling", "16.times_generate", 3),
        Target(
            "64 at once over 8 at once, tokens/s",
            "sampling",
            lambda r: r["64"]["tokens_per_s"] / r["8"]["tokens_per_s"],
            3,
        ),
        _at_most("prefills that a group of 8 costs", "sampling", "group.prefills_a_group", 1.2),
    ],
}
for _shape, _rate, _tenants, _few, _many in (
    ("qwen3-0.6b", 0.45, 55_700, 40_000, 70_000),
    ("qwen3-4b", 0.68, 22_396, 17_000, 34_000),
):
    SECTIONS[f"One H200, bfloat16, random weights of the shape of {_shape}"] = [
        Target(
            "16x1024, share of matmul rate",
            f"training-cuda-{_shape}",
            "cases.16x1024.ours_of_matmul_rate",
            _rate,
        ),
        _at_most(
            "peak memory over PEFT's, at most 16x1024",
            f"training-cuda-{_shape}",
            _largest_peak,
            0.6,
        ),
        Target(
            "eight tenants of 2x256, tokens/s",
            f"tenants-cuda-{_shape}",
            "tenants.8.together_tokens_s",
            _tenants,
        ),
        Target("64 at once, tokens/s", f"sampling-cuda-{_shape}", "64.tokens_per_s", _few),
        Target("256 at once, tokens/s", f"sampling-cuda-{_shape}", "256.tokens_per_s", _many),
        _at_most(
            "eight adapters over one, time", f"sampling-cuda-{_shape}", "mixed.eight_over_one", 1.15
        ),
        _at_most(
            "one adapter over none, time", f"sampling-cuda-{_shape}", "mixed.one_over_none", 1.1
        ),
        Target(
            "256 at once, share of the floor of a step",
            f"sampling-cuda-{_shape}",
            "256.of_floor",
            0.55,
        ),
        *(
            Target(
                f"over HTTP, {_count} samples at once, of the engine's rate",
                f"service-cuda-{_shape}",
                f"sample.{_count}.ratio",
                0.85,
            )
            for _count in (64, 256, 1024)
        ),
        Target(
            "over HTTP, 16x1024, of the engine's rate",
            f"service-cuda-{_shape}",
            "train.ratio",
            0.95,
        ),
        Target(
            "over HTTP, eight tenants of 2x256, of the engine's rate",
            f"service-cuda-{_shape}",
            "tenants.ratio",
            0.75,
        ),
        *(
            _at_most(f"after `/readyz`: {_what}, s", f"service-cuda-{_shape}", f"first.{_field}", 3)
            for _what, _field in (
                ("first training step", "step_s"),
                ("first sample", "sample_s"),
                ("first burst with an adapter", "burst_with_adapter_s"),
            )
        ),
        Target(
            "256 samples after every large pass and eight more models, over before",
            f"service-cuda-{_shape}",
            "history.after_over_before",
            0.9,
        ),
        _at_most(
            "saving a sampler: how long other work in the engine waits, s",
            f"service-cuda-{_shape}",
            "save.engine_held_s",
            0.05,
        ),
        _told(
            "training of 1x32768 over HTTP, tokens/s",
            f"service-cuda-{_shape}",
            "history.long_tokens_per_s",
        ),
    ]


def _cost_of_exact(shape: str) -> list[Target]:
    """Of `on_policy = "exact"`, as time over that without it."""
    part = f"on_policy-cuda-{shape}"
    return [
        *(
            _at_most(
                f"sampler and trainer equal to the bit: {count} samples at once, time over default",
                part,
                f"sampling_cost.{count}",
                1.6,
            )
            for count in ("64", "256")
        ),
        _at_most(
            "sampler and trainer equal to the bit: training 16x1024, time over default",
            part,
            "training_cost",
            1.25,
        ),
    ]


for _shape in ("qwen3-0.6b", "qwen3-4b"):
    SECTIONS[f"One H200, bfloat16, random weights of the shape of {_shape}"] += _cost_of_exact(
        _shape
    )
SECTIONS["One H200, bfloat16, SmolLM2-135M"] = [
    *_cost_of_exact("smollm2"),
    _at_most(
        "log-probabilities, sampler and trainer, `on_policy` exact: mean difference",
        "on_policy-cuda-smollm2",
        "exact.difference.mean",
        0.0,
    ),
    _at_most("the same by default", "on_policy-cuda-smollm2", "close.difference.mean", 0.02),
]


def _family(shape: str, asked: dict[str, float]) -> list[Target]:
    """What `families` measures; `asked` has bounds by name."""
    part = f"families-cuda-{shape}"
    figures: dict[str, Figure] = {
        "training of 16x1024, share of matmul rate": "full.training.of_matmul_rate",
        "training of 16x1024, times PEFT": "full.compared.training_times_theirs",
        "eight tenants of 2x256, times one after another": (
            "full.tenants.times_faster_than_one_by_one"
        ),
        "64 at once, decoding alone, tokens/s": "full.64.decode_tokens_per_s",
        "64 at once, share of the floor of a step": "full.64.of_floor",
        "256 at once, decoding alone, tokens/s": "full.256.decode_tokens_per_s",
        "64 at once, times `generate`": "full.compared.64_times_theirs",
        "state of a sequence, MB": lambda r: r["full"]["state_bytes_a_sequence"] / 1e6,
    }
    return [
        *(Target(what, part, figure, asked.get(what)) for what, figure in figures.items()),
        _at_most(
            "training of 16x1024 with the base in nf4, time over bfloat16",
            part,
            lambda r: r["nf4"]["training"]["ms"] / r["full"]["training"]["ms"],
            1.3,
        ),
    ]


for _shape, _asked in (
    (
        "qwen3-30b-a3b",
        {
            "training of 16x1024, share of matmul rate": 0.3,
            "training of 16x1024, times PEFT": 3,
            "eight tenants of 2x256, times one after another": 5,
            "64 at once, decoding alone, tokens/s": 6000,
            "256 at once, decoding alone, tokens/s": 12_000,
        },
    ),
    (
        "qwen3.5-4b",
        {
            "training of 16x1024, share of matmul rate": 0.5,
            "training of 16x1024, times PEFT": 3,
            "64 at once, decoding alone, tokens/s": 12_000,
        },
    ),
    ("gpt-oss-20b", {"training of 16x1024, times PEFT": 3}),
    ("moonlight-16b-a3b", {}),
):
    SECTIONS[f"One H200, bfloat16, random weights of the shape of {_shape}"] = _family(
        _shape, _asked
    )
SECTIONS["Two engines on one H200, one trains and one samples, qwen3-0.6b"] = [
    _told(
        f"{_count} {_noun} of reinforcement learning, iterations/s over those of one engine",
        "shared_device-cuda-qwen3-0.6b",
        f"{_count}_tenants.ratio",
    )
    for _count, _noun in ((1, "tenant"), (4, "tenants"))
]
