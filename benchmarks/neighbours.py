"""How much an innocent tenant feels of somebody who means harm.

    python benchmarks/neighbours.py [--engine {local,fake}] [--seconds 5] [--attacks NAME …]

One owner samples, trains and shows signs of life, on a server of its own for each attack, first
with nobody else there and then while another owner, or a stranger, does one of the things below.
Server, engine and both clients share the machine's cores, so that an attack is felt also where the
server does nothing wrong. How much is measured on another server: there a program that has nothing
to do with it takes as much processor time as the attack cost the first one and its engine.

Shown are the p99 and the worst of each kind of request, how many times the p99 without the attack
that is (`times_quiet`), and how many times the larger of that p99 and the one beside the other
program (`times`), which is what the server adds. The attacker's client, which would run on a
machine of its own, has what time the others leave.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import orjson

from load import Server
from load_clients import DATUM, MODEL, Client, Connection, Measured
from reports import write_report
from tinsmith.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput
from tinsmith.wire import proto

BOUND = 3.0
"""Most times the p99 without him, or beside another program, that a neighbour may be felt."""

KINDS = ("sample", "pass", "heartbeat")
PAUSE_SECONDS = 0.02
_WARM_UP_SECONDS = 3.0
_CLIENT_NICENESS = 19
_BURST_SECONDS = 0.01
_SPAWN = multiprocessing.get_context("spawn")


class Tenant(Client):
    """The innocent one: a loop of each kind of request, each on its own connection."""

    def __init__(self, address: tuple[str, int], key: str) -> None:
        super().__init__(address, key, Measured())
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._began: dict[str, float] = {}

    async def live(self) -> None:
        await asyncio.gather(self._sample(), self._train(), self._show_life())

    def found(self) -> defaultdict[str, list[float]]:
        """What was measured since the last time; what is under way counts as it stands."""
        found, self._seconds = self._seconds, defaultdict(list)
        for kind, began in self._began.items():
            found[kind].append(time.perf_counter() - began)
        return found

    async def _sample(self) -> None:
        connection = await self._connection()
        for number in itertools.count(1):
            self._began["sample"] = time.perf_counter()
            body = sample_body(self._sampler_id, number)
            promise = await self._post(connection, "asample", "/asample", body)
            await self._result(connection, promise["request_id"])
            await self._end("sample")

    async def _train(self) -> None:
        connection = await self._connection()
        for number in itertools.count(1):
            self._began["pass"] = time.perf_counter()
            body = pass_body(self._model_id, number)
            promise = await self._send(connection, "forward_backward", "/forward_backward", body)
            await self._result(connection, promise["request_id"])
            await self._end("pass")

    async def _show_life(self) -> None:
        """On a new connection each time, as a client that has just started."""
        body = {"session_id": self._session_id}
        while True:
            self._began["heartbeat"] = time.perf_counter()
            connection = await self._connection()
            await self._post(connection, "heartbeat", "/session_heartbeat", body)
            connection.close()
            await self._end("heartbeat")

    async def _end(self, kind: str) -> None:
        self._seconds[kind].append(time.perf_counter() - self._began.pop(kind))
        await asyncio.sleep(PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class Signs:
    """Between the process that measures and the one that attacks."""

    is_ready: Event
    is_begun: Event


class Attacker(Client):
    """Somebody with a key, or a stranger, in one of the ways of `ATTACKS`.

    In a process of its own, so that the innocent one is kept waiting by the server alone. Each way
    prepares what it sends and then waits for the sign to begin.
    """

    def __init__(self, address: tuple[str, int], key: str, signs: Signs) -> None:
        super().__init__(address, key, Measured())
        self._signs = signs
        self._held: list[Connection] = []

    async def _sign(self) -> None:
        self._signs.is_ready.set()
        await asyncio.to_thread(self._signs.is_begun.wait)

    async def idle_sockets(self) -> None:
        """Heads without their bodies under a key, and connections that never say anything."""
        head = self._request("/session_heartbeat", b"x" * 10, "application/json")[:-10]
        await self._sign()
        for number in range(4000):
            with contextlib.suppress(OSError):
                connection = await Connection.open(*self._address)
                self._held.append(connection)
                if number % 4:
                    connection.send(head)
            if number % 50 == 0:
                await asyncio.sleep(PAUSE_SECONDS)
        await asyncio.Event().wait()

    async def endless_header(self) -> None:
        piece = b"a" * 2**20
        await self._sign()
        while True:
            _, writer = await asyncio.open_connection(*self._address)
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: ")
                for _ in range(200):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
            writer.close()
            await asyncio.sleep(PAUSE_SECONDS)

    async def big_metadata(self) -> None:
        metadata = {f"name {n}": ["x"] * 10 for n in range(100_000)}
        body = {"tags": [], "user_metadata": metadata, "sdk_version": "0.36.0"}
        await self._repeat("/create_session", orjson.dumps(body), at_once=4)

    async def big_json(self) -> None:
        """As many numbers as one request may have."""
        chunks = [{"type": "encoded_text", "tokens": list(range(1, 1001))}] * 1300
        body = sample_body(self._sampler_id, 1) | {"prompt": {"chunks": chunks}}
        await self._repeat("/asample", orjson.dumps(body), at_once=4)

    async def stop_strings(self) -> None:
        stop = [f"stop {number}" for number in range(400_000)]
        body = sample_body(self._sampler_id, 1)
        body["sampling_params"]["stop"] = stop
        await self._repeat("/asample", orjson.dumps(body), at_once=4)

    async def many_samples(self) -> None:
        async def send(start: int) -> None:
            connection = await self._connection()
            for number in itertools.count(start, 8):
                body = sample_body(self._sampler_id, number, num_samples=4096, max_tokens=64)
                request = self._request("/asample", orjson.dumps(body), "application/json")
                status, _ = await connection.ask(request)
                await asyncio.sleep(1.0 if status == 429 else PAUSE_SECONDS)

        await self._sign()
        await asyncio.gather(*(send(start) for start in range(1, 9)))

    async def many_models(self) -> None:
        connections = [await self._connection() for _ in range(100)]
        model_ids = [await self._new_model(each, n) for n, each in enumerate(connections, 1)]

        async def train(connection: Connection, model_id: str) -> None:
            for seq_id in itertools.count(1):
                body = pass_body(model_id, seq_id, num_datums=32)
                await self._send(connection, "forward_backward", "/forward_backward", body)
                await asyncio.sleep(0.2)

        await self._sign()
        await asyncio.gather(*map(train, connections, model_ids))

    async def costly_loss(self) -> None:
        train = await asyncio.to_thread(self._prepare_costly_loss)
        await self._sign()
        await asyncio.to_thread(train)

    def _prepare_costly_loss(self) -> Callable[[], None]:
        import torch

        import tinsmith

        def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            wide = logprobs.repeat(50_000)
            for _ in range(4):
                wide = torch.sort(wide).values * -1.0
            return wide.sum() * 0.0 + logprobs.sum(), {}

        host, port = self._address
        service = tinsmith.ServiceClient(base_url=f"http://{host}:{port}", api_key=self._key)
        training = service.create_lora_training_client(base_model=MODEL, rank=4)
        handle = service.create_custom_loss(loss, {"logprobs": 1}).result()
        data = Datum(
            model_input=ModelInput.from_ints([1, 2, 3, 4]),
            loss_fn_inputs={"target_tokens": [2, 3, 4, 5]},
        )

        def train() -> None:
            for future in [training.forward_backward_custom([data], handle) for _ in range(50)]:
                future.result()

        return train

    async def _repeat(self, path: str, body: bytes, *, at_once: int) -> None:
        request = self._request(path, body, "application/json")

        async def send() -> None:
            while True:
                with contextlib.suppress(ConnectionError):
                    connection = await self._connection()
                    while True:
                        status, _ = await connection.ask(request)
                        await asyncio.sleep(1.0 if status == 429 else PAUSE_SECONDS)

        await self._sign()
        await asyncio.gather(*(send() for _ in range(at_once)))

    async def _new_model(self, connection: Connection, number: int) -> str:
        body = {
            "session_id": self._session_id,
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": 4, "seed": 1},
        }
        promise = await self._post(connection, "start", "/create_model", body)
        await self._result(connection, promise["request_id"])
        return str(promise["model_id"])


Attack = Callable[[Attacker], Awaitable[None]]
ATTACKS: dict[str, Attack] = {
    "idle_sockets": Attacker.idle_sockets,
    "endless_header": Attacker.endless_header,
    "big_metadata": Attacker.big_metadata,
    "big_json": Attacker.big_json,
    "stop_strings": Attacker.stop_strings,
    "many_samples": Attacker.many_samples,
    "many_models": Attacker.many_models,
    "costly_loss": Attacker.costly_loss,
}
NEEDS_LOCAL = ("costly_loss",)
"""Attacks that the fake engine has nothing to attack with."""


def sample_body(
    sampler_id: str, number: int, *, num_samples: int = 1, max_tokens: int = 8
) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": number,
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": max_tokens, "seed": 5, "stop": []},
    }


def pass_body(model_id: str, seq_id: int, *, num_datums: int = 1) -> bytes:
    inputs = ForwardBackwardInput([DATUM] * num_datums, "cross_entropy")
    return proto.encode_pass(ForwardBackwardRequest(inputs, model_id, seq_id))


Times = Mapping[str, list[float]]
"""Seconds of the innocent tenant's requests, by kind."""


@dataclass(frozen=True, slots=True)
class Felt:
    """What the innocent tenant and the server felt of an attack."""

    quiet: Times
    loud: Times
    failure: str | None
    grown_mb: float
    cores: float
    """Processor time a second that the attack cost the server and its engine."""


async def measure(server: Server, attack: str, seconds: float) -> Felt:
    """The innocent tenant's times without and with the attack."""
    tenant = Tenant(server.address, server.keys[0])
    await tenant.start()
    signs = Signs(_SPAWN.Event(), _SPAWN.Event())
    harm = _SPAWN.Process(target=_harm, args=(attack, server.address, server.harmful_key, signs))
    harm.start()
    await asyncio.to_thread(signs.is_ready.wait)
    living = asyncio.create_task(tenant.live())
    try:
        await _either(living, _WARM_UP_SECONDS)
        tenant.found()
        began = server.family_seconds()
        await _either(living, seconds)
        quiet, memory, between = tenant.found(), server.memory_mb(), server.family_seconds()
        signs.is_begun.set()
        await _either(living, seconds)
        loud, grown = tenant.found(), server.memory_mb() - memory
        cost = (server.family_seconds() - between) - (between - began)
    finally:
        harm.kill()
        harm.join()
        failure = await _end(living)
    return Felt(quiet, loud, failure, grown, max(0.0, cost / seconds))


async def measure_elsewhere(server: Server, cores: float, seconds: float) -> Times:
    """The innocent tenant's times beside a program that takes so much processor time."""
    tenant = Tenant(server.address, server.keys[0])
    await tenant.start()
    parts = [min(1.0, cores - number) for number in range(math.ceil(cores))]
    others = [_SPAWN.Process(target=_compute, args=(part,), daemon=True) for part in parts]
    for other in others:
        other.start()
    living = asyncio.create_task(tenant.live())
    try:
        await _either(living, _WARM_UP_SECONDS)
        tenant.found()
        await _either(living, seconds)
        return tenant.found()
    finally:
        for other in others:
            other.kill()
            other.join()
        await _end(living)


def _compute(part: float) -> None:
    """Take this part of a core's time, in bursts."""
    while True:
        began = time.thread_time()
        while time.thread_time() - began < part * _BURST_SECONDS:
            pass
        time.sleep((1 - part) * _BURST_SECONDS)


async def _end(living: asyncio.Task[None]) -> str | None:
    """What went wrong, if anything did."""
    living.cancel()
    failures = await asyncio.gather(living, return_exceptions=True)
    return None if isinstance(failures[0], asyncio.CancelledError) else repr(failures[0])


async def _either(living: asyncio.Task[None], seconds: float) -> None:
    """Until the time is over, or something went wrong."""
    await asyncio.wait([living], timeout=seconds)


def _harm(attack: str, address: tuple[str, int], key: str, signs: Signs) -> None:
    os.nice(_CLIENT_NICENESS)

    async def do() -> None:
        attacker = Attacker(address, key, signs)
        await attacker.start()
        # An attack that the server refuses is over; that is what is wanted.
        with contextlib.suppress(Exception):
            await ATTACKS[attack](attacker)
        signs.is_ready.set()

    asyncio.run(do())


def _compare(
    quiet: list[float], elsewhere: list[float], loud: list[float], seconds: float
) -> dict[str, float]:
    before, beside = _p99(quiet), _p99(elsewhere)
    during = _p99(loud) if loud else seconds  # none came back in all that time
    return {
        "quiet_p99_ms": round(1e3 * before, 1),
        "elsewhere_p99_ms": round(1e3 * beside, 1),
        "p99_ms": round(1e3 * during, 1),
        "worst_ms": round(1e3 * max(loud, default=seconds), 1),
        "times_quiet": round(during / before, 2),
        "times": round(during / max(before, beside), 2),
    }


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def tiny_model(folder: Path) -> Path:
    """A random two-layer model with a tokenizer of one token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = [chr(32 + number) for number in range(94)]
    names = ["<pad>", "<bos>", "<eos>", *letters]
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def run(attack: str, engine: str, seconds: float) -> dict[str, Any]:
    """One attack, and its processor time elsewhere, each on a server of its own."""
    with _server(engine) as server:
        felt = asyncio.run(measure(server, attack, seconds))
    with _server(engine) as server:
        elsewhere = asyncio.run(measure_elsewhere(server, felt.cores, seconds))
    return {
        "kinds": {
            kind: _compare(felt.quiet[kind], elsewhere[kind], felt.loud[kind], seconds)
            for kind in KINDS
        },
        "failure": felt.failure,
        "server_memory_grown_mb": round(felt.grown_mb),
        "cost_cores": round(felt.cores, 2),
    }


@contextlib.contextmanager
def _server(engine: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="tinsmith-neighbours-") as folder:
        settings: dict[str, object] = {"engine": engine, "custom_loss_server_side": "true"}
        if engine == "fake":
            settings |= {"fake_token_seconds": 0.001, "fake_pass_seconds": 0.005}
        else:
            settings["models"] = f"{MODEL}={tiny_model(Path(folder) / 'model')}"
        server = Server(Path(folder) / "data", 1, max_loaded_models=64, **settings)
        try:
            yield server
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("local", "fake"), default="local")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--attacks", nargs="+", choices=tuple(ATTACKS), default=tuple(ATTACKS))
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = {}
    for attack in arguments.attacks:
        if arguments.engine == "fake" and attack in NEEDS_LOCAL:
            parser.error(f"{attack} needs --engine local")
        result[attack] = run(attack, arguments.engine, arguments.seconds)
        if arguments.out is not None:
            print_row(attack, result[attack])
    write_report(arguments.out, result)


def print_row(attack: str, found: dict[str, Any]) -> None:
    print(attack, found["failure"] or "")
    for kind, figures in found["kinds"].items():
        verdict = "" if figures["times"] <= BOUND else f"  above {BOUND:g}"
        print(f"  {kind:10}", *(f"{n} {value:>8}" for n, value in figures.items()), verdict)


if __name__ == "__main__":
    main()
