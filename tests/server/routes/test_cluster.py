"""What a server tells of the cluster that its engines run in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinsmith.engine.base import Health
from tinsmith.engine.cluster import Node

if TYPE_CHECKING:
    from tests.support.in_process_server import StartServer, TestServer


class StubCluster:
    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.nodes = [Node("a1", "10.0.0.1", True, 8.0, 1.0, 2**30)]

    def detail(self, slot: int) -> str:
        return f"slot {slot} waits for a node"

    def host(self, slot: int) -> str:
        return f"host-{slot}"

    async def close(self) -> None: ...


async def _get(server: TestServer, path: str, **headers: str) -> Any:
    response = await server.api.http.get(path, headers=headers)
    assert response.status_code == 200
    return response.json()


async def test_readiness_says_why_nothing_new_is_placed_while_engines_go_on(
    start_server: StartServer,
) -> None:
    server = await start_server()
    server.service.cluster = StubCluster("the head at 10.0.0.1 is down")
    said = await _get(server, "/readyz", **server.api.headers)
    assert said["status"] == "ready"
    assert said["placement"] == "nothing new is placed: the head at 10.0.0.1 is down"
    stranger = await _get(server, "/readyz")
    assert "nothing new is placed" in stranger["placement"]
    assert "10.0.0.1" not in stranger["placement"]
    server.service.cluster = StubCluster()
    assert await _get(server, "/readyz") == {"status": "ready"}


async def test_the_cluster_has_slots_with_hosts_and_nodes(start_server: StartServer) -> None:
    server = await start_server()
    server.service.cluster = StubCluster()
    said = await _get(server, "/api/v1/cluster", **server.api.headers)
    assert said["slots"][0]["host"] == "host-0"
    assert said["slots"][0]["detail"] == "", "an engine that is up waits for nothing"
    assert said["nodes"] == [
        {
            "node": "a1",
            "address": "10.0.0.1",
            "is_alive": True,
            "cpus": 8.0,
            "gpus": 1.0,
            "memory_bytes": 2**30,
        }
    ]
    assert said["trouble"] == ""


async def test_a_slot_says_what_its_memory_holds_and_the_server_how_it_is_set_up(
    start_server: StartServer,
) -> None:
    server = await start_server()
    held = {"weights_bytes": 5, "cache_bytes": 2, "cache_limit_bytes": 9}
    held |= {"adapter_bytes": 1, "adapter_limit_bytes": 4}
    server.service.engines.slots[0].health = Health(alive=True, memory_bytes=8, **held)
    slot = (await _get(server, "/api/v1/cluster", **server.api.headers))["slots"][0]
    assert slot["ranks"] == 1
    assert {name: slot[name] for name in held} == held
    said = await _get(server, "/api/v1/console/server", **server.api.headers)
    assert (said["storage"], said["on_policy"]) == ("", "close")
    assert said.get("epoch") is None, "it is alone"
