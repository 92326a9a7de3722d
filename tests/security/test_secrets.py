"""Where keys and other secrets must not turn up, and who may read what is written."""

from __future__ import annotations

import pickle
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tinsmith import AdamParams, Datum, ModelInput, SamplingParams
from tinsmith.errors import TinkerError
from tinsmith.server.edge.answer_headers import DEFAULT_HEADERS, FIXED_HEADERS

DATUM = Datum(
    model_input=ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)


def _use(served: Any) -> tuple[str, bytes]:
    """One of everything; the handle and the pickle of an error that came of it."""
    with tinsmith.ServiceClient(base_url=served.url, api_key=served.key) as service:
        training = service.create_lora_training_client("tinsmith/fake", rank=4)
        training.forward_backward([DATUM] * 2000, "cross_entropy").result()
        training.optim_step(AdamParams(learning_rate=0.1)).result()
        saved = training.save_state("a").result()
        sampler = training.save_weights_and_get_sampling_client()
        sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=2)).result()
        lent = {"weights_access_token": served.key}
        service.create_training_client_from_state(saved.path, **lent)
        handle = sampler.get_sampler_handle()
        with pytest.raises(TinkerError) as caught:
            rest = tinsmith.RestClient(base_url=served.url, api_key=served.key)
            rest.get_training_run("no such run").result()
        return handle, pickle.dumps(caught.value)


def test_a_key_turns_up_nowhere(served: Any) -> None:
    handle, error = _use(served)
    key = served.key.encode()
    assert key not in handle.encode() and key not in error
    log = served.data_dir.parent / "server.log"
    assert log.stat().st_size > 0, "the log is there to be looked at"
    for file in [log, *served.data_dir.rglob("*")]:
        if file.is_file():
            assert key not in file.read_bytes(), f"the key is in {file}"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        assert key not in command, f"the key is in the command line of {process.name}"
    server = Path("/proc") / str(served.process.pid)
    assert key not in (server / "environ").read_bytes()


def test_a_wrong_key_is_not_repeated(served: Any) -> None:
    wrong = "tml-somebody-mistyped-this"
    request = urllib.request.Request(f"{served.url}/api/v1/sessions", headers={"x-api-key": wrong})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value as answer:
        told = answer.read().decode() + str(answer.headers)
    assert caught.value.code == 401 and wrong not in told
    assert wrong not in (served.data_dir.parent / "server.log").read_text()


def test_what_is_written_is_for_its_owner_alone(served: Any) -> None:
    _use(served)
    seen = set()
    for path in [served.data_dir, *served.data_dir.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        expected = 0o700 if path.is_dir() else 0o600
        assert mode == expected, f"{path} has mode {mode:o}"
        seen.add(path.relative_to(served.data_dir).parts[:1])
    assert {("weights",), ("blobs",), ("tinsmith.db",)} <= seen


def test_a_data_folder_that_was_open_to_all_is_closed(tmp_path: Path) -> None:
    from tinsmith.server.data_folder import DataFolder

    tmp_path.chmod(0o755)
    with DataFolder(tmp_path).locked():
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/sessions", "/nowhere", "/openapi.json"])
def test_every_answer_has_the_security_headers_and_no_others_leave(served: Any, path: str) -> None:
    request = urllib.request.Request(
        f"{served.url}{path}", headers={"origin": "https://elsewhere.example"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        with error:
            headers = error.headers
    for name, value in (FIXED_HEADERS | DEFAULT_HEADERS).items():
        assert headers[name] == value
    assert headers["server"] is None
    assert not [name for name in headers if name.lower().startswith("access-control-")]


def test_a_browser_elsewhere_gets_no_permission_to_ask(served: Any) -> None:
    request = urllib.request.Request(
        f"{served.url}/api/v1/create_session",
        method="OPTIONS",
        headers={
            "origin": "https://elsewhere.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "x-api-key",
        },
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value as answer:
        assert answer.code == 403
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]
