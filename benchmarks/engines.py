"""What several engines give, and what the death of one costs.

    python benchmarks/engines.py [--rounds 3] [--out FILE]
        [--only fake local death node wire placement operations]

Eight tenants train through the server: on four fake engines that take a fixed time for each pass,
against one; on two local engines of one thread each, against one of one thread. Then one of two
local engines is killed (SIGKILL) while its models train: the seconds until each has answered
again, and whether all answers are those of an undisturbed run. The same when the node of an engine
is lost that Ray has placed. Then what TCP with TLS adds to a call, what it takes to choose a slot
among 64 that have 2,000 models, and what the server takes of a core when these are sent 1,000
operations a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tinsmith
from reports import write_report
from tinsmith import AdamParams, Datum, ModelInput

TENANTS = 8
FAKE_PASS_SECONDS = 0.05
MODELS = 2000
OFFERED_A_SECOND = 1000
OFFERED = 8000
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
CHAOS = Path(__file__).parents[1] / "tools" / "chaos"
ENGINE = b"tinsmith.engine.local.boundary.process"


def main() -> None:
    parts: dict[str, Callable[[int], dict[str, Any]]] = {
        "fake": fake,
        "local": local,
        "death": death,
        "node": node,
        "wire": wire,
        "placement": placement,
        "operations": operations,
    }
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    options.add_argument("--out", type=Path, help="write the result to this file")
    arguments = options.parse_args()
    result = {}
    for name in arguments.only:
        result[name] = parts[name](arguments.rounds)
        print(name, result[name], flush=True)
    write_report(arguments.out, result)


def fake(rounds: int) -> dict[str, Any]:
    """Four engines against one, each with a fixed service time."""
    options = ["--engine", "fake", "--set", f"fake_pass_seconds={FAKE_PASS_SECONDS}"]
    return _compared(rounds, 4, options, num_steps=20, lengths=[12])


def local(rounds: int) -> dict[str, Any]:
    """Two engines of one thread each against one of one thread."""
    with tempfile.TemporaryDirectory() as name:
        _build_model(Path(name) / "model")
        options = ["--engine", "local", "--device", "cpu", "--model", f"m={name}/model"]
        options += ["--set", "engine.num_threads=1", "--set", "engine.pack_weights=false"]
        return _compared(rounds, 2, options, num_steps=3, lengths=[128] * 8)


def death(rounds: int) -> dict[str, Any]:
    """From the kill of one of two engines until each of its models has answered."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*_tiny_options(folder), "--engines", "2"]
        with _serving(folder / "data", options) as (server, service):
            undisturbed = _tenants(service)
            asyncio.run(_train(undisturbed, 3, [12]))
            expected = asyncio.run(_train(undisturbed, 3, [12]))
            waits = []
            for _ in range(rounds):
                clients = _tenants(service)
                asyncio.run(_train(clients, 3, [12]))
                victim = _engines(server.pid)[0]
                os.kill(victim, signal.SIGKILL)
                killed = time.perf_counter()
                found = asyncio.run(_train(clients, 3, [12]))
                waits.append(time.perf_counter() - killed)
                assert found == expected, "an answer differs after the death"
    return {"models": TENANTS, "all_answered_after_kill_s": [round(w, 2) for w in waits]}


def node(rounds: int) -> dict[str, Any]:
    """From the loss of a node of a Ray cluster until the models of its engine have answered."""
    sys.path.insert(0, str(CHAOS))
    from ray_nodes import engines, ray_nodes

    waits = []
    with ray_nodes(3, dict(os.environ)) as nodes, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*_tiny_options(folder), "--engines", "1", "--cluster", nodes.address]
        with _serving(folder / "data", options, nodes.environment) as (_, service):
            for _ in range(rounds):
                clients = _tenants(service)
                asyncio.run(_train(clients, 3, [12]))
                nodes.lose_node_of(engines(folder / "data")[0])
                lost = time.perf_counter()
                asyncio.run(_train(clients, 1, [12]))
                waits.append(time.perf_counter() - lost)
                nodes.add()
    return {"models": TENANTS, "all_answered_after_loss_s": [round(w, 2) for w in waits]}


def wire(rounds: int) -> dict[str, Any]:
    """Milliseconds that TCP with TLS adds to a call."""
    from engine_wire import added_milliseconds

    return dict(added_milliseconds(rounds))


def placement(rounds: int) -> dict[str, Any]:
    """Milliseconds for one choice among 64 slots with 2,000 models, in the real pool."""
    from placements import decision_seconds

    seconds = [s for _ in range(rounds) for s in decision_seconds(64, 2000, 200)]
    ms = sorted(1e3 * each for each in seconds)
    p99 = ms[int(0.99 * len(ms))]
    return {"median_ms": round(statistics.median(ms), 3), "p99_ms": round(p99, 3)}


def operations(rounds: int) -> dict[str, Any]:
    """Cores that the server takes, engines that compute nothing included; and milliseconds of one
    for an operation, which is the same where not all that was offered could be sent."""
    from serving import serve

    with serve("--engine", "fake", "--engines", "64") as server:
        rates = asyncio.run(_offer(server, rounds))
    return {
        "models": MODELS,
        "recorded_s": round(statistics.median(rate for rate, _ in rates)),
        "cores": round(statistics.median(cores for _, cores in rates), 3),
        "cpu_ms": round(statistics.median(1e3 * cores / rate for rate, cores in rates), 3),
    }


async def _offer(server: Any, rounds: int) -> list[tuple[float, float]]:
    """Steps of one model after the other, so many a second, as if clients sent them on time."""
    from pyqwest import Client, HTTPTransport

    from server_overhead import IN_FLIGHT, new_model, poster

    async with HTTPTransport() as transport:
        post = poster(Client(transport), server)
        models = [m for _ in range(MODELS // 50) for m in await _gathered(50, new_model, post)]

        async def send(numbers: Iterator[int], began: float) -> None:
            for number in numbers:
                due = began + number % OFFERED / OFFERED_A_SECOND
                await asyncio.sleep(due - time.perf_counter())
                seq_id, place = divmod(number, MODELS)
                body = {"model_id": models[place], "adam_params": ADAM, "seq_id": seq_id + 1}
                await post("/api/v1/optim_step", body)

        found = []
        for each in range(rounds):
            numbers = iter(range(each * OFFERED, (each + 1) * OFFERED))
            cpu, began = server.cpu_seconds(), time.perf_counter()
            await _gathered(IN_FLIGHT, send, numbers, began)
            elapsed = time.perf_counter() - began
            found.append((OFFERED / elapsed, (server.cpu_seconds() - cpu) / elapsed))
    return found


async def _gathered(count: int, make: Any, *arguments: Any) -> list[Any]:
    return await asyncio.gather(*(make(*arguments) for _ in range(count)))


def _compared(
    rounds: int, num_engines: int, options: Sequence[str], *, num_steps: int, lengths: list[int]
) -> dict[str, Any]:
    rates: dict[int, list[float]] = {1: [], num_engines: []}
    for _ in range(rounds):
        for count, found in rates.items():
            with tempfile.TemporaryDirectory() as name:
                own = [*options, "--engines", str(count)]
                with _serving(Path(name) / "data", own) as (_, service):
                    clients = _tenants(service)
                    asyncio.run(_train(clients, 1, lengths))
                    started = time.perf_counter()
                    asyncio.run(_train(clients, num_steps, lengths))
                    found.append(TENANTS * num_steps / (time.perf_counter() - started))
    pairs = zip(rates[num_engines], rates[1], strict=True)
    return {
        "tenants": TENANTS,
        **{f"steps_s_{n}_engines": round(statistics.median(r), 2) for n, r in rates.items()},
        "ratio": round(statistics.median(many / one for many, one in pairs), 2),
    }


def _tiny_options(folder: Path) -> list[str]:
    sys.path.insert(0, str(CHAOS))
    import tiny_model

    tiny_model.build(folder / "tiny")
    engine = ["--engine", "local", "--device", "cpu", "--deterministic"]
    return [*engine, "--model", f"tiny={folder / 'tiny'}"]


def _tenants(service: Any) -> list[Any]:
    base = service.get_server_capabilities().supported_models[0].model_name
    create = service.create_lora_training_client
    return [create(base, rank=8, seed=number) for number in range(TENANTS)]


async def _train(clients: list[Any], steps: int, lengths: list[int]) -> list[float]:
    async def one(client: Any) -> list[float]:
        losses = []
        for number in range(steps):
            data = [_datum(number, length) for length in lengths]
            done = await client.forward_backward_async(data, "cross_entropy")
            step = await client.optim_step_async(AdamParams(learning_rate=0.01))
            losses.append((await done).metrics["loss:sum"])
            await step
        return losses

    found = await asyncio.gather(*map(one, clients))
    return [loss for losses in found for loss in losses]


def _datum(number: int, length: int) -> Datum:
    tokens = [(7 * number + 3 * place) % 90 + 3 for place in range(length + 1)]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
    )


def _build_model(folder: Path) -> None:
    """Large enough that computing, and not the way there, takes the time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@contextlib.contextmanager
def _serving(
    data: Path, options: Sequence[str], environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A server whose engines are all up, and a client of it."""
    command = [sys.executable, "-m", "tinsmith.cli", "--json", "serve", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--data-dir", str(data), *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert server.stdout is not None
    try:
        told = json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")
        url, key = told["base_url"], told["api_key"]
        count = int(options[options.index("--engines") + 1])
        while _num_up(url) < count:
            time.sleep(0.05)
        yield server, tinsmith.ServiceClient(base_url=url, api_key=key)
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def _num_up(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return 0
    return len(re.findall(r'^tinsmith_slot_up\{slot="\d+"\} 1', text, re.MULTILINE))


def _engines(server: int) -> list[int]:
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [int(c) for c in children if ENGINE in Path(f"/proc/{c}/cmdline").read_bytes()]


if __name__ == "__main__":
    main()
