"""Keys, tokens and signed URLs: what stops them, and when."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.cli.server import keyring
from tinsmith.server.edge import auth
from tinsmith.server.edge.auth import Auth, create_key

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


async def _revoke_elsewhere(server: TestServer, api: Api) -> None:
    """As `tinsmith key revoke` does it in another process; the server looks 50 times a second."""
    key_id = (await api.get("/auth/apikey/me")).json()["key_id"]
    await asyncio.to_thread(keyring.revoke, server.service.config, key_id)
    await asyncio.sleep(0.05)


def _let_a_minute_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = time.time
    monkeypatch.setattr(time, "time", lambda: plain() + 61.0)


async def test_a_key_revoked_by_the_command_line_stops_at_once(server: TestServer) -> None:
    other = await server.other_user()
    assert (await other.get("/sessions")).status_code == 200
    await _revoke_elsewhere(server, other)
    assert (await other.get("/sessions")).status_code == 401


async def test_a_token_of_a_key_revoked_by_the_command_line_stops_at_once(
    server: TestServer,
) -> None:
    other = await server.other_user()
    with_token = server.client((await other.ok("/auth/token", {}))["jwt"])
    assert (await with_token.get("/sessions")).status_code == 200
    await _revoke_elsewhere(server, other)
    assert (await with_token.get("/sessions")).status_code == 401


async def test_an_expired_key_and_its_token_stop_at_once(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = await create_key(server.service.store, "guest", "k", seconds=60.0)
    guest = server.client(key)
    with_token = server.client((await guest.ok("/auth/token", {}))["jwt"])
    for user in (guest, with_token):
        assert (await user.get("/sessions")).status_code == 200
    _let_a_minute_pass(monkeypatch)
    for user in (guest, with_token):
        assert (await user.get("/sessions")).status_code == 401


async def test_two_revocations_in_a_row_are_both_seen(server: TestServer) -> None:
    users = []
    for number in range(4):
        key, _ = await create_key(server.service.store, f"user-{number}", "k")
        users.append(server.client(key))
    for user in users:
        assert (await user.get("/sessions")).status_code == 200
    for user in users:
        await _revoke_elsewhere(server, user)
        assert (await user.get("/sessions")).status_code == 401


async def test_an_expired_token_is_refused(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(token_seconds=60)
    with_token = server.client((await server.api.ok("/auth/token", {}))["jwt"])
    assert (await with_token.get("/sessions")).status_code == 200
    _let_a_minute_pass(monkeypatch)
    assert (await with_token.get("/sessions")).status_code == 401


async def test_an_open_poll_of_a_revoked_key_gives_no_result(start_server: StartServer) -> None:
    server = await start_server(hold_seconds=60)
    other, with_another_key = await server.other_user(), await server.other_user()
    model = await other.model()
    request_id = await other.send_pass(model, 2)  # it waits for the first
    poll = asyncio.create_task(other.retrieve(request_id))
    await asyncio.sleep(0.1)
    await _revoke_elsewhere(server, other)
    await with_another_key.send_pass(model, 1)
    assert (await poll).status_code == 401


async def test_a_poll_for_any_sample_of_a_revoked_key_gives_none(
    start_server: StartServer,
) -> None:
    server = await start_server(hold_seconds=60)
    other, with_another_key = await server.other_user(), await server.other_user()
    sampler = await _base_sampler(other)
    body = {
        "target": {"type": "sampling_session", "sampling_session_id": sampler},
        "prev_cursor": 0,
    }
    poll = asyncio.create_task(other.post("/retrieve_futures", body))
    await asyncio.sleep(0.1)
    await _revoke_elsewhere(server, other)
    await with_another_key.sample(sampler)
    assert (await poll).status_code == 401


async def test_a_stream_of_a_revoked_key_ends(start_server: StartServer) -> None:
    server = await start_server(fake_token_seconds=0.05)
    other = await server.other_user()
    sampler = await _base_sampler(other)
    body = other.sample_body(sampler, sampling_params={"max_tokens": 2000, "seed": 5})
    reading = asyncio.create_task(other.post("/sample_stream", body))
    await server.until(lambda: server.engines[0].running_samples > 0)
    await _revoke_elsewhere(server, other)
    text = (await asyncio.wait_for(reading, 10)).text
    assert "revoked" in text and "finish" not in text
    await server.until(lambda: not server.engines[0].running_samples)


async def test_a_flood_of_wrong_keys_is_not_a_flood_of_readings(server: TestServer) -> None:
    counted = _Counting(server.service.store)
    guarded = Auth(counted, b"s", is_required=True)  # type: ignore[arg-type]
    wrong = [guarded.resolve(f"tml-wrong-{number}") for number in range(500)]
    assert await asyncio.gather(*wrong) == [None] * 500
    assert counted.readings <= 2, "those who ask together share a reading"


@pytest.mark.parametrize("seed", range(5))
async def test_who_has_a_good_key_waits_for_two_readings_at_most_whatever_others_send(
    server: TestServer, seed: int
) -> None:
    """The one that is under way, and the next. Others send wrong keys all the time, and lose good
    ones, which are refused from then on."""
    rng, store = random.Random(seed), server.service.store
    key, _ = await create_key(store, "modest", "k")
    theirs = dict([await create_key(store, "greedy", f"{n}") for n in range(5)])
    slow = _Counting(store)
    guarded = Auth(slow, b"s", is_required=True)  # type: ignore[arg-type]
    revoked: set[str] = set()
    is_over = False

    async def flood() -> None:
        while not is_over:
            sent = rng.choice([*theirs, "tml-wrong"])
            must_fail = sent in revoked or sent not in theirs
            found = await guarded.resolve(sent)
            assert found is None if must_fail else found is None or found.owner == "greedy"
            await asyncio.sleep(0)

    async def revoke() -> None:
        for each, record in theirs.items():
            await asyncio.sleep(0.01)
            await store.keys.revoke(record.key_id, time.time())
            guarded.forget_keys()
            revoked.add(each)

    others = [asyncio.create_task(flood()) for _ in range(50)]
    revoking = asyncio.create_task(revoke())
    while not revoking.done():
        before = slow.readings
        caller = await guarded.resolve(key)
        assert caller is not None and caller.owner == "modest"
        assert slow.readings - before <= 2
        await asyncio.sleep(0.001)
    is_over = True
    await asyncio.gather(revoking, *others)


async def test_a_reading_that_began_before_a_revocation_does_not_bring_the_key_back(
    server: TestServer,
) -> None:
    key, record = await create_key(server.service.store, "late", "k")
    slow = _Counting(server.service.store)
    slow.pause = asyncio.Event()
    guarded = Auth(slow, b"s", is_required=True)  # type: ignore[arg-type]
    first = asyncio.create_task(guarded.resolve(key))
    await asyncio.sleep(0.05)
    await server.service.store.keys.revoke(record.key_id, time.time())
    guarded.forget_keys()
    slow.pause.set()
    await first
    assert await guarded.resolve(key) is None


class _Counting:
    """A store whose readings of the keys are counted, and held up after they were made."""

    def __init__(self, store: Any) -> None:
        self._keys = store.keys
        self.keys = self
        self.readings = 0
        self.pause: asyncio.Event | None = None

    async def list(self) -> Any:
        self.readings += 1
        found = await self._keys.list()
        if self.pause is not None:
            await self.pause.wait()
        return found


FORGED = ["eyJ", "eyJ.", "eyJ..", "eyJé.a.b", "eyJ" + "a" * 100_000, "eyJhbGciOiJub25lIn0.e30."]


@pytest.mark.parametrize("credential", [*FORGED, "é", "\x00", "tml-" + "x" * 100_000])
async def test_a_strange_credential_is_a_wrong_one(server: TestServer, credential: str) -> None:
    assert await server.service.auth.resolve(credential) is None
    raw = [(b"x-api-key", credential.encode("latin-1", errors="ignore"))]
    response = await server.api.http.get("/api/v1/sessions", headers=raw)
    assert response.status_code == 401


@pytest.mark.parametrize(
    "query",
    [
        "",
        "expires=9&signature=x",
        "expires=99999999999&signature=%C3%A9",
        "expires=" + "9" * 5000 + "&signature=x",
        "expires=%EF%BC%99&signature=x",
        "expires=-1&signature=x",
        "expires=1e9&signature=x",
    ],
)
async def test_a_strange_signature_is_a_wrong_one(server: TestServer, query: str) -> None:
    for path in ("/files/abc/x", "/archives/abc.tar", "/traces/abc.json"):
        response = await server.api.http.get(f"/api/v1{path}?{query}")
        assert response.status_code == 403


async def test_a_signed_url_is_good_for_its_file_and_its_time_only(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(signed_url_seconds=60)
    api = server.api
    model = await api.model()
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    await api.result(saved["request_id"])
    listed = await api.get(f"/training_runs/{model}/checkpoints/weights/a/external_weights_urls")
    urls = list(listed.json()["urls"].values())
    assert (await api.http.get(urls[0])).status_code == 200
    assert (await api.http.get(urls[0].replace("expires=", "expires=1"))).status_code == 403
    name = urls[0].partition("?")[0].rpartition("/")[2]
    assert (await api.http.get(urls[0].replace(name, "other"))).status_code == 403
    _let_a_minute_pass(monkeypatch)
    assert (await api.http.get(urls[0])).status_code == 403


def test_secrets_are_compared_in_constant_time() -> None:
    """Keys are looked up by their hash; what is compared by itself goes through one function."""
    source = inspect.getsource(auth)
    assert source.count("compare_digest") == 1
    assert "_is_equal(self.sign_path" in source and "_is_equal(_b64(self._sign(signed))" in source
    assert hmac.compare_digest(auth.hash_key("k"), hashlib.sha256(b"k").hexdigest())


async def _base_sampler(api: Api) -> str:
    body = {
        "session_id": await api.session(),
        "sampling_session_seq_id": 0,
        "base_model": "tinsmith/fake",
    }
    return str((await api.ok("/create_sampling_session", body))["sampling_session_id"])
