"""The slots of the server, for whoever has a key; and moving models of one's own."""

from __future__ import annotations

from starlette.requests import Request

from tinsmith.engine.base import Health
from tinsmith.engine.cluster import Cluster
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.engines.slot import Slot
from tinsmith.server.operations.intake import owned_model
from tinsmith.server.service import Service
from tinsmith.types.observing import (
    ClusterNode,
    ClusterResponse,
    ClusterSlot,
    MoveModelRequest,
    MoveModelResponse,
)
from tinsmith.wire import endpoints


async def get_cluster(service: Service, caller: Caller, request: Request) -> ClusterResponse:
    cluster = service.cluster
    ranks = service.config.ranks
    slots = [_described(slot, caller, cluster, ranks) for slot in service.engines.slots]
    if cluster is None:
        return ClusterResponse(slots=slots)
    nodes = [
        ClusterNode(
            node=node.node_id,
            address=node.address,
            is_alive=node.is_alive,
            cpus=node.num_cpus,
            gpus=node.num_gpus,
            memory_bytes=node.memory_bytes,
        )
        for node in cluster.nodes
    ]
    return ClusterResponse(slots=slots, nodes=nodes, trouble=cluster.trouble)


async def move_model(
    service: Service, caller: Caller, request: Request, message: MoveModelRequest
) -> MoveModelResponse:
    model = await owned_model(service, caller, request.path_params["run_id"])
    before = None if model.slot is None else model.slot.number
    service.scheduler.move(model, message.slot)
    return MoveModelResponse(run=model.model_id, before=before, slot=message.slot)


def _described(slot: Slot, caller: Caller, cluster: Cluster | None, ranks: int) -> ClusterSlot:
    health = slot.health if slot.is_up else Health(alive=False)
    waits_for = "" if cluster is None else cluster.detail(slot.number)
    return ClusterSlot(
        slot=slot.number,
        role=slot.plan.role,
        device=slot.capabilities.device if slot.capabilities else slot.plan.device,
        state=slot.state,
        detail="" if slot.is_up else waits_for or slot.trouble,
        models=len(slot.models),
        own_runs=[model.model_id for model in slot.models if model.owner == caller.owner],
        running_samples=slot.num_jobs,
        memory_bytes=health.memory_bytes,
        weights_bytes=health.weights_bytes,
        cache_bytes=health.cache_bytes,
        cache_limit_bytes=health.cache_limit_bytes,
        adapter_bytes=health.adapter_bytes,
        adapter_limit_bytes=health.adapter_limit_bytes,
        restarts=slot.num_restarts,
        ranks=ranks,
        host="" if cluster is None else cluster.host(slot.number),
    )


ROUTES = [
    bare_route(endpoints.GET_CLUSTER, get_cluster),
    route(endpoints.MOVE_MODEL, move_model),
]
