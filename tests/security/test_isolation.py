"""What is somebody else's is not there: every endpoint, every id, to the last byte.

The attempts are made from the route table. A route that is added without saying what a request to
it looks like fails the first test here, so none can be forgotten.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.types import ForwardBackwardInput, ForwardBackwardRequest
from tinsmith.types.model import Model
from tinsmith.wire import proto
from tinsmith.wire.endpoints import ENDPOINTS, NOTHING

if TYPE_CHECKING:
    import httpx

    from tests.support.in_process_server import Api, StartServer

MODEL = "tinsmith/fake"
SECRET = "of-nobody-elses-business"
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
    },
}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 1},
}
GRAPH = {
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {"nodes": [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]},
}

BODIES: dict[str, Any] = {
    # What a request to each route looks like; {name} stands for one of a user's ids.
    "client_config": {"sdk_version": "0.36.0"},
    "client_dynamic_config": {"sdk_version": "0.36.0"},
    "auth_token": {},
    "telemetry": {"session_id": "{session_id}", "events": [], "process_uuid": "", "platform": ""},
    "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"},
    "session_heartbeat": {"session_id": "{session_id}"},
    "search_sessions": {"session_id": "{session_id}"},
    "finish_session": {"reason": {"type": "success"}},
    "assign_project": {"project_id": "p"},
    "create_model": {
        "session_id": "{session_id}",
        "model_seq_id": 77,
        "base_model": MODEL,
        "lora_config": {"rank": 4},
    },
    "get_info": {"model_id": "{model_id}"},
    "forward_backward": {"model_id": "{model_id}", "seq_id": 90, "forward_backward_input": PASS},
    "forward": {"model_id": "{model_id}", "seq_id": 91, "forward_input": PASS},
    "optim_step": {"model_id": "{model_id}", "seq_id": 92, "adam_params": {}},
    "unload_model": {"model_id": "{model_id}"},
    "create_custom_loss": {"session_id": "{session_id}", "custom_loss_seq_id": 7, "name": "l"}
    | GRAPH,
    "save_weights": {"model_id": "{model_id}", "seq_id": 93, "path": "a"},
    "save_weights_for_sampler": {"model_id": "{model_id}", "seq_id": 94, "path": "a"},
    "save_weights_external": {"model_id": "{model_id}", "seq_id": 95, "path": "a"},
    "load_weights": {
        "session_id": "{session_id}",
        "model_seq_id": 78,
        "path": "{tinker_path}",
        "optimizer": False,
    },
    "weights_info": {"tinker_path": "{tinker_path}"},
    "copy_weights": {"source_path": "{tinker_path}", "destination_project_id": "p"},
    "upload_piece": {},
    "import_weights": {"upload_id": "0" * 32, "files": [], "base_model": MODEL, "name": "n"},
    "create_sampling_session": {
        "session_id": "{session_id}",
        "sampling_session_seq_id": 9,
        "model_path": "{tinker_path}",
    },
    "join_sampling_session": {"sampling_session_id": "{sampler_id}"},
    "sample": {"sampling_session_id": "{sampler_id}", "seq_id": 50, **SAMPLE},
    "sample_stream": {"sampling_session_id": "{sampler_id}", "seq_id": 51, **SAMPLE},
    "retrieve_future": {"request_id": "{request_id}"},
    "retrieve_futures": {
        "target": {"type": "sampling_session", "sampling_session_id": "{sampler_id}"},
        "retrieved_request_ids": ["{sample_request_id}"],
        "prev_cursor": 0,
        "timeout": 0.0,
    },
    "cancel_future": {"request_id": "{sample_request_id}"},
    "post_run_metrics": {"step": 3, "metrics": {"reward": 0.5}},
    "move_model": {"slot": 0},
    "set_ttl": {"ttl_seconds": 7200},
    "publish": {},
    "openai_completions": {"model": "{tinker_path}", "prompt": "a"},
    "openai_chat_completions": {
        "model": "{tinker_path}",
        "messages": [{"role": "user", "content": "a"}],
    },
    "openai_responses": {"model": "{tinker_path}", "input": "a"},
    "openai_generate": {"model": "{tinker_path}", "token_ids": [1], "sampling_params": {}},
    "anthropic_messages": {
        "model": "{tinker_path}",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
    },
    "anthropic_count_tokens": {
        "model": "{tinker_path}",
        "messages": [{"role": "user", "content": "a"}],
    },
}
PATH_IDS = {
    # Which of a user's ids stands at each place of a path.
    "session_id": "session_id",
    "run_id": "model_id",
    "model": "tinker_path",
    "sampler_id": "sampler_id",
    "weights_id": "weights_id",
    "key_id": "key_id",
    "kind": None,
    "sha256": None,
    "name": None,
    "upload_id": None,
    "number": None,
}
LABELS = {
    # Fields that look like ids of something but name what the caller makes, or nothing at all.
    "project_id",
    "project_ids",
    "destination_project_id",
    "path",
    "cloned_sampler_id",
    "custom_loss_seq_id",
    "model_seq_id",
    "sampling_session_seq_id",
    "seq_id",
    "upload_id",
}
QUIET = {
    # These answer alike whatever the id is, and do nothing to what is not the caller's.
    "telemetry",
    "search_sessions",
    "cancel_future",
}
ELSEWHERE = {
    # A load names a model, or the session of a new one: the former has tests of its own below.
    ("load_weights", "model_id"),
    # Nothing is sampled but by the id of a sampling session.
    ("sample", "model_path"),
    ("sample_stream", "model_path"),
    # No client sends it, and no route reads it.
    ("copy_weights", "session_id"),
}
DESTROYING = {"delete_checkpoint", "delete_own_key", "revoke_key", "finish_session"}
KEYED = {name: row for name, row in ENDPOINTS.items() if row.access == "key"}


def _ids_in(value: Any) -> set[str]:
    return set(re.findall(r"{(\w+)}", str(value)))


def _filled(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, str):
        return re.sub(r"{(\w+)}", lambda found: ids[found[1]], value)
    if isinstance(value, dict):
        return {name: _filled(item, ids) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, ids) for item in value]
    return value


def _path_ids(path: str) -> set[str]:
    return {found for name in re.findall(r"{(\w+)", path) if (found := PATH_IDS[name])}


def _url(path: str, ids: dict[str, str]) -> str:
    names = {name: ids[kind] for name, kind in PATH_IDS.items() if kind is not None}
    names |= {"kind": "weights", "name": "mine", "sha256": "0" * 64}
    names |= {"upload_id": "0" * 32, "number": "0"}
    return re.sub(r"{(\w+)(?::\w+)?}", lambda found: names[found[1]], path)


def _alike(value: str) -> str:
    """A random id of the same form."""
    if value.isdigit():
        return str(10**6 + secrets.randbelow(10**6))
    return re.sub(
        r"[0-9a-f]{4,}", lambda found: secrets.token_hex(len(found[0]))[: len(found[0])], value
    )


async def _ids_of(api: Api, note: str = "mine") -> dict[str, str]:
    """One of everything, made by this user, who writes a note on whatever may have one."""
    notes = {"user_metadata": {"note": note}}
    session = await api.session(tags=[note], display_name=note, project_id=note, **notes)
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, **notes}
    created = await api.ok("/create_model", {**wanted, "lora_config": {"rank": 4}})
    model = (await api.result(created["request_id"]))["model_id"]
    request_id = await api.send_pass(model, 1)
    await api.result(request_id)
    save = {"model_id": model, "seq_id": 2, "path": "mine", **notes}
    saved = await api.ok("/save_weights", save)
    path = (await api.result(saved["request_id"]))["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = (await api.ok("/create_sampling_session", body))["sampling_session_id"]
    sampled = await api.ok("/asample", api.sample_body(sampler))
    await api.result(sampled["request_id"])
    loss = {"session_id": session, "custom_loss_seq_id": 0, "name": "l", **GRAPH}
    uploaded = await api.ok("/create_custom_loss", loss)
    urls = await api.get(f"/training_runs/{model}/checkpoints/weights/mine/external_weights_urls")
    weights_id = next(iter(urls.json()["urls"].values())).split("/files/")[1].split("/")[0]
    return {
        "session_id": session,
        "model_id": model,
        "request_id": request_id,
        "sample_request_id": sampled["request_id"],
        "tinker_path": path,
        "sampler_id": sampler,
        "loss_id": (await api.result(uploaded["request_id"]))["loss_id"],
        "weights_id": weights_id,
        "key_id": str((await api.get("/auth/apikey/me")).json()["key_id"]),
    }


async def _ask(api: Api, name: str, ids: dict[str, str]) -> httpx.Response:
    row = KEYED[name]
    body = BODIES.get(name)
    return await api.http.request(
        row.method,
        _url(row.full_path, ids),
        headers={**api.headers, "content-type": "application/json"},
        json=None if body is None else _filled(body, ids),
    )


def test_every_route_is_known_here() -> None:
    for endpoint, row in KEYED.items():
        assert endpoint in BODIES or row.method in ("GET", "DELETE"), (
            f"say in BODIES what a request to {row.path} looks like"
        )
        for name in re.findall(r"{(\w+)", row.path):
            assert name in PATH_IDS, f"say in PATH_IDS what {name} in {row.path} stands for"
    assert set(BODIES) <= set(KEYED), "BODIES names an endpoint that is gone"


def _field_names(message: type) -> list[str]:
    if issubclass(message, Model):
        return list(message.model_fields)
    return [field.name for field in dataclasses.fields(message)]


WITH_MESSAGE = [n for n, row in KEYED.items() if row.request not in (NOTHING, dict, object)]


@pytest.mark.parametrize("endpoint", WITH_MESSAGE)
def test_every_id_that_a_message_can_hold_is_tried(endpoint: str) -> None:
    looks_like_id = re.compile(r".*(_id|_ids|path)$")
    fields = _field_names(KEYED[endpoint].request)
    named = {n for n in fields if looks_like_id.fullmatch(n)} - LABELS
    written = str(BODIES[endpoint])
    for name in named:
        assert f"'{name}'" in written or (endpoint, name) in ELSEWHERE, (
            f"{endpoint}: an id could be given in {name}, which nobody tries"
        )


ATTEMPTS = [
    (name, wanted)
    for name, row in KEYED.items()
    for wanted in sorted(_path_ids(row.path) | _ids_in(BODIES.get(name)))
]


@pytest.fixture
async def users(start_server: StartServer) -> tuple[Api, dict[str, str], Api, dict[str, str]]:
    """An owner and somebody else, with one of everything each."""
    server = await start_server(custom_loss_server_side=True, event_stream_seconds=0.0)
    other = await server.other_user()
    return server.api, await _ids_of(server.api), other, await _ids_of(other)


def _told(response: httpx.Response, value: str) -> tuple[int, str, str]:
    """What a response says, with the id that was asked for blotted out."""
    return (
        response.status_code,
        response.headers.get("content-type", ""),
        response.text.replace(value, "ID"),
    )


async def test_another_users_id_is_answered_like_one_that_never_was(
    users: tuple[Api, dict[str, str], Api, dict[str, str]],
) -> None:
    _, victim, other, own = users
    for name, wanted in ATTEMPTS:
        theirs, never = victim[wanted], _alike(victim[wanted])
        attacked = _told(await _ask(other, name, {**own, wanted: theirs}), theirs)
        guessed = _told(await _ask(other, name, {**own, wanted: never}), never)
        assert attacked == guessed, f"{name} tells another's {wanted} from a random one"
        if name not in QUIET and wanted != "sample_request_id":
            assert attacked[0] == 404, f"{name} with another's {wanted}: {attacked}"


async def test_an_owner_is_not_hindered_by_the_attempts(
    users: tuple[Api, dict[str, str], Api, dict[str, str]],
) -> None:
    """The control: with the caller's own ids the very same requests are accepted."""
    owner, victim, other, own = users
    for name, wanted in ATTEMPTS:
        await _ask(other, name, {**own, wanted: victim[wanted]})
    names = [name for name in dict(ATTEMPTS) if name not in DESTROYING]
    for name in [*names, "delete_checkpoint", "finish_session", "revoke_key"]:
        response = await _ask(owner, name, victim)
        if name in BODIES and name.startswith(("openai_", "anthropic_")):
            assert "tokenizer" in response.text, "the fake model has none; the id was accepted"
        else:
            assert response.status_code < 400, f"{name}: {response.status_code} {response.text}"


async def test_a_pass_in_protobuf_for_anothers_model_is_refused_alike(
    users: tuple[Api, dict[str, str], Api, dict[str, str]],
) -> None:
    _, victim, other, _ = users
    told = []
    for model in (victim["model_id"], _alike(victim["model_id"])):
        request = ForwardBackwardRequest(ForwardBackwardInput([], "cross_entropy"), model, 3)
        response = await other.post(
            "/forward_backward",
            proto.encode_pass(request),
            **{"content-type": "application/x-protobuf"},
        )
        told.append(_told(response, model))
    assert told[0] == told[1] and told[0][0] == 404


@pytest.mark.parametrize("wanted", ["tinker_path", "loss_id"])
async def test_what_an_operation_names_is_looked_for_among_the_callers_own(
    users: tuple[Api, dict[str, str], Api, dict[str, str]], wanted: str
) -> None:
    """Ids that are looked up when the operation runs: its failure must not tell them apart."""
    _, victim, other, own = users
    told = []
    for seq_id, value in ((3, victim[wanted]), (4, _alike(victim[wanted]))):
        body: dict[str, Any] = {"model_id": own["model_id"], "seq_id": seq_id}
        if wanted == "tinker_path":
            body |= {"path": value, "optimizer": False}
            promise = await other.ok("/load_weights", body)
        else:
            inputs = {**PASS, "loss_fn": "custom", "loss_fn_config": {"loss_id": value}}
            body |= {"forward_backward_input": inputs}
            promise = await other.ok("/forward_backward", body)
        error, category = await other.failure(promise["request_id"])
        told.append((error.replace(value, "ID"), category))
    assert told[0] == told[1]
    assert "no" in told[0][0] and told[0][1] == "user"


async def test_lists_and_counts_hold_ones_own_only(
    users: tuple[Api, dict[str, str], Api, dict[str, str]],
) -> None:
    _, victim, other, own = users
    for row in KEYED.values():
        if row.method != "GET" or "{" in row.path:
            continue
        query = "starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z&base_model=x"
        response = await other.http.get(f"{row.full_path}?{query}", headers=other.headers)
        assert response.status_code == 200, f"{row.path}: {response.text}"
        for value in victim.values():
            written = f'"key_id":{value},' if value.isdigit() else value
            assert written not in response.text, f"{row.path} shows another's {value}"
        assert own["weights_id"] != victim["weights_id"]


async def test_a_stranger_sees_of_a_published_checkpoint_nothing_that_its_owner_wrote_down(
    start_server: StartServer,
) -> None:
    """Every route is asked with each of the owner's ids, in both scopes, and then for all that the
    stranger has made of the checkpoint: copies, runs, samplers."""
    server = await start_server(custom_loss_server_side=True, event_stream_seconds=0.0)
    owner, other = server.api, await server.other_user()
    victim, own = await _ids_of(owner, SECRET), await _ids_of(other)
    model = victim["model_id"]
    for seq_id, kind in ((3, "save_weights"), (4, "save_weights_for_sampler")):
        saved = await owner.ok(f"/{kind}", {"model_id": model, "seq_id": seq_id, "path": SECRET})
        await owner.result(saved["request_id"])
    metrics = {"step": 1, "metrics": {SECRET: 1.0}}
    assert (await owner.post(f"/training_runs/{model}/metrics", metrics)).status_code == 204
    published = f"/training_runs/{model}/checkpoints/weights/mine/publish"
    assert (await owner.post(published, b"")).status_code == 204
    told = []
    for name, wanted in [(name, wanted) for name, wanted in ATTEMPTS if name not in DESTROYING]:
        row, ids = KEYED[name], {**own, wanted: victim[wanted]}
        for scope in ("owned", "accessible"):
            body = BODIES.get(name)
            response = await other.http.request(
                row.method,
                _url(row.full_path, ids),
                headers={**other.headers, "content-type": "application/json"},
                params={"access_scope": scope},
                json=None if body is None else _filled(body, ids),
            )
            told.append((f"{name} with {wanted}, {scope}", response.text))
    run = (await other.get(f"/training_runs/{model}", access_scope="accessible")).json()
    assert run["last_checkpoint"]["tinker_path"] == victim["tinker_path"], "published: it is seen"
    assert run["last_request_time"] == run["last_checkpoint"]["time"], "not what happened since"
    runs = (await other.get("/training_runs", access_scope="accessible")).json()["training_runs"]
    assert any(run["training_run_id"].startswith("copy-") for run in runs)
    told += [(f"own {run['training_run_id']}", str(run)) for run in runs]
    for row in (row for row in KEYED.values() if row.method == "GET" and "{" not in row.path):
        query = "starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z&base_model=x"
        listed = await other.http.get(f"{row.full_path}?{query}", headers=other.headers)
        told.append((row.path, listed.text))
    for where, text in told:
        assert SECRET not in text, f"{where}: {text}"
    for path in (f"/training_runs/{model}", "/checkpoints", f"/sessions/{victim['session_id']}"):
        assert f'"note":"{SECRET}"' in (await owner.get(path)).text, "the owner sees what is his"
