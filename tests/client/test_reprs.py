"""What a notebook shows of a client or a future: short, and what it is of."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import tinsmith
from tinsmith import types
from tinsmith.client.admin import AdminClient
from tinsmith.client.futures import AwaitableConcurrentFuture
from tinsmith.client.rest import RestClient
from tinsmith.client.service import ServiceClient
from tinsmith.types import ModelInput, SamplingParams
from tinsmith.types.model import Model

MESSAGES = sorted(
    {each for each in vars(types).values() if isinstance(each, type) and issubclass(each, Model)},
    key=lambda each: each.__name__,
)


def settled(value: object) -> AwaitableConcurrentFuture[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return AwaitableConcurrentFuture(future)


def test_clients_and_futures_say_what_they_are_of(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    service = make_service()
    sampler = service.create_sampling_client(base_model="m")
    shown = {
        repr(service): stub.url,
        repr(service.holder): stub.url,
        repr(RestClient(service.holder)): stub.url,
        repr(AdminClient(service.holder)): stub.url,
        repr(sampler): "sampling session",
        repr(sampler.stream(ModelInput.from_ints([1]), SamplingParams(max_tokens=1))): "Stream",
        repr(AwaitableConcurrentFuture(Future())): "under way",
        repr(settled([1, 2])): "done: [1, 2]",
        repr(settled(ValueError("too long"))): "failed: ValueError('too long')",
    }
    for text, part in shown.items():
        assert part in text
        assert not re.search("object at 0x", text) and len(text) < 200


def test_large_results_have_short_reprs() -> None:
    tokens = list(range(10_000))
    sequence = types.SampledSequence("stop", "sample-1", np.asarray(tokens, np.int32))
    datum = tinsmith.Datum(
        model_input=ModelInput.from_ints(tokens), loss_fn_inputs={"weights": [1.0] * 10_000}
    )
    for value in (sequence, datum, types.SampleResponse(sequences=[sequence] * 100)):
        assert len(repr(value)) < 2_000


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: each.__name__)
def test_the_signature_of_a_message_is_its_fields(message: type[Model]) -> None:
    parameters = inspect.signature(message).parameters
    assert list(parameters) == list(message.model_fields)
    for name, field in message.model_fields.items():
        is_needed = parameters[name].default is inspect.Parameter.empty
        assert is_needed == field.is_required()


def test_help_shows_the_parameters() -> None:
    text = pydoc.render_doc(SamplingParams, renderer=pydoc.plaintext)
    assert "SamplingParams(*, max_tokens: int | None = None" in text


def test_every_async_twin_has_a_docstring() -> None:
    for name in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"):
        for method in vars(getattr(tinsmith, name)):
            if method.endswith("_async"):
                assert getattr(getattr(tinsmith, name), method).__doc__, f"{name}.{method}"
