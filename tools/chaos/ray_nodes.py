"""A Ray cluster on this machine: a head without cores, and nodes with some each.

Run by itself it starts them, prints where they are, and then does what it reads; when its input
ends, so do they. Ray is in a process of its own because what it does to its process (signals,
warnings, threads) is no business of whoever breaks things, and because whoever started a raylet has
to reap it: to its workers a zombie looks alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.machinery import free_port

_STORE_BYTES = 80 * 2**20

_HEAD_ID = "f" * 51 + "00000"
"""By which the autoscaler's provider of nodes on this machine knows the head."""


@dataclass
class RayNodes:
    address: str
    raylets: list[int]
    """Process ids; the head has none here."""
    environment: dict[str, str]
    process: subprocess.Popen[str]

    def add(self) -> None:
        """Have another node join."""
        self.raylets += self._do("add")

    def kill(self, raylet: int) -> None:
        """Kill a node's raylet alone; what runs on the node is told in its own time."""
        self._do(f"kill {raylet}")
        self.raylets.remove(raylet)

    def lose_node_of(self, engine: int) -> None:
        """Everything on the engine's node dies, as when a machine loses its power. An engine whose
        actor is gone, and that is about to end, is on none."""
        raylet = parent(parent(engine))
        if raylet not in self.raylets:
            raise ProcessLookupError(f"process {engine} is no engine on one of the nodes")
        for each in sorted(_descendants(raylet)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.kill(raylet)

    def kill_head(self) -> None:
        """The nodes know nothing more of one another."""
        self._do("kill head")

    def start_anew(self) -> None:
        """Another cluster at the same address, with as many nodes as the last."""
        self.raylets = self._do(f"anew {len(self.raylets)}")

    def _do(self, command: str) -> list[int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        pids: list[int] = json.loads(self.process.stdout.readline())
        return pids


@contextlib.contextmanager
def ray_nodes(
    num_nodes: int, environment: dict[str, str], cores: int = 1, num_spare: int = 0
) -> Iterator[RayNodes]:
    """So many nodes, and as many spare ones, which Ray's autoscaler starts when there is demand."""
    # Sockets lie in this folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        environment = environment | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Whatever the system: nodes then keep to the loopback interface.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_TMPDIR": folder,
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *map(str, (num_nodes, cores, num_spare))],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            yield RayNodes(found["address"], found["raylets"], environment, process)
        finally:
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()
                _end_spare(folder)


def _end_spare(folder: str) -> None:
    """End what the autoscaler has started, which nobody else ends."""
    for each in Path("/proc").glob("[0-9]*"):
        # Processes end while we look.
        with contextlib.suppress(OSError):
            if f"={folder}/" in (each / "cmdline").read_text():
                os.kill(int(each.name), signal.SIGKILL)


def engines(data: Path) -> list[int]:
    """The engines of a server with this data folder, wherever on this machine they are."""
    ours = f"{data}/engines/slot-"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while we look.
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            # With "--connect" after it, where somebody has started it by hand.
            if "--credentials" in words and any(word.startswith(ours) for word in words):
                found.append(int(folder.name))
    return sorted(found)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


class _Nodes:
    """The cluster, in the process that has started it."""

    def __init__(self, num_nodes: int, cores: int, num_spare: int = 0, port: int = 0) -> None:
        from ray.cluster_utils import Cluster

        self._cores = cores
        self._common: dict[str, Any] = {"object_store_memory": _STORE_BYTES}
        head = {"num_cpus": 0, "include_dashboard": False, **self._common}
        if num_spare:
            port = port or free_port()
            head["autoscaling_config"] = str(_autoscaling(port, num_spare, cores))
            head["env_vars"] = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID}
        if port:
            head["gcs_server_port"] = port
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self._raylets: dict[int, Any] = {}
        self.pids = [self.add() for _ in range(num_nodes)]

    def add(self) -> int:
        node = self._cluster.add_node(num_cpus=self._cores, **self._common)
        raylet = node.all_processes["raylet"][0].process
        self._raylets[raylet.pid] = raylet
        return int(raylet.pid)

    def kill(self, pid: int) -> None:
        raylet = self._raylets.pop(pid)
        raylet.kill()
        raylet.wait()

    def kill_head(self) -> None:
        self._cluster.head_node.kill_gcs_server()

    def close(self) -> None:
        self._cluster.shutdown()


def _autoscaling(port: int, num_spare: int, cores: int) -> Path:
    """The settings of Ray's autoscaler, in a file: nodes of one kind, all on this machine."""
    head, spare = "ray.head.default", "spare"
    resources = {"CPU": cores, "object_store_memory": _STORE_BYTES}
    settings = {
        "cluster_name": "here",
        "max_workers": num_spare,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"127.0.0.1:{port}",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        # What it would do to a machine that it has rented; it asks for each.
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{who}_commands": [] for who in ("worker_setup", "worker_start_ray", "initialization")},
        "head_node_type": head,
        "available_node_types": {
            head: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            spare: {"resources": resources, "node_config": {}, "max_workers": num_spare},
        },
    }
    file = Path(os.environ["RAY_TMPDIR"]) / "autoscaling.json"
    file.write_text(json.dumps(settings))
    return file


def main(num_nodes: int, cores: int, num_spare: int) -> None:
    # What Ray prints of its own accord is not for the one who reads our answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: Any) -> None:
        print(json.dumps(found), file=answers, flush=True)

    nodes = _Nodes(num_nodes, cores, num_spare)
    answer({"address": nodes.address, "raylets": nodes.pids})
    for line in sys.stdin:
        match line.split():
            case ["add"]:
                answer([nodes.add()])
            case ["kill", "head"]:
                nodes.kill_head()
                answer([])
            case ["kill", pid]:
                nodes.kill(int(pid))
                answer([])
            case ["anew", number]:
                port = int(nodes.address.rpartition(":")[2])
                nodes.close()
                nodes = _Nodes(int(number), cores, num_spare, port)
                answer(nodes.pids)
    nodes.close()


if __name__ == "__main__":
    os.setpgid(0, 0)
    main(*map(int, sys.argv[1:]))
