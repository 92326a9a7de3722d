"""The public surface has the official names, parameters and defaults."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from typing import Any

import pytest

from tinsmith.client import admin, futures, rest, sampling, service, training
from tinsmith.client.results.retries import RetryConfig

tinker = pytest.importorskip("tinker")

PAIRS = {
    "ServiceClient": service.ServiceClient,
    "TrainingClient": training.TrainingClient,
    "SamplingClient": sampling.SamplingClient,
    "RestClient": rest.RestClient,
    "AdminClient": admin.AdminClient,
    "APIFuture": futures.APIFuture,
}

OURS_ALONE = {
    "ServiceClient": {"stats", "check_accessible", "session_has_ended"},
    "TrainingClient": {"encode", "decode", "log_metrics"},
    "SamplingClient": {"stream", "release_when_dropped"},
    "RestClient": {
        "iter_training_runs",
        "iter_checkpoints",
        "iter_sessions",
        "download_checkpoint",
    },
    "AdminClient": set[str](),
    "APIFuture": {"future", "done", "cancel", "add_done_callback"},
}
"""What we add. Everything else must be there, and nothing more."""


def public(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers_static(cls)
        if not name.startswith("_")
        and (callable(value) or isinstance(value, (property, staticmethod)))
    }


@pytest.mark.parametrize("name", PAIRS)
def test_every_method_says_what_it_does(name: str) -> None:
    """The twins say what their siblings do."""
    methods = public(PAIRS[name])
    assert [each for each in methods if not inspect.getdoc(getattr(PAIRS[name], each))] == []


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(function, staticmethod):
        function = function.__func__
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_methods(name: str) -> None:
    official, ours = public(getattr(tinker, name)), public(PAIRS[name])
    assert set(ours) - set(official) == OURS_ALONE[name]
    assert set(official) <= set(ours)


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_parameters_and_defaults(name: str) -> None:
    official = getattr(tinker, name)
    for method, theirs in {**public(official), "__init__": official.__init__}.items():
        ours = getattr(PAIRS[name], method, None)
        if isinstance(theirs, property):
            assert isinstance(inspect.getattr_static(PAIRS[name], method), property)
            continue
        assert parameters(inspect.getattr_static(PAIRS[name], method)) == parameters(theirs), (
            f"{name}.{method}",
            ours,
        )


@pytest.mark.parametrize("name", ["TrainingClient", "SamplingClient", "ServiceClient"])
def test_coroutine_methods_are_exactly_the_official_ones(name: str) -> None:
    """Packages that wrap clients go through the coroutine methods by name."""

    def coroutines(cls: type) -> set[str]:
        return {n for n, value in public(cls).items() if inspect.iscoroutinefunction(value)}

    assert coroutines(PAIRS[name]) == coroutines(getattr(tinker, name))


@pytest.mark.parametrize(
    "cls",
    [
        training.TrainingClient,
        rest.RestClient,
        admin.AdminClient,
        sampling.SamplingClient,
        service.ServiceClient,
    ],
)
def test_twins_take_what_their_siblings_take(cls: type) -> None:
    """S44"""
    for name, function in public(cls).items():
        if name.endswith("_async"):
            assert parameters(function) == parameters(public(cls)[name.removesuffix("_async")]), (
                name
            )


class Recorder:
    """Stands in for a client: every plain method notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> Future[None]:
            self.calls.append((name, args, kwargs))
            done: Future[None] = Future()
            done.set_result(None)
            return done

        return note


TWINS = {
    "TrainingClient": [
        ("forward_async", (["d"], "ppo"), {"loss_fn_config": {"a": 1.0}}),
        ("forward_backward_async", (["d"], "ppo"), {}),
        ("optim_step_async", ("p",), {}),
        ("optim_step_async", (), {"adam_params": "p"}),
        ("save_state_async", ("n", 60), {"overwrite": True}),
        ("save_weights_for_sampler_async", ("n", 60), {}),
        ("save_weights_external_async", ("n",), {"ttl_seconds": 60}),
    ],
    "SamplingClient": [
        ("sample_async", ("prompt", 2, "params"), {"topk_prompt_logprobs": 3}),
        ("compute_logprobs_async", ("prompt",), {}),
    ],
}


@pytest.mark.parametrize(
    ("owner", "name", "args", "kwargs"),
    [(owner, *case) for owner, cases in TWINS.items() for case in cases],
)
async def test_a_twin_calls_its_sibling_as_the_official_one_does(
    owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Packages wrap or mock the plain methods, and see the arguments as they are passed on."""
    seen = []
    for cls in (getattr(tinker, owner), PAIRS[owner]):
        client = Recorder()
        await getattr(cls, name)(client, *args, **kwargs)
        seen.append(client.calls)
    assert seen[0] and seen[1] == seen[0]


def test_retry_config_is_the_official_one_but_frozen() -> None:
    import dataclasses

    from tinker.lib.retry_handler import RetryConfig as Official

    ours = {f.name: f.default for f in dataclasses.fields(RetryConfig)}
    theirs = {f.name: f.default for f in dataclasses.fields(Official)}
    ours.pop("retryable_exceptions"), theirs.pop("retryable_exceptions")
    assert ours == theirs
    with pytest.raises(ValueError, match="positive"):
        RetryConfig(max_connections=0)
    assert hash(RetryConfig()) == hash(RetryConfig())
