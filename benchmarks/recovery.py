"""How long a killed server takes to be itself again.

    python benchmarks/recovery.py [--models 50] [--operations 1000] [--engine local|fake]

Trains many models on a small model, kills the server (SIGKILL) and starts it again. Prints as JSON
the seconds until it is ready and until every model, rebuilt from its log, has answered a pass, with
the answers compared to those before the kill.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import tinsmith
from reports import write_report
from tinsmith import AdamParams, Datum, ModelInput

CHAOS = Path(__file__).parents[1] / "tools" / "chaos"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", type=int, default=50)
    options.add_argument("--operations", type=int, default=1000)
    options.add_argument("--engine", choices=["local", "fake"], default="local")
    options.add_argument("--out", type=Path, help="write the result to this file")
    arguments = options.parse_args()
    result = measure(arguments.models, arguments.operations, arguments.engine)
    write_report(arguments.out, result)


def measure(num_models: int, num_operations: int, engine: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tinsmith.cli", "serve", "--engine", engine]
        command += ["--data-dir", str(folder / "data"), "--deterministic", "--device", "cpu"]
        if engine == "local":
            sys.path.insert(0, str(CHAOS))
            import tiny_model

            tiny_model.build(folder / "tiny")
            command += ["--model", f"tiny={folder / 'tiny'}"]
        server, url, key = _start([*command, "--port", "0"])
        port = url.rpartition(":")[2]
        try:
            service = tinsmith.ServiceClient(base_url=url, api_key=key)
            base = service.get_server_capabilities().supported_models[0].model_name
            clients = [
                service.create_lora_training_client(base, rank=4, seed=number)
                for number in range(num_models)
            ]
            started = time.perf_counter()
            asyncio.run(_train(clients, num_operations // num_models // 2))
            trained = time.perf_counter() - started
            before = _probe(clients)
            server.send_signal(signal.SIGKILL)
            server.wait()
            killed = time.perf_counter()
            server, _, _ = _start([*command, "--port", port])
            ready = time.perf_counter() - killed
            after = _probe(clients)
            answered = time.perf_counter() - killed
        finally:
            server.terminate()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()
    return {
        "models": num_models,
        "logged_operations": num_operations,
        "engine": engine,
        "training_s": round(trained, 2),
        "ready_after_kill_s": round(ready, 2),
        "all_models_rebuilt_and_answered_after_kill_s": round(answered, 2),
        "same_bits": before == after,
    }


def _start(command: list[str]) -> tuple[subprocess.Popen[str], str, str]:
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found is not None, line
    while True:
        try:
            with urllib.request.urlopen(f"{found[0]}/readyz", timeout=5):
                break
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.02)
    server.stdout.readline()
    key = ""
    if command[command.index("--port") + 1] == "0":
        match = re.search(r"TINKER_API_KEY=(\S+)", server.stdout.readline())
        assert match is not None
        key = match[1]
    return server, found[0], key


async def _train(clients: list[Any], steps: int) -> None:
    pending = []
    for client in clients:
        for number in range(steps):
            pending.append(await client.forward_backward_async([_datum(number)], "cross_entropy"))
            pending.append(await client.optim_step_async(AdamParams(learning_rate=0.01)))
    for future in pending:
        await future


def _probe(clients: list[Any]) -> list[str]:
    futures = [client.forward([_datum(0), _datum(1)], "cross_entropy") for client in clients]
    return [future.result().metrics["loss:sum"].hex() for future in futures]


def _datum(number: int) -> Datum:
    tokens = [(7 * number + 3 * place) % 90 + 3 for place in range(12)]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
    )


if __name__ == "__main__":
    main()
