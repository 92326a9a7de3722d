"""Results of samples: whose memory they take, how clients hear of them, who waits for none."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith import disk
from tinsmith.server.futures import Outcome, Promises
from tinsmith.server.sampling.completions import Completions, Journal, read_journal
from tinsmith.server.sampling.requests import JOURNAL
from tinsmith.types import FutureFailed, FutureFinished

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


async def _base_sampler(api: Api) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0}
    created = await api.ok("/create_sampling_session", {**body, "base_model": "tinsmith/fake"})
    return str(created["sampling_session_id"])


def _finished(name: str) -> FutureFinished:
    return FutureFinished(request_id=name, response_payload_uncompressed_size=1)


LONG: dict[str, Any] = {"max_tokens": 4000, "stop": []}


async def test_the_owner_whose_results_take_most_loses_his_oldest_first() -> None:
    promises = Promises(max_bytes=1000)
    promises.open("bob's", "bob")
    promises.resolve("bob's", Outcome(body=b"x" * 100), 0.0)
    for number in range(100):
        promises.open(str(number), "ann")
        promises.resolve(str(number), Outcome(body=b"x" * 100), float(number))
    assert promises.get("bob's") is not None, "it is older than all of hers"
    assert [promises.get(str(n)) is not None for n in (90, 91, 99)] == [False, True, True]
    assert promises.nbytes == 1000


async def test_a_result_costs_the_same_however_many_wait_to_be_fetched() -> None:
    def seconds(num_held: int) -> float:
        promises = Promises(max_bytes=num_held)
        for number in range(num_held):
            promises.open(str(number), "o")
            promises.resolve(str(number), Outcome(body=b"x"), 0.0)
        started = time.process_time()
        for number in range(num_held, num_held + 500):
            promises.open(str(number), "o")
            promises.resolve(str(number), Outcome(body=b"x"), 0.0)
        return time.process_time() - started

    assert min(seconds(20_000) for _ in range(3)) < 10 * min(seconds(200) for _ in range(3))


async def test_nothing_is_left_of_clients_that_nobody_has(server: TestServer) -> None:
    sampler = await _base_sampler(server.api)
    await asyncio.gather(
        *[
            server.api.ok(
                "/retrieve_futures",
                {
                    "target": {"sampling_session_id": sampler, "cloned_sampler_id": clone},
                    "timeout": 0.01,
                },
            )
            for clone in range(0, 10**12, 10**10)
        ]
    )
    assert len(server.service.sampling.completions) == 0


async def test_cursors_rise_over_restarts_and_a_strange_one_asks_for_everything() -> None:
    before, key = Completions(), ("s", 0)
    before.add(key, _finished("a"))
    ((old, _),) = await before.wait(key, 0, 0.01)
    await asyncio.sleep(0.001)
    after = Completions()
    after.add(key, _finished("b"))
    ((new, completion),) = await after.wait(key, old, 0.01)
    assert new > old and completion.request_id == "b"
    assert len(await after.wait(key, new + 10**9, 0.01)) == 1, "a clock that was set back"
    assert await after.wait(key, new, 0.01) == []


async def test_samples_that_a_restart_has_lost_are_announced_as_failed(tmp_path: Path) -> None:
    journal, key = tmp_path / "journal", ("s", 0)
    before = Completions(journal)
    before.promise(key, "sample-1")
    before.promise(("s", 1), "sample-2")
    with journal.open("ab") as file:
        file.write(b'["s", 0, "samp')
    after = Completions(journal)
    ((_, completion),) = await after.wait(key, 12345, 0.01)
    assert completion == FutureFailed(request_id="sample-1")
    after.expire(lambda _: False, 3600.0)
    assert len(await after.wait(("s", 1), 0, 0.01)) == 1, "its client may not have asked yet"
    before.close()
    after.close()


async def test_a_sample_is_answered_though_the_disk_is_full(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = os.open

    def full(path: str | Path, *options: int) -> int:
        return plain("/dev/full" if Path(path).name == JOURNAL else path, *options)

    monkeypatch.setattr(os, "open", full)
    server = await start_server(sample_use_retrieve_futures=True)
    sampler = await _base_sampler(server.api)
    async with asyncio.timeout(60):
        for number in range(3):
            assert (await server.api.sample(sampler, number)).sequences
    assert caplog.text.count("may not be announced") == 1


def test_a_journal_that_cannot_be_written_anew_is_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    completions = Completions(tmp_path / "journal")
    for number in range(10_000):
        completions.promise(("s", 0), f"sample-{number}")
    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish_file", full)
        completions.expire(lambda name: name == "sample-7", 3600.0)
    completions.promise(("s", 0), "next")
    assert len(read_journal(tmp_path / "journal")) == 10_001
    completions.expire(lambda name: name in ("sample-7", "next"), 3600.0)
    completions.close()
    assert [each for _, each in read_journal(tmp_path / "journal")] == ["sample-7", "next"]


def test_a_line_that_a_full_disk_cut_short_spoils_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(("s", 0), "first")
    journal.close()
    with (tmp_path / "journal").open("ab") as file:
        file.write(b'["s",0,"cut')
    journal = Journal(tmp_path / "journal")
    journal.write(("s", 0), "next")
    journal.close()
    assert [each for _, each in read_journal(tmp_path / "journal")] == ["first", "next"]


async def test_the_journal_does_not_grow_with_samples_that_are_over(tmp_path: Path) -> None:
    completions = Completions(tmp_path / "journal")
    for number in range(10_001):
        completions.promise(("s", 0), f"sample-{number}")
    completions.expire(lambda name: name == "sample-7", 3600.0)
    assert (tmp_path / "journal").read_bytes() == b'["s",0,"sample-7"]\n'
    completions.close()


async def test_one_owners_requests_leave_room_for_another(start_server: StartServer) -> None:
    server = await start_server(max_queued_samples=40, fake_token_seconds=0.05)
    sampler = await _base_sampler(server.api)
    bodies = [server.api.sample_body(sampler, n, sampling_params=LONG) for n in range(60)]
    answers = [await server.api.post("/asample", body) for body in bodies]
    assert sum(a.status_code == 429 for a in answers) == 40
    other = await server.other_user()
    others_sampler = await _base_sampler(other)
    accepted = await other.post("/asample", other.sample_body(others_sampler))
    assert accepted.status_code == 200, accepted.text


async def test_a_sample_whose_client_is_gone_is_given_up(start_server: StartServer) -> None:
    server = await start_server(fake_token_seconds=0.05, sample_abandon_seconds=0.3)
    api, sampling = server.api, server.service.sampling
    gone, alive = await _base_sampler(api), await _base_sampler(api)
    lost = await api.ok("/asample", api.sample_body(gone, sampling_params=LONG))
    waited = await api.ok("/asample", api.sample_body(gone, 1, sampling_params=LONG))
    kept = await api.ok("/asample", api.sample_body(alive, sampling_params=LONG))
    waiting = asyncio.create_task(
        api.post("/retrieve_future", {"request_id": waited["request_id"]})
    )
    await asyncio.sleep(0.4)
    alive_session = alive.split(":sample")[0]
    await api.ok("/session_heartbeat", {"session_id": alive_session})
    silence = server.service.sessions.silence
    assert silence(alive_session) < silence(gone.split(":sample")[0])
    # Not by the clock for the one that lives: this machine may be busy.
    await sampling.give_up_abandoned(lambda name: 0.0 if name == alive_session else silence(name))
    await server.until(lambda: server.engines[-1].running_samples == 2)
    assert (await api.retrieve(lost["request_id"])).status_code == 410, "it is to be sent again"
    for request_id in (waited["request_id"], kept["request_id"]):
        assert sampling.promises.get(request_id) is not None
    await waiting
