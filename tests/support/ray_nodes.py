"""A Ray cluster on this machine: a head without cores, and nodes of one core each.

Run by itself it starts them, prints where they are, and then does what it reads: "add" starts
another node, "kill N" kills the node whose number that is; when its input ends, so do they. Ray is
in a process of its own because what it does to its process (signals, warnings, threads) is no
business of tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.server_process import clean_environment

_STORE_BYTES = 80 * 2**20


@dataclass
class RayNodes:
    address: str
    raylets: list[int]
    """Process ids; the head has none here."""
    environment: dict[str, str]
    process: subprocess.Popen[str]

    def add(self) -> None:
        """Have another node join."""
        self.raylets.append(self._do("add"))

    def kill(self, raylet: int) -> None:
        """Kill a node's raylet, and reap it: to its workers a zombie looks alive."""
        assert self._do(f"kill {self.raylets.index(raylet)}") == raylet

    def _do(self, command: str) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextlib.contextmanager
def ray_nodes(num_nodes: int) -> Iterator[RayNodes]:
    # Sockets lie in this folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        environment = clean_environment() | {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Whatever the system: nodes then keep to the loopback interface.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_TMPDIR": folder,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_nodes", str(num_nodes)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    break
            found = json.loads(line)
            yield RayNodes(found["address"], found["raylets"], environment, process)
        finally:
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()


def main(num_nodes: int) -> None:
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"object_store_memory": _STORE_BYTES}
    head = {"num_cpus": 0, "include_dashboard": False, **common}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def add() -> Any:
        node = cluster.add_node(num_cpus=1, **common)
        return node.all_processes["raylet"][0].process

    raylets = [add() for _ in range(num_nodes)]
    place = {"address": cluster.address, "raylets": [raylet.pid for raylet in raylets]}
    print(json.dumps(place), flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            raylets.append(add())
            print(raylets[-1].pid, flush=True)
        else:
            raylet = raylets[int(line.split()[1])]
            raylet.kill()
            raylet.wait()
            print(raylet.pid, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    os.setpgid(0, 0)
    main(int(sys.argv[1]))
