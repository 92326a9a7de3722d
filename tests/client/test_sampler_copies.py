"""Samplers in other places: pickled, as handles, many of them."""

from __future__ import annotations

import base64
import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.client.sampling_calls import (
    make_sampler,
    sample,
)
from tinsmith.client.sampling import CLONE_BLOCK, SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import (
    ValidationError,
)


def test_a_pickled_client_samples_under_ids_of_its_own(stub: Any, sampler: SamplingClient) -> None:
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    assert copies[0].holder is copies[1].holder is not sampler.holder
    for each in (sampler, *copies):
        sample(each).result(5)
    ids = [body["seq_id"] for body in stub.samples.values()]
    assert ids[0] == 0 and all(each >= CLONE_BLOCK for each in ids[1:])
    assert len({each // CLONE_BLOCK for each in ids}) == 3
    assert stub.count("/client/config") == 1 and stub.count("/create_session") == 1


def test_a_copy_asks_for_its_number_when_the_service_gives_them(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    sampler = make_sampler(stub, make_service, sample_join_sampling_session=True)
    copy = pickle.loads(pickle.dumps(sampler))
    for future in [sample(copy) for _ in range(3)]:
        future.result(5)
    assert stub.count("/join_sampling_session") == 1
    assert sorted(body["seq_id"] for body in stub.samples.values()) == [
        7 * CLONE_BLOCK + n for n in range(3)
    ]


def test_a_handle_holds_no_credential_and_works_in_another_process(
    stub: Any, sampler: SamplingClient
) -> None:
    handle = sampler.get_sampler_handle()
    assert b"tml-" not in base64.urlsafe_b64decode(handle)
    code = (
        "import sys\n"
        "from tinsmith.client.sampling import SamplingClient\n"
        "from tinsmith.types import ModelInput, SamplingParams\n"
        "s = SamplingClient.from_sampler_handle(sys.argv[1], api_key='tml-elsewhere')\n"
        "r = s.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)).result(20)\n"
        "print(r.sequences[0].tokens)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, handle], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[5, 6]", done.stderr
    assert stub.seen("/asample")[-1].headers["x-api-key"] == "tml-elsewhere"
    with pytest.raises(ValidationError, match="not a sampler handle"):
        SamplingClient.from_sampler_handle("bm9wZQ==")


def test_our_handles_and_the_official_ones_are_the_same(stub: Any, sampler: SamplingClient) -> None:
    ours = json.loads(base64.urlsafe_b64decode(sampler.get_sampler_handle()))
    assert set(ours) == {"session_id", "sampling_session_id", "holder", "record_stability_info"}
    assert set(ours["holder"]) == {
        "base_url",
        "default_headers_overrides",
        "client_config",
        "client_dynamic_config",
        "api_key",
    }
    assert ours["holder"]["api_key"] is None


def test_fifty_samplers_coexist_and_dropping_some_harms_none(
    stub: Any, service: ServiceClient
) -> None:
    """S74, S78"""
    samplers = [service.create_sampling_client(base_model="m") for _ in range(50)]
    assert len(set(map(repr, samplers))) == 50
    del samplers[::2]
    gc.collect()
    for future in [sample(each) for each in samplers]:
        future.result(10)
