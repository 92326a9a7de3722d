"""`tinsmith cluster`: the slots of a server, and taking one out of use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.output import Output, Table, size_text, with_output
from tinsmith.cli.server.local_server import config_of, which_server

if TYPE_CHECKING:
    from tinsmith.types.observing import ClusterNode, ClusterResponse


@click.group("cluster")
def command() -> None:
    """Show the engines of a server, and take one out of use."""


@command.command("status")
@with_output
def status(output: Output) -> None:
    """Show each slot: its role and device, its state, what it holds and what it has to do.

    A slot is the place of one engine process; `tinsmith serve --engines` says how many there are.
    For a server with --cluster, its machines are shown, too.
    """
    from tinsmith.client.rest import RestClient
    from tinsmith.wire import endpoints

    holder = RestClient().holder
    cluster = holder.submit(lambda: holder.api.call(endpoints.GET_CLUSTER, None)).result()
    columns = ["Slot", "Role", "Device", "State", "Models", "Yours", "Samples", "Memory"]
    output.show(
        cluster.model_dump(),
        Table(
            [*columns, "Restarts", "Host"],
            [
                [
                    str(slot.slot),
                    slot.role,
                    slot.device,
                    slot.state,
                    str(slot.models),
                    str(len(slot.own_runs)),
                    str(slot.running_samples),
                    size_text(slot.memory_bytes),
                    str(slot.restarts),
                    slot.host,
                ]
                for slot in cluster.slots
            ],
        ),
    )
    if not output.is_json:
        _show_cluster(output, cluster)


def _show_cluster(output: Output, cluster: ClusterResponse) -> None:
    if cluster.nodes:
        output.show(None, _node_table(cluster.nodes))
    for slot in cluster.slots:
        if slot.detail:
            click.echo(f"Slot {slot.slot}: {slot.detail}")
    if cluster.trouble:
        click.echo(f"Nothing new is placed: {cluster.trouble}")


def _node_table(nodes: list[ClusterNode]) -> Table:
    return Table(
        ["Node", "Address", "State", "CPUs", "GPUs", "Memory"],
        [
            [
                node.node[:12],
                node.address,
                "alive" if node.is_alive else "dead",
                f"{node.cpus:g}",
                f"{node.gpus:g}",
                size_text(node.memory_bytes),
            ]
            for node in nodes
        ],
    )


@command.command("drain")
@click.argument("slot", type=click.IntRange(min=0))
@which_server
@with_output
def drain(output: Output, /, slot: int, **where: Any) -> None:
    """Move all work out of SLOT and keep it empty until `tinsmith cluster resume`.

    Works on the data folder of a server on this machine. Models move to other slots between two of
    their operations; samples that run there end there. The state is in `tinsmith cluster status`.
    """
    _change(output, slot, is_draining=True, **where)


@command.command("resume")
@click.argument("slot", type=click.IntRange(min=0))
@which_server
@with_output
def resume(output: Output, /, slot: int, **where: Any) -> None:
    """Put SLOT back into use."""
    _change(output, slot, is_draining=False, **where)


def _change(output: Output, slot: int, *, is_draining: bool, **where: Any) -> None:
    from tinsmith.server.engines.draining import Draining

    Draining(config_of(**where).data_dir).change(slot, is_draining=is_draining)
    if output.is_json:
        output.show_json({"slot": slot, "is_draining": is_draining})
    elif is_draining:
        click.echo(f"Slot {slot} is being emptied; see tinsmith cluster status.")
    else:
        click.echo(f"Slot {slot} is in use.")
