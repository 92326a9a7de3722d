"""The life of models and checkpoints under everything that may happen at once, simulated.

Several owners train through the real application, on the real store and the fake engine: requests
overtake each other, come twice, are given up or leave gaps; checkpoints are overwritten, published,
read by others and deleted; models are put on disk and moved; engines die, some of several, and
their slots are emptied; servers are killed and started
again. Each answer is compared, bit by bit, with that of the same operations one after another.

A failure names its seed, and `run(seed, folder)` repeats it step by step. `make simulation` tries
as many seeds as it takes to carry out so many operations.

That it can fail was seen by planting old faults, one at a time; each is found by seed 0:
- an operation runs before its predecessor's end is recorded: `batches.Single.run` without
  `await model.recorded()`;
- a repeat is carried out again: `Recorder._record` without `if not is_new: return self._adopt(…)`;
- a step that failed for a gap is replayed: `Endings.end_all` with
  `failed(operation, failure, took_effect=operation.is_step)`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.sequential import (
    MODEL,
    Operation,
    Outcome,
    Sequential,
    load,
    random_pass,
    save,
    save_for_sampler,
    step,
)
from tests.support.simulated_loop import simulate
from tests.support.simulated_server import Answer, SimulatedServer, simulated_machine
from tinsmith.server.config import ServerConfig
from tinsmith.server.edge.auth import create_key
from tinsmith.server.engines.draining import Draining
from tinsmith.server.store.store import Store
from tinsmith.types import LoraConfig
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import proto

OWNERS = ("ann", "bob", "cleo")
TRAINERS_PER_OWNER = 2
NUM_ROUNDS = 12
NUM_SEEDS = 15
MAX_LOADED_MODELS = 2
GAP_SECONDS = 40.0
PATIENCE_SECONDS = 3000.0
"""Simulated; more than any wait here can take unless somebody is forgotten."""


@dataclass(slots=True)
class Publication:
    """What other owners may know of a checkpoint."""

    state: str = "private"
    num_changes: int = 0
    is_changing: bool = False


class World:
    """The server, those who use it, and what they know of each other."""

    def __init__(self, random: random.Random, folder: Path) -> None:
        self.random = random
        self.config = ServerConfig(
            data_dir=folder / "data",
            fake_pass_seconds=0.05,
            hold_seconds=5.0,
            gap_timeout_seconds=GAP_SECONDS,
            max_loaded_models=MAX_LOADED_MODELS,
            snapshot_steps=3,
            engine_attempts=1000,
            engines=random.choice((1, 2, 3)),
            engine_lost_seconds=1.0,
        )
        self.server = SimulatedServer(random, self.config, MODEL)
        self.is_open = asyncio.Event()
        self.keys: dict[str, str] = {}
        self.reference = Sequential(folder / "reference")
        self.published: dict[str, Publication] = {}
        self.trainers: list[Trainer] = []
        self.people: set[asyncio.Task[Any]] = set()
        self.calls: set[asyncio.Task[Answer]] = set()
        self.num_operations = 0
        """That were sent and compared, or found to have failed as they had to."""

    async def make_keys(self, store: Store) -> None:
        for owner in OWNERS:
            self.keys[owner], _ = await create_key(store, owner, "key")

    async def ask(
        self, owner: str, method: str, path: str, body: bytes = b"", kind: str = JSON
    ) -> Answer:
        """What the server answers, however often it has to be asked. Now and then the answer to
        what may be repeated at any time is not waited for, or the request is broken off."""
        headers = {"x-api-key": self.keys[owner], "content-type": kind, "accept": PROTOBUF}
        while True:
            await self.is_open.wait()
            call = asyncio.create_task(self.server.ask(method, path, headers, body))
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)
            fate = self.random.random() if method == "POST" and body else 1.0
            await asyncio.wait([call], timeout=self.random.random() if fate < 0.15 else None)
            if fate < 0.05:
                call.cancel()
            if call.done() and not call.cancelled():
                return call.result()

    async def post(self, owner: str, path: str, body: object) -> Answer:
        return await self.ask(owner, "POST", path, orjson.dumps(body), JSON)

    async def in_parallel(self, *doings: Coroutine[Any, Any, None]) -> None:
        async with asyncio.TaskGroup() as group:
            for doing in doings:
                task = group.create_task(doing)
                self.people.add(task)
                task.add_done_callback(self.people.discard)

    async def pause(self) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.1, 1.0, 3.0)))


@dataclass(slots=True, eq=False)
class Trainer:
    """One model of an owner, and what its client remembers."""

    world: World
    owner: str
    number: int
    session_id: str = ""
    model_id: str = ""
    last_seq_id: int = 0
    unique: int = 0
    done: list[Operation] = field(default_factory=list)

    async def live(self) -> None:
        await self._create()
        doings = (
            [self._train] * 4
            + [self._save_and_load] * 2
            + [self._leave_gap, self._leave_gap_open, self._refused, self._unload]
            + [self._publish, self._delete, self._read_foreign, self._snoop, self._ask_again]
            + [self._move] * 2
        )
        for _ in range(NUM_ROUNDS):
            await self.world.random.choice(doings)()
            await self.world.pause()

    async def _create(self) -> None:
        fields: dict[str, Any] = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        answer = await self.world.post(self.owner, "/create_session", fields)
        self.session_id = orjson.loads(answer.body)["session_id"]
        lora = {"rank": 4, "seed": self.number}
        body = {
            "session_id": self.session_id,
            "model_seq_id": 0,
            "base_model": MODEL.name,
            "lora_config": lora,
        }
        answer = await self.world.post(self.owner, "/create_model", body)
        created = await self._result(orjson.loads(answer.body)["request_id"])
        assert isinstance(created, dict), created
        self.model_id = created["model_id"]
        await self.world.reference.create(self.model_id, LoraConfig(rank=4, seed=self.number))

    # Operations

    async def carry_out(self, operations: list[Operation], *, lost: int | None = None) -> None:
        """Number and send operations, all at once, and compare what comes back.

        The one at index `lost` is never sent, so those behind it fail; those before it do not.
        """
        for place, operation in enumerate(operations):
            self.last_seq_id += 1
            operation.seq_id = self.last_seq_id
            operation.waits_in_vain = lost is not None and place > lost
        sent = [operation for place, operation in enumerate(operations) if place != lost]
        await self.world.in_parallel(*(self._send(operation) for operation in sent))
        for operation in sent:
            await self._compare(operation)

    async def _send(self, operation: Operation) -> None:
        await self.world.pause()
        first = await self._submit(operation)
        if first.status == 200 and self.world.random.random() < 0.2:
            again = await self._submit(operation)
            assert again.status == 200 and again.body == first.body, "a repeat finds the first"
        if first.status == 400:
            operation.outcome = f"refused: {orjson.loads(first.body)['detail']}"
            return
        assert first.status == 200, first
        operation.request_id = orjson.loads(first.body)["request_id"]
        operation.outcome = await self._result(operation.request_id)
        self.done.append(operation)

    async def _submit(self, operation: Operation) -> Answer:
        path = f"/{'forward_backward' if operation.is_pass else operation.kind}"
        kind = PROTOBUF if operation.is_pass else JSON
        return await self.world.ask(self.owner, "POST", path, operation.body(self.model_id), kind)

    async def _result(self, request_id: str) -> Outcome:
        while True:
            answer = await self.world.post(
                self.owner, "/retrieve_future", {"request_id": request_id}
            )
            if answer.status == 200:
                return outcome_in(answer)
            assert answer.status == 408, answer

    async def _compare(self, operation: Operation) -> None:
        self.world.num_operations += 1
        outcome = operation.outcome
        if operation.waits_in_vain:
            assert "which never arrived" in str(outcome), (self.model_id, operation)
            return
        expected = await self.world.reference.run(self.model_id, operation)
        if isinstance(outcome, dict):
            outcome = {name: value for name, value in outcome.items() if value is not None}
        assert outcome == expected, (self.model_id, operation, expected)

    # What a trainer does

    def _operation(self) -> Operation:
        draw = self.world.random
        own = self.world.reference.paths_of(self.model_id)
        kind = draw.randrange(12)
        if kind < 4:
            return random_pass(draw, "forward_backward")
        if kind < 5:
            return random_pass(draw, "forward")
        if kind < 8:
            return step(draw.choice((1e-3, 1e-2)))
        if kind < 10:
            return save(draw.choice(("x", "y")), overwrite=draw.random() < 0.5)
        if kind < 11:
            return save_for_sampler(draw.choice(("x", "y", "z")))
        paths = [*own, f"tinker://{self.model_id}/weights/x"]
        return load(draw.choice(paths), optimizer=draw.random() < 0.5)

    async def _train(self) -> None:
        count = self.world.random.randrange(1, 7)
        await self.carry_out([self._operation() for _ in range(count)])

    async def _save_and_load(self) -> None:
        """Each needs what the one before it has left in the store."""
        name = self.world.random.choice(("x", "y"))
        path = f"tinker://{self.model_id}/weights/{name}"
        await self.carry_out(
            [
                random_pass(self.world.random, "forward_backward"),
                step(1e-2),
                save(name, overwrite=self.world.random.random() < 0.5),
                save(name),
                load(path, optimizer=True),
                random_pass(self.world.random, "forward"),
            ]
        )

    async def _leave_gap(self) -> None:
        """A number that comes very late, though not too late."""
        late, rest = self._operation(), [self._operation() for _ in range(3)]
        for operation in (late, *rest):
            self.last_seq_id += 1
            operation.seq_id = self.last_seq_id

        async def send_late() -> None:
            await asyncio.sleep(GAP_SECONDS * 0.5 * self.world.random.random())
            await self._send(late)

        await self.world.in_parallel(send_late(), *(self._send(operation) for operation in rest))
        for operation in (late, *rest):
            await self._compare(operation)

    async def _leave_gap_open(self) -> None:
        operations = [self._operation() for _ in range(self.world.random.randrange(2, 6))]
        lost = self.world.random.randrange(len(operations) - 1)
        await self.carry_out(operations, lost=lost)
        if self.world.random.random() < 0.5:
            late = await self._submit(operations[lost])
            assert late.status == 400 and b"too late" in late.body, late

    async def _refused(self) -> None:
        """A request that is not accepted uses up its number, and changes nothing."""
        bad = save("no/name")
        self.last_seq_id += 1
        bad.seq_id = self.last_seq_id
        await self.world.in_parallel(self._send(bad), self._train())
        assert str(bad.outcome).startswith("refused: "), bad

    async def _unload(self) -> None:
        body = {"model_id": self.model_id, "type": "unload_model"}
        answer = await self.world.post(self.owner, "/unload_model", body)
        assert answer.status == 200, answer

    async def _move(self) -> None:
        """To any slot, also its own; one that is being emptied is refused."""
        slot = self.world.random.randrange(self.world.config.engines or 1)
        path = f"/training_runs/{self.model_id}/move"
        answer = await self.world.post(self.owner, path, {"slot": slot})
        assert answer.status == 200 or b"choose another" in answer.body, answer

    async def _publish(self) -> None:
        """Publish a checkpoint of its own name, or take it back."""
        own = [p for p in self.world.published if p.startswith(f"tinker://{self.model_id}/")]
        kept = [path for path in own if self.world.published[path].state != "deleted"]
        if not kept or self.world.random.random() < 0.5:
            self.unique += 1
            await self.carry_out([save(f"unique{self.unique}")])
            path = f"tinker://{self.model_id}/weights/unique{self.unique}"
            self.world.published[path] = Publication()
        else:
            path = self.world.random.choice(kept)
        is_public = self.world.published[path].state == "public"
        method, state = ("DELETE", "private") if is_public else ("POST", "public")
        await self._change(path, method, "/publish", state)

    async def _delete(self) -> None:
        paths = self.world.reference.paths_of(self.model_id)
        if paths:
            path = self.world.random.choice(paths)
            await self._change(path, "DELETE", "", "deleted")
            self.world.reference.delete(path)
            again = await self.world.ask(self.owner, "DELETE", checkpoint_url(path))
            assert again.status == 404, again
            if self.world.random.random() < 0.5:
                await self.carry_out([load(path, optimizer=False)])

    async def _change(self, path: str, method: str, what: str, state: str) -> None:
        publication = self.world.published.get(path, Publication())
        publication.is_changing = True
        url = checkpoint_url(path) + what
        answer = await self.world.ask(self.owner, method, url)
        # The first of two requests may have been carried out without an answer.
        assert answer.status == 204 or (state == "deleted" and answer.status == 404), answer
        publication.state, publication.is_changing = state, False
        publication.num_changes += 1

    async def _read_foreign(self) -> None:
        """Load a checkpoint of somebody else's, which may be published or deleted meanwhile."""
        others = [t for t in self.world.trainers if t.owner != self.owner]
        paths = [
            path
            for path in self.world.published
            if any(path.startswith(f"tinker://{other.model_id}/") for other in others)
        ]
        if not paths:
            return
        path = self.world.random.choice(paths)
        publication, saved = self.world.published[path], self.world.reference.saved.get(path)
        before = (publication.state, publication.num_changes, publication.is_changing)
        self.last_seq_id += 1
        reading = load(path, optimizer=True)
        reading.seq_id = self.last_seq_id
        await self._send(reading)
        is_read = isinstance(reading.outcome, dict)
        after = (publication.state, publication.num_changes, publication.is_changing)
        if before == after and not publication.is_changing:
            assert is_read == (publication.state == "public"), (path, before, reading)
        if is_read:
            assert saved is not None, f"{path} was read after it had been deleted"
            await self.world.reference.restore(self.model_id, saved, "training")
        else:
            refusals = (f"there is no checkpoint {path}", f"{path} has just been deleted")
            assert str(reading.outcome).startswith(refusals), reading
        await self.carry_out([random_pass(self.world.random, "forward")])

    async def _snoop(self) -> None:
        """Others' models, requests and checkpoints cannot be told from those that never were."""
        others = [t for t in self.world.trainers if t.owner != self.owner and t.done]
        if not others:
            return
        other = self.world.random.choice(others)
        request_id = self.world.random.choice(other.done).request_id
        answer = await self.world.post(self.owner, "/retrieve_future", {"request_id": request_id})
        assert answer.status == 404, answer
        spied = random_pass(self.world.random, "forward_backward")
        spied.seq_id = other.last_seq_id + 1
        answer = await self.world.ask(
            self.owner, "POST", "/forward_backward", spied.body(other.model_id), PROTOBUF
        )
        assert answer.status == 404, answer
        url = f"/training_runs/{other.model_id}/checkpoints"
        answer = await self.world.ask(self.owner, "GET", url)
        assert answer.status == 404, answer

    async def _ask_again(self) -> None:
        """A result is the same for ever, also for a request that is sent once more."""
        for operation in self.world.random.sample(self.done, min(3, len(self.done))):
            assert await self._result(operation.request_id) == operation.outcome
            answer = await self._submit(operation)
            is_same = answer.status == 200 and operation.request_id.encode() in answer.body
            assert is_same, (answer, operation)

    # At the end

    async def check_all(self) -> None:
        """Every checkpoint that exists is listed and can be loaded; no other."""
        paths = self.world.reference.paths_of(self.model_id)
        url = f"/training_runs/{self.model_id}/checkpoints"
        answer = await self.world.ask(self.owner, "GET", url)
        listed = [c["tinker_path"] for c in orjson.loads(answer.body)["checkpoints"]]
        assert sorted(listed) == paths
        for path in paths:
            reading = load(path, optimizer=False)
            await self.carry_out([reading, random_pass(self.world.random, "forward")])
        for operation in self.done:
            assert await self._result(operation.request_id) == operation.outcome
        await self._check_curve()

    async def _check_curve(self) -> None:
        """Whatever was killed: each operation that ended is there once, each loss at its place."""
        url = f"/training_runs/{self.model_id}"
        answer = await self.world.ask(self.owner, "GET", f"{url}/operations?limit=1000")
        ended = [each["seq"] for each in orjson.loads(answer.body)["operations"]]
        assert sorted(ended) == sorted([0, *(operation.seq_id for operation in self.done)])
        losses = {
            operation.seq_id: proto.decode_output(operation.outcome).metrics["loss:sum"]
            for operation in sorted(self.done, key=lambda operation: operation.seq_id)
            if isinstance(operation.outcome, bytes)
        }
        answer = await self.world.ask(self.owner, "GET", f"{url}/metrics?points=5000")
        curve = orjson.loads(answer.body)["series"].get("loss:sum", {"x": [], "mean": []})
        assert (curve["x"], curve["mean"]) == (list(losses), list(losses.values()))

    async def leave(self) -> None:
        body = {"reason": {"type": "success"}}
        answer = await self.world.post(self.owner, f"/sessions/{self.session_id}/finish", body)
        assert answer.status in (200, 204), answer


def outcome_in(answer: Answer) -> Outcome:
    if answer.content_type == PROTOBUF:
        return answer.body
    message: dict[str, Any] = orjson.loads(answer.body)
    return str(message["error"]) if "error" in message else message


def checkpoint_url(path: str) -> str:
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    return f"/training_runs/{model_id}/checkpoints/{kind}/{name}"


async def make_trouble(world: World) -> None:
    """Engines die; slots are emptied; servers are killed, or stopped, and started again."""
    draining = Draining(world.config.data_dir)
    for _ in range(world.random.randrange(2, 7)):
        await asyncio.sleep(world.random.random() * 40)
        number = world.random.randrange(world.config.engines or 1)
        draining.change(number, is_draining=world.random.random() < 0.5)
        trouble = world.random.randrange(4)
        if trouble < 2:
            if engines := list(world.server.engines.values()):  # else none is up yet
                world.random.choice(engines).die("killed by the simulation")
            continue
        world.is_open.clear()
        if trouble == 2:
            await world.server.kill(world.people)
        else:
            world.server.service.begin_drain()
            if world.calls:
                await asyncio.wait(list(world.calls))
            await world.server.stop()
        await world.server.start()
        world.is_open.set()


async def check_that_nothing_is_left(world: World) -> None:
    service = world.server.service
    await asyncio.sleep(1000.0)
    assert len(service.promises) == service.promises.nbytes == 0, "results of long ago are kept"
    assert len(service.models) == 0, "models that nobody uses are kept"
    assert service.admission.requests.total == service.admission.body_bytes.total == 0
    for engine in world.server.engines.values():
        assert (await engine.health()).num_adapters == 0
    assert all(service.models.backlog_of(owner).num_operations == 0 for owner in OWNERS)
    assert service.folder.names() == await service.store.file_names()


async def live(world: World, *, is_to_the_end: bool) -> None:
    main = asyncio.current_task()
    assert main is not None
    world.people.add(main)
    await world.server.start(world.make_keys)
    world.is_open.set()
    world.trainers = [
        Trainer(world, owner, number)
        for number, owner in enumerate(OWNERS * TRAINERS_PER_OWNER, start=1)
    ]
    async with asyncio.timeout(PATIENCE_SECONDS):
        await world.in_parallel(make_trouble(world), *(t.live() for t in world.trainers))
        await world.in_parallel(*(trainer.check_all() for trainer in world.trainers))
        await world.in_parallel(*(trainer.leave() for trainer in world.trainers))
    if is_to_the_end:
        await check_that_nothing_is_left(world)
    await world.server.stop()


@dataclass(frozen=True, slots=True)
class Lived:
    num_steps: int
    num_operations: int


def run(seed: int, folder: Path, *, is_to_the_end: bool = False) -> Lived:
    worlds: list[World] = []

    async def main(random: random.Random) -> None:
        worlds.append(World(random, folder))
        await live(worlds[0], is_to_the_end=is_to_the_end)

    with simulated_machine(seed):
        return Lived(simulate(seed, main), worlds[0].num_operations)


@pytest.mark.parametrize(
    "seed",
    [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, NUM_SEEDS))],
)
def test_no_order_of_events_changes_a_result_or_loses_a_checkpoint(
    seed: int, tmp_path: Path
) -> None:
    assert run(seed, tmp_path).num_steps > 10_000


def test_nothing_is_kept_for_those_who_have_left(tmp_path: Path) -> None:
    run(NUM_SEEDS, tmp_path, is_to_the_end=True)


@pytest.mark.slow
def test_a_seed_repeats_its_run_step_by_step(tmp_path: Path) -> None:
    assert run(7, tmp_path / "first") == run(7, tmp_path / "second")
