"""The places that a chaos run has for engines."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from chaos import places, ray_nodes
from tinsmith.engine.remote.authority import Authority


async def test_an_engine_that_hears_nothing_lives_on_beside_the_next(tmp_path: Path) -> None:
    """An engine that comes back when it was replaced is one of the faults, so the next one must not
    wait for its end. Here the network is silent, and both wait for somebody to answer."""
    place = places.ByHand(tmp_path, 1, random.Random(1), "mark", look_seconds=0.05)
    file, authority = tmp_path / "engines" / "slot-0.json", Authority()
    file.parent.mkdir()

    async def num_engines(number: int) -> None:
        async with asyncio.timeout(60):
            while len(ray_nodes.engines(tmp_path)) != number:  # noqa: ASYNC110  # other processes
                await asyncio.sleep(0.05)

    port = int(place.options[-1].rpartition("=")[2])
    server = await asyncio.start_server(_say_nothing, "127.0.0.1", port)
    async with server:
        await place.start()
        try:
            authority.credentials("127.0.0.1:1", 0, 1).save(file)
            await num_engines(1)
            authority.credentials("127.0.0.1:1", 0, 2).save(file)
            await num_engines(2)
        finally:
            await place.close()
    await num_engines(0)


def test_an_engine_that_ray_has_let_go_takes_no_node_along() -> None:
    """It ends a moment after its actor, and whoever was to lose its node looks away."""
    nodes = ray_nodes.RayNodes("", [], {}, process=None)  # type: ignore[arg-type]  # not asked
    with pytest.raises(OSError):  # as of a process that ends meanwhile
        nodes.lose_node_of(os.getpid())


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()
