"""The official client and ours, running one program against one server, send the same.

S110: order, ids and bodies are compared after removing what differs by nature (keys, times, and the
order in which parallel chunks happen to arrive).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import ended_well
from tinsmith.wire import proto

pytest.importorskip("tinker")

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
if sys.argv[1] == "tinker":
    import tinker as sdk
    from tinker import ServiceClient, RestClient, types
else:
    import tinsmith as sdk
    from tinsmith import types
    from tinsmith.client.service import ServiceClient
    from tinsmith.client.rest import RestClient

def datum(i, n=4):
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(i, i + n))),
        loss_fn_inputs={"target_tokens": list(range(n)), "weights": [0.5 * i] * n},
    )

service = ServiceClient(user_metadata={"a": "b"}, base_url=sys.argv[2], api_key="tml-parity")
training = service.create_lora_training_client("base", rank=16, seed=3, train_mlp=False)

# Supervised: five chunks, a step behind them, nothing waited for in between.
passed = training.forward_backward([datum(i) for i in range(10)], "cross_entropy")
stepped = training.optim_step(types.AdamParams(learning_rate=0.01))
passed.result(); stepped.result()
training.forward([datum(1)], "cross_entropy").result()

# Reinforcement: sample a group, train on it with a configured loss.
sampler = training.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints([9, 8, 7])
params = types.SamplingParams(max_tokens=8, temperature=0.5, stop=["x"], seed=1)
sampler.sample(prompt, 4, params).result()
sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
sampler.compute_logprobs(prompt).result()
rl = types.Datum(
    model_input=prompt,
    loss_fn_inputs={
        "target_tokens": torch.tensor([1, 2, 3]),
        "logprobs": torch.tensor([-1.0, -2.0, -3.0]),
        "advantages": torch.tensor([0.0, 1.0, 1.0]),
    },
)
training.forward_backward([rl], "ppo", {"clip_low_threshold": 0.8, "note": "text"}).result()
training.optim_step(adam_params=types.AdamParams()).result()

# A custom loss, in two passes.
training.forward_backward_custom(
    [datum(2), datum(3)], lambda data, lps: (sum((lp ** 2).sum() for lp in lps), {"c": 1.0})
).result()

# Saving and coming back.
training.save_state("one", ttl_seconds=7200, user_metadata={"k": "v"}).result()
training.save_state("one", overwrite=True).result()
training.save_weights_for_sampler("two").result()
training.save_weights_external("three").result()
service.create_sampling_client(model_path="tinker://r/sampler_weights/two")
service.create_sampling_client(base_model="base")
again = service.create_training_client_from_state_with_optimizer("tinker://r/weights/one")
again.optim_step(types.AdamParams()).result()
training.get_info()
sampler.get_base_model()
service.close("success", detail="bye").result()

rest = RestClient(base_url=sys.argv[2], api_key="tml-parity")
for call in (
    lambda: rest.list_training_runs(limit=5, project_id="p"),
    lambda: rest.get_training_run("r:train:0"),
    lambda: rest.list_checkpoints("r:train:0"),
    lambda: rest.list_user_checkpoints(),
    lambda: rest.get_weights_info_by_tinker_path("tinker://r/weights/one"),
    lambda: rest.get_external_weights_urls("tinker://r/external_weights/x"),
    lambda: rest.delete_checkpoint_from_tinker_path("tinker://r/weights/one"),
    lambda: rest.publish_checkpoint_from_tinker_path("tinker://r/weights/one"),
    lambda: rest.unpublish_checkpoint_from_tinker_path("tinker://r/weights/one"),
    lambda: rest.set_checkpoint_ttl_from_tinker_path("tinker://r/weights/one", None),
    lambda: rest.set_checkpoint_ttl_from_tinker_path("tinker://r/weights/one", 3600),
    lambda: rest.copy_weights("tinker://r/weights/one", "project", ttl_seconds=3600),
    lambda: rest.get_session("s", "accessible"),
    lambda: rest.list_sessions(offset=3),
    lambda: rest.search_sessions(types.SessionSearchRequest(display_name="x")),
    lambda: rest.assign_session_project("s", "p"),
    lambda: rest.get_sampler("s:sample:0"),
    lambda: rest.get_audit_log("all"),
    lambda: rest.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z"),
    lambda: rest.get_current_checkpoint_storage_usage("p"),
):
    try:
        call().result()
    except Exception as error:
        assert "404" in str(error), error
"""

HEADERS = (
    "accept",
    "content-type",
    "x-tinker-request-type",
    "x-sdk-method",
    "x-sdk-version",
    "x-tinker-sampling-backpressure",
)


def record(sdk: str, tmp_path: Path) -> list[Any]:
    from tests.support import tinker_stub

    stub = tinker_stub.TinkerStub({"fwdbwd_max_chunk_len": 2})
    env = {**os.environ, "TINKER_TELEMETRY": "0", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, sdk, stub.url],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    requests = list(stub.requests)
    stub.close()
    assert ended_well(done.returncode, done.stderr), (sdk, done.returncode, done.stderr[-3000:])
    return [comparable(request) for request in requests]


def comparable(request: Any) -> dict[str, Any]:
    path = request.path.removeprefix("/api/v1")
    body: Any = None
    if path == "/forward_backward":
        body = proto.decode_pass(request.body)
    elif request.body:
        body = json.loads(request.body)
    return {
        "method": request.method,
        "path": path,
        "query": request.query,
        "body": body,
        "headers": {name: request.headers[name] for name in HEADERS if name in request.headers},
    }


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    home = tmp_path_factory.mktemp("home")
    return {sdk: record(sdk, home) for sdk in ("tinker", "tinsmith")}


def sent(trace: list[Any]) -> list[Any]:
    """What asks for something: without the polls, without repeated start-ups."""
    kept, started = [], set()
    for each in trace:
        path = each["path"]
        if path in ("/retrieve_future", "/session_heartbeat"):
            continue
        if path.startswith("/client/"):
            if path in started:
                continue
            started.add(path)
        kept.append(each)
    # The chunks of the first pass arrive as they please, but all before the first id.
    first = next(i for i, each in enumerate(kept) if each["path"] == "/forward_backward")
    kept[first : first + 4] = sorted(kept[first : first + 4], key=lambda each: each["body"].seq_id)
    return kept


def test_the_same_requests_in_the_same_order(traces: dict[str, list[Any]]) -> None:
    official, ours = sent(traces["tinker"]), sent(traces["tinsmith"])
    assert [(e["method"], e["path"]) for e in ours] == [(e["method"], e["path"]) for e in official]


def test_the_same_bodies_and_queries(traces: dict[str, list[Any]]) -> None:
    for official, ours in zip(sent(traces["tinker"]), sent(traces["tinsmith"]), strict=True):
        assert ours["body"] == official["body"], official["path"]
        assert ours["query"] == official["query"], official["path"]


def test_the_same_telling_headers(traces: dict[str, list[Any]]) -> None:
    for official, ours in zip(sent(traces["tinker"]), sent(traces["tinsmith"]), strict=True):
        theirs = dict(official["headers"])
        if ours["body"] is None:
            theirs.pop("content-type", None)  # we name no type for a body that is not there
        assert ours["headers"] == theirs, official["path"]


def test_the_same_polls(traces: dict[str, list[Any]]) -> None:
    def polls(trace: list[Any]) -> list[Any]:
        found = [
            (
                e["body"]["request_id"],
                e["body"]["allow_metadata_only"],
                tuple(sorted(e["headers"].items())),
            )
            for e in trace
            if e["path"] == "/retrieve_future"
        ]
        return sorted(found)

    assert polls(traces["tinsmith"]) == polls(traces["tinker"])
