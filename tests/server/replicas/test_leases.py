"""The lease on a real Postgres: who has it, and who may no longer write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.databases import emptied
from tinsmith.server.config_sources import build_config
from tinsmith.server.replicas.lease import Holder, Lease
from tinsmith.server.serving import claim_store
from tinsmith.server.store.errors import (
    LeaseLostError,
    StoreInUseError,
    StoreTooNewError,
    StoreUnavailableError,
)
from tinsmith.server.store.fence import Fence
from tinsmith.server.store.leases import Leases
from tinsmith.server.store.records import UsageRecord
from tinsmith.server.store.store import Store

LONG = 3600.0
SHORT = 0.2
USAGE = UsageRecord(owner="o", hour=5, base_model="b", session_id="s", kind="training", count=7)

Join = Callable[..., Leases]


@pytest.fixture
def url(postgres_url: str) -> str:
    return emptied(postgres_url)


@pytest.fixture
def join(url: str) -> Iterator[Join]:
    """A server's part in the lease; it is called as its place is, unless told otherwise."""
    joined: list[Leases] = []

    def new(place: str, *, holder: str = "", seconds: float = LONG) -> Leases:
        joined.append(Leases(url, holder or place, place, f"http://{place}", seconds))
        joined[-1].make_tables()
        return joined[-1]

    yield new
    for each in joined:
        each.close()


def _run(url: str, statement: str) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)


def _let_it_run_out(url: str) -> None:
    _run(url, "UPDATE leases SET expires_at = 0")


def _soon(ask: Callable[[], int | None]) -> int | None:
    """The database notices a moment later that a connection has ended."""
    deadline = time.monotonic() + 10
    while (found := ask()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _store(url: str, folder: Path, holder: str, epoch: int, seconds: float = LONG) -> Store:
    return Store(url, folder, fence=Fence(holder=holder, epoch=epoch, seconds=seconds))


def test_the_first_who_asks_has_the_lease_and_the_second_is_told_who(join: Join) -> None:
    a, b = join("a"), join("b")
    assert a.take() == 1
    assert b.take() is None
    present = b.present()
    assert present is not None and (present.holder, present.url) == ("a", "http://a")
    assert a.renew(1) and not b.renew(1)


def test_a_lease_that_ran_out_is_taken_with_the_next_epoch(join: Join, url: str) -> None:
    a, b = join("a"), join("b")
    assert a.take() == 1
    _let_it_run_out(url)
    assert b.present() is None
    assert b.take() == 2
    assert not a.renew(1), "the old holder is told"


def test_a_lease_that_ran_out_and_that_nobody_took_is_still_its_holders(
    join: Join, url: str
) -> None:
    a, b = join("a"), join("b")
    assert a.take() == 1
    _let_it_run_out(url)
    assert a.renew(1)
    assert b.take() is None


def test_a_lease_that_was_given_back_is_free_at_once(join: Join) -> None:
    a, b = join("a"), join("b")
    assert a.take() == 1
    a.release(1)
    assert b.take() == 2
    a.release(1)
    assert b.renew(2), "the old holder can give back nothing more"


def test_a_new_process_at_the_place_of_the_holder_takes_over_at_once(join: Join) -> None:
    """Its port is ours now, so the old one is gone; and if it were not, the epoch is another."""
    old, new = join("a", holder="old"), join("a", holder="new")
    assert old.take() == 1
    assert new.take() == 2
    assert not old.renew(1)


def test_of_many_who_ask_at_once_one_has_the_lease(join: Join) -> None:
    everybody = [join(str(number)) for number in range(6)]
    got: list[int | None] = []
    threads = [
        threading.Thread(target=lambda each=each: got.append(each.take())) for each in everybody
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(got, key=str) == [1, *[None] * 5]


def _await_connected(follower: Leases) -> None:
    """A server that has just connected does not judge others by their connections."""
    assert follower.present() is not None
    time.sleep(2 * SHORT)


def test_a_lease_is_taken_before_its_end_from_a_holder_that_is_no_longer_connected(
    join: Join,
) -> None:
    a, b, c = join("a"), join("b", seconds=SHORT), join("c", seconds=SHORT)
    assert a.take() == 1
    for follower in (b, c):
        _await_connected(follower)
        assert follower.take_from_dead(1) is None, "it lives"
    a.close()
    assert b.take() is None
    assert b.take_from_dead(2) is None, "nobody has that epoch"
    taken = [_soon(lambda: b.take_from_dead(1)), c.take_from_dead(1)]
    assert taken == [2, None]
    assert not join("a").renew(1), "and if it were alive, it would be told"


def test_a_holder_that_lost_one_connection_and_has_another_keeps_the_lease(
    join: Join, url: str
) -> None:
    a, b = join("a"), join("b", seconds=SHORT)
    assert a.take() == 1
    _await_connected(b)
    _run(url, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
    with pytest.raises(StoreUnavailableError):
        b.present()
    assert b.take_from_dead(1) is None, "the database has dropped ours as well"
    with pytest.raises(StoreUnavailableError):
        a.renew(1)
    assert a.renew(1)
    _await_connected(b)
    assert b.take_from_dead(1) is None


def test_the_lease_of_a_server_that_shows_no_connection_runs_out(join: Join, url: str) -> None:
    """One of an earlier release."""
    a, b = join("a"), join("b", seconds=SHORT)
    assert a.take() == 1
    _run(url, "UPDATE leases SET holder = 'one of an earlier release'")
    _await_connected(b)
    assert b.take_from_dead(1) is None


def test_two_who_look_at_once_do_not_take_each_other_for_the_holder(join: Join, url: str) -> None:
    """The holder shows no connection; who believed that it had one would take its lease."""
    assert join("a").take() == 1
    followers = [join("b", seconds=SHORT), join("c", seconds=SHORT)]
    for follower in followers:
        _await_connected(follower)
    together = threading.Barrier(len(followers))

    def look(follower: Leases, epoch: int) -> int | None:
        together.wait(30)
        follower.present()
        together.wait(30)
        return follower.take_from_dead(epoch)

    with ThreadPoolExecutor(len(followers)) as threads:
        for epoch in range(1000, 1200):
            _run(url, f"UPDATE leases SET holder = 'of an earlier release', epoch = {epoch}")
            taken = [threads.submit(look, follower, epoch) for follower in followers]
            assert [each.result() for each in taken] == [None, None]


async def test_what_the_old_holder_writes_is_refused_and_leaves_nothing(
    join: Join, url: str, tmp_path: Path
) -> None:
    a, b = join("a"), join("b")
    assert a.take() == 1
    store = _store(url, tmp_path / "blobs", "a", 1)
    await store.account.add_usage([USAGE])
    _let_it_run_out(url)
    await store.account.add_usage([USAGE])  # nobody has taken over yet
    assert b.take() == 2
    with pytest.raises(LeaseLostError, match="another server has taken over"):
        await store.account.add_usage([USAGE])
    with pytest.raises(StoreUnavailableError):
        await store.confirm()
    assert [row.count for row in await store.account.list_usage("o", 0, 10)] == [14]
    await store.close()
    with pytest.raises(LeaseLostError):
        _store(url, tmp_path / "blobs", "a", 1)


async def test_nobody_takes_over_in_the_middle_of_a_holders_transaction(
    join: Join, url: str, tmp_path: Path
) -> None:
    a, b = join("a"), join("b")
    assert a.take() == 1
    store = _store(url, tmp_path / "blobs", "a", 1)
    _let_it_run_out(url)
    took: list[int | None] = []
    taking = threading.Thread(target=lambda: took.append(b.take()))

    def write(connection: sa.Connection) -> list[int | None]:
        taking.start()
        taking.join(0.3)
        return list(took)

    assert await store.database.write(write) == []
    taking.join(30)
    assert took == [2]
    await store.close()


async def test_a_holder_that_stops_in_a_transaction_is_cut_off_and_its_write_is_taken_back(
    join: Join, url: str, tmp_path: Path
) -> None:
    a, b = join("a"), join("b")
    assert a.take() == 1
    store = _store(url, tmp_path / "blobs", "a", 1, seconds=0.5)
    _let_it_run_out(url)
    took: list[int | None] = []

    def write_and_stop(connection: sa.Connection) -> None:
        if not took:
            connection.exec_driver_sql(
                "INSERT INTO audit (owner, at, area, event, details) "
                "VALUES ('o', 1, 'x', 'x', '{}')"
            )
            took.append(b.take())  # waits until the database has cut us off

    with pytest.raises(StoreUnavailableError):
        await store.database.write(write_and_stop)
    assert took == [2]
    assert await store.account.list_audit("o", None, 0.0, 10.0) == []
    await store.close()


def test_tables_of_a_later_release_are_left_to_its_servers(join: Join, url: str) -> None:
    new, old = join("new"), join("old")
    assert new.take() == 1
    _run(url, "UPDATE alembic_version SET version_num = '9999'")
    assert old.take() is None, "it can follow"
    _let_it_run_out(url)
    with pytest.raises(StoreTooNewError, match="9999"):
        old.take()
    assert new.renew(1), "it has taken nothing"


async def test_an_older_server_follows_a_newer_one_and_does_not_start_alone(
    join: Join, url: str
) -> None:
    new = join("new")
    assert new.take() == 1
    _run(url, "UPDATE alembic_version SET version_num = '9999'")
    follower = Lease(join("old"), LONG, lambda: None)
    await follower.start()
    assert follower.view.other == Holder("http://new", 1)
    await follower.close()
    new.release(1)
    alone = Lease(join("older"), LONG, lambda: None)
    with pytest.raises(StoreTooNewError, match="later release"):
        await alone.start()


def test_servers_that_start_at_once_on_an_empty_database_make_its_tables_once(url: str) -> None:
    servers = [Leases(url, str(n), str(n), "http://x", LONG) for n in range(4)]
    errors: list[BaseException] = []

    def begin(each: Leases) -> None:
        try:
            each.make_tables()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(each,)) for each in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert [each.take() for each in servers].count(1) == 1
    for each in servers:
        each.close()


async def test_a_tool_that_must_be_alone_and_servers_keep_each_other_out(
    join: Join, url: str, tmp_path: Path
) -> None:
    a = join("a")
    assert a.take() == 1
    store = Store(url, tmp_path / "blobs", lock_seconds=0.1)
    with pytest.raises(StoreInUseError, match="another server"):
        await store.keep_others_out()
    a.close()
    await store.keep_others_out()
    with pytest.raises(StoreInUseError, match="tool"):
        join("b")
    with pytest.raises(LeaseLostError):
        _store(url, tmp_path / "blobs", "a", 1)
    await store.close()


async def test_a_server_alone_on_sqlite_has_no_lease(tmp_path: Path) -> None:
    store = await claim_store(build_config({"data_dir": tmp_path}))
    with store.database.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM leases").scalar() == 0
    await store.close()
